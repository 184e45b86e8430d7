"""Two workers, each with a standby, against a real `holdfast up`: a killed engine's streams go on at its own standby,
where their KV is; and they outlive two engine deaths while the store is away."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from holdfast.testing.clients import Stream
from holdfast.testing.processes import kill_group
from holdfast.testing.rig import EngineSeen
from holdfast.testing.supervised import Supervised

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.timeout(400)]

BOUND_S = 120.0  # a shared machine may take many times what a calm one does
STREAMS = 6
NOTES = 2  # to a client that waits: one every 5 s, so that between two of them a hold of 4 s is over
BLOCK_TOKENS = 16
# Words enough for many blocks; each prompt begins in its own way, so that no worker knows another stream's KV.
PROMPT = " ".join(["the tide comes in and goes out again"] * 40)


class TwoWorkers(Supervised):
    """`holdfast up --workers 2`, each worker with one standby."""

    def __init__(self, *options: str) -> None:
        super().__init__("--workers", "2", "--standbys", "1", "--vault-gib", "0.1", *options)

    def restored(self) -> bool:
        ready = [engine for engine in self.engines() if engine.facts["ready"]]
        return sorted(engine.state for engine in ready) == ["active", "active", "standby", "standby"]


def incidents(up: Supervised) -> list[dict[str, Any]]:
    done = up.run("incidents", "--json")
    assert done.returncode == 0, done.stderr
    return [incident for incident in json.loads(done.stdout) if incident["epoch"]]


def group_of(engine: EngineSeen) -> str:
    return engine.name[:-1]


def test_streams_of_a_killed_engine_go_on_at_its_own_standby() -> None:
    """Prompts are long and a prefill takes seconds, so that the other worker is the worse place: no stream goes there,
    no more than a block of each is computed again, and `holdfast get incidents` says both."""
    with TwoWorkers("--sim-ttft-ms", "4000", "--sim-tpot-ms", "100") as up:
        streams = [up.stream(f"{number}: {PROMPT}", 100) for number in range(STREAMS)]
        for stream in streams:
            stream.wait_tokens(3)
        active = [engine for engine in up.engines() if engine.state == "active"]
        killed = max(active, key=lambda engine: engine.facts["requests_total"])
        (other,) = [engine for engine in active if engine is not killed]
        on_it = killed.facts["requests_total"]
        assert on_it >= 1
        kill_group(killed.pid)
        for stream in streams:
            assert stream.answer(BOUND_S).wrong == ""
        (still,) = [engine for engine in up.engines() if engine.name == other.name]
        assert still.facts["requests_total"] == other.facts["requests_total"], "a stream went to the other worker"
        (leads,) = [e for e in up.engines() if e.state == "active" and group_of(e) == group_of(killed)]
        assert leads.facts["requests_total"] == on_it

        def told() -> dict[str, Any]:
            return next(reversed(incidents(up)), {})

        up.wait_until(lambda: told().get("to") == {leads.name: on_it}, "what the incident's streams did", BOUND_S)
        assert told()["streams"] == on_it
        assert told()["recomputed"] <= on_it * BLOCK_TOKENS
        assert f"{on_it} stream" in up.run("incidents").stdout
        assert f"at {leads.name}" in up.run("incidents").stdout


class WithAStoreApart(Supervised):
    """`holdfast up --store`, so that no supervisor replaces a store that is stopped."""

    def __init__(self, *options: str) -> None:
        super().__init__("--vault-gib", "0.1", *options)
        self._store = f"unix://{self.folder}/apart.sock"
        self._options = (*self._options, "--store", self._store)

    def begin(self) -> None:
        self.start("apart", self.command("store", "--address", self._store, "--name", "apart"))
        super().begin()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.processes["apart"].kill()
            self.processes["apart"].wait(BOUND_S)


@pytest.mark.long
def test_streams_outlive_two_engine_deaths_while_the_store_is_away() -> None:
    """The second successor came while the store was away, so that no frontend knows of it: streams wait for the store's
    return, past the time for which they are held otherwise."""
    with WithAStoreApart("--sim-tpot-ms", "50", "--hold-s", "4") as up:
        streams = [up.stream(f"{number}: how are you?", 300) for number in range(STREAMS)]
        for stream in streams:
            stream.wait_tokens(3)
        store = up.processes["apart"]
        store.send_signal(signal.SIGSTOP)
        try:
            up.wait_until(lambda: up.health().get("store") == "lost", "the frontend to lose its store", BOUND_S)
            for _ in range(2):
                before = up.active()
                kill_group(before.pid)
                up.wait_restored(before.pid, BOUND_S)
            waited = [stream.so_far().waiting for stream in streams]
            up.wait_until(lambda: all_waited(streams, waited, NOTES), "the hold to be over", BOUND_S)
        finally:
            store.send_signal(signal.SIGCONT)
        for stream in streams:
            assert stream.answer(BOUND_S).wrong == ""


def all_waited(streams: list[Stream], since: list[int], notes: int) -> bool:
    """Return whether each client was told so many times more that it waits, or has its end."""
    return all(
        stream.so_far().waiting >= before + notes or stream.so_far().error or stream.so_far().done
        for stream, before in zip(streams, since, strict=True)
    )
