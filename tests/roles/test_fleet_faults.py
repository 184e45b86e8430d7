"""Whatever of a fleet fails, with real processes on two or three nodes: controls, the store, an agent, a whole node.
What is wanted comes to be, nobody is started twice, who lives is the same process, and streams go on token for token.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from holdfast.fleet.actions import Verb
from holdfast.fleet.desired_changes import scale_to, update_desired
from holdfast.testing.processes import freeze
from holdfast.testing.waiting import in_thread, until
from tests.rigs.fleet.clients import Crowd
from tests.rigs.fleet.fleet_rig import FleetRig
from tests.rigs.fleet.watch import Watch

BOUND_S = 120.0  # on a loaded machine
AWAY_S = 20.0  # that the store does not answer
STREAMS = 6
SIM = ("--engine", "sim", "--standbys", "0", "--sim-ttft-ms", "5")
CHAT = (*SIM, "--vault-gib", "0.1", "--memory-gib", "0.2", "--sim-tpot-ms", "40")
REFERENCE = (*SIM, "--vault-gib", "0.05", "--memory-gib", "0.08", "--sim-tpot-ms", "0", "--node", "n1")


# -- controls


@pytest.mark.long
def test_controls_die_at_every_step_and_two_decide_at_once() -> None:
    """Each step of a placement: the desired model is written, the order is, the replica is being started. And with a
    rival that has another lock. Then half of it is lost with its node, for which there is room elsewhere."""
    with FleetRig("--controls", "2", nodes=2) as fleet:
        fleet.told("deploy", "chat", *CHAT, "--wanted", "0", "--max", "4")
        asyncio.run(_controls(fleet))


async def _controls(fleet: FleetRig) -> None:
    async with Watch(fleet, 0.5) as watch:
        steps: list[Callable[[int], bool]] = [
            lambda count: True,
            lambda count: len(_placed(watch)) == count,
            lambda count: len(watch.replicas("chat")) == count,
        ]
        pids: dict[str, int] = {}
        for count, is_there in enumerate(steps, 1):
            await update_desired(watch.store, "local", "chat", scale_to("chat", count))
            await until(lambda: is_there(count), f"step {count}", BOUND_S)  # noqa: B023 - it is over before the next
            _kill_controls(fleet)
            await watch.until_hot("chat", count)
            assert _placed(watch) == {f"ModelActor:chat:r{serial}" for serial in range(1, count + 1)}, "nobody twice"
            now = fleet.engine_pids()
            assert pids.items() <= now.items(), "who was there is the same"
            assert len(now) == count
            pids = now
        crowd = Crowd(fleet.port)
        url, lock = f"unix://{fleet.folder}/run/store.sock", f"flock://{fleet.folder}/rival.lock"
        own = ("--status-address", "tcp://127.0.0.1:0", "--name", "rival")
        rival = fleet.command("control", "--deployment", "local", "--store", url, "--lock", lock, *own)
        process = fleet.start("rival", rival)
        await until(lambda: fleet.record("rival").get("state") == "ready", "a rival that leads, too", BOUND_S)
        async with crowd.asking(2, lambda number: _asked(crowd, number)):
            await update_desired(watch.store, "local", "chat", scale_to("chat", 4))
            await watch.until_hot("chat", 4)
        assert not [one for one in crowd.asked if one.lost or one.wrong]
        now = fleet.engine_pids()
        assert pids.items() <= now.items()
        assert len(now) == 4, "each is there once"
        process.kill()
        stayed = {name: pid for name, pid in now.items() if name in fleet.processes_of("n1")}
        async with crowd.asking(2, lambda number: _asked(crowd, number)):
            await in_thread(fleet.kill_node, "n2")
            await until(lambda: not watch.is_there("n2"), "its loss to be seen", BOUND_S)
            await watch.until_hot("chat", 4)
        assert not [one for one in crowd.asked if one.lost or one.wrong]
        there = fleet.engine_pids("n1")
        assert stayed.items() <= there.items()
        assert len(there) == 4


def _kill_controls(fleet: FleetRig) -> None:
    for one in fleet.records().values():
        if one["role"] == "control":
            with contextlib.suppress(ProcessLookupError):  # it is being started again
                os.kill(one["pid"], signal.SIGKILL)


async def _asked(crowd: Crowd, number: int) -> None:
    await crowd.ask("chat", number)


def _placed(watch: Watch) -> set[str]:
    """Whoever was ever asked for."""
    return {action.name for _, action in watch.orders.values() if action.verb is Verb.PLACE}


# -- the store, an agent, a node


@pytest.mark.long
def test_the_store_an_agent_and_a_node_are_lost() -> None:
    """With a replica on each of three nodes, which have room for no other."""
    with FleetRig(nodes=3, devices=1, gib=0.3) as fleet:
        fleet.told("deploy", "chat", *CHAT, "--wanted", "3", "--wait")
        fleet.told("deploy", "reference", *REFERENCE, "--wait")
        asyncio.run(_lost(fleet))


async def _lost(fleet: FleetRig) -> None:
    crowd = Crowd(fleet.port)
    async with Watch(fleet, 0.3) as watch:
        await watch.until_hot("chat", 3)
        pids = fleet.engine_pids()
        await _streaming(crowd, watch, 600, lambda: _store_away(fleet))
        await watch.until_hot("chat", 3)
        assert fleet.engine_pids() == pids
        await _streaming(crowd, watch, 250, lambda: _agent_killed(fleet, watch))
        await watch.until_hot("chat", 3)
        assert fleet.engine_pids() == pids
        elsewhere = {name: pid for name, pid in pids.items() if name not in fleet.processes_of("n3")}
        await _streaming(crowd, watch, 150, lambda: in_thread(fleet.kill_node, "n3"))
        await until(lambda: not watch.is_there("n3"), "its loss to be seen", BOUND_S)
        await in_thread(fleet.join, "n3")
        await watch.until_hot("chat", 3)
        now = fleet.engine_pids()
        assert elsewhere.items() <= now.items()
        assert len(now) == len(pids)
        assert not _placed(watch), "its own next agent brings it back, and nobody else is asked for"


async def _streaming(crowd: Crowd, watch: Watch, tokens: int, deed: Callable[[], Awaitable[None]]) -> None:
    """Streams that run while something is done end as those of nobody else's trouble."""
    async with asyncio.TaskGroup() as tasks:
        for number in range(STREAMS):
            tasks.create_task(crowd.ask("chat", number, tokens))
        await until(lambda: sum(one.running for one in watch.replicas("chat")) == STREAMS, "streams", BOUND_S)
        await deed()
    for number in range(STREAMS):
        await crowd.ask("reference", number, tokens)
        got, right = (crowd.first[model, number, tokens].tokens for model in ("chat", "reference"))
        assert len(got) == tokens
        assert got == right
    assert not [one for one in crowd.asked if one.lost or one.wrong]


async def _store_away(fleet: FleetRig) -> None:
    pid = fleet.record("store")["pid"]
    freeze(pid)
    await asyncio.sleep(AWAY_S)
    with contextlib.suppress(ProcessLookupError):  # its supervisor may have replaced it
        os.kill(pid, signal.SIGCONT)


async def _agent_killed(fleet: FleetRig, watch: Watch) -> None:
    before = watch.nodes["n2"].pid
    await in_thread(fleet.kill_agent, "n2")
    await in_thread(fleet.join, "n2")
    await until(lambda: watch.nodes["n2"].pid != before, "the next agent's word", BOUND_S)
