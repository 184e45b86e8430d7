"""A fleet on Ray whose own head, or Ray's, is killed with SIGKILL."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from holdfast.testing.processes import state_of
from tests.rigs.roles.ray_cluster import BOUND_S, SIM, STREAMS, RayRig, answers, made_cluster, note

pytestmark = [pytest.mark.processes, pytest.mark.alone]

GCS_AWAY_S = 20  # Ray's default is a minute; then it ends all of its own


class Foreground(RayRig):
    """`up` in a terminal: what it starts is tied to it."""

    def up(self) -> None:
        self.start("up", self.command(*self.up_words()))

    def agent_pids(self) -> set[int]:
        return {node["agent_pid"] for node in self.nodes().values()}

    def is_ready(self, name: str, before: int) -> bool:
        """Another process of this name than that one."""
        record = self.record(name)
        return record.get("state") == "ready" and record["pid"] not in (0, before)

    def host_totals(self) -> set[int]:
        return {node["host"]["total_bytes"] for node in self.nodes().values()}

    def kill_up(self) -> None:
        """With all that is tied to it."""
        tied = [record["pid"] for record in self.records().values()]
        self.processes["up"].kill()
        self.processes["up"].wait(BOUND_S)
        self.wait_until(lambda: all(state_of(pid) in ("", "Z") for pid in tied), "what was tied to it to end", BOUND_S)


def test_who_starts_it_again_finds_the_same_replicas_and_who_does_not_leaves_nothing(cluster: Any) -> None:
    """Its process `ray` is killed: nobody notices. `up` is killed: its replicas live on, and the next one serves with
    the same processes, also with other settings than the first had. Killed again, `down` takes all that it had off the
    cluster."""
    with Foreground(cluster) as place:
        place.told("deploy", "chat", *SIM, "--wanted", "2", "--max", "2", "--per-node", "1", "--wait")
        right, before, serving = place.ask("chat", 1), place.actor_pids(), place.ready("chat")
        agents, ray = place.agent_pids(), place.record("ray")["pid"]
        os.kill(ray, signal.SIGKILL)
        place.wait_until(lambda: place.is_ready("ray", ray), "another process `ray`", BOUND_S)
        assert (place.agent_pids(), place.actor_pids()) == (agents, before)
        place.kill_up()
        assert set(serving) <= set(place.listed("actors", "ALIVE"))
        began_s = time.monotonic()
        place.host_gib = 0.25
        place.begin()
        place.wait_until(lambda: place.ready("chat") == serving, "the same replicas", BOUND_S)
        place.wait_until(place.health, "its frontend", BOUND_S)
        assert place.ask("chat", 1) == right
        note("`up` killed and started again", {"answered_s": time.monotonic() - began_s})
        assert place.actor_pids() == before
        place.wait_until(lambda: place.host_totals() == {2**28}, "agents that were told the later settings", BOUND_S)
        place.kill_up()
        assert "taken away" in place.told("down")
        assert place.listed("actors", "ALIVE") == {}
        assert place.listed("placement-groups", "CREATED") == {}
        assert not place.pids()
        assert "nothing runs" in place.told("down")


def test_streams_outlive_rays_control_store_and_then_it_is_told_what_is_missing() -> None:
    """While Ray's control store is away requests go on, since none passes through Ray. When Ray has ended its nodes for
    that, commands say that no node is there and why, and `down` leaves nothing."""
    with made_cluster(1, gcs_rpc_server_reconnect_timeout_s=str(GCS_AWAY_S)) as cluster, RayRig(cluster) as place:
        place.told("deploy", "chat", *SIM, "--wait")
        unbroken = answers(place.streams())
        streams = place.streams()
        for one in streams:
            one.wait_tokens(5)
        from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER

        os.kill(cluster.head_node.all_processes[PROCESS_TYPE_GCS_SERVER][0].process.pid, signal.SIGKILL)
        more = place.ask("chat", 1)
        broken = answers(streams)
        assert [one.wrong for one in broken] == [""] * STREAMS
        assert [one.tokens for one in broken] == [one.tokens for one in unbroken]
        assert len(more) == 40
        place.wait_until(lambda: "no node is there" in place.told("models"), "its nodes to be missed", BOUND_S)
        says = f"--address {cluster.address}: no Ray cluster answers there"
        place.wait_until(lambda: says in " ".join(place.run("ps").stdout.split()), "the reason", BOUND_S)
        place.told("down")
        assert not place.pids()
