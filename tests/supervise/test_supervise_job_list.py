"""Jobs that come and go while their supervisor runs, with real, tiny processes."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from holdfast.spec.jobs import Job
from holdfast.spec.launch import FrontendLaunch, Launch, VaultLaunch, WorkerLaunch, role_of
from holdfast.supervise.job_list import JobList, kept_jobs
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.machine import Phase
from holdfast.supervise.records import Record, launch_path, read_record, run_dir, set_aside, write_record
from holdfast.testing.waiting import BOUND_S, until
from tests.rigs.supervise.supervisors import BECOME_READY, SERVE, World, job


def changing(world: World, supervisor: Supervisor) -> JobList:
    return JobList(supervisor, world.state_dir)


async def ready(supervisor: Supervisor, *names: str) -> dict[str, int]:
    """Their pids, once they are."""
    slots = supervisor.slots
    assert await supervisor.wait(lambda: all(slots[name].life.phase is Phase.READY for name in names), BOUND_S)
    return {name: slots[name].life.pid for name in names}


async def test_a_job_comes_and_goes_beside_others(world: World) -> None:
    """The others keep their processes; of the one that went nothing is left, here or on disk."""
    supervisor = await world.up(job("a"))
    change, before = changing(world, supervisor), await ready(supervisor, "a")
    await change.add([job("b")])
    await ready(supervisor, "b")
    assert await change.remove(["b"])
    assert list(supervisor.slots) == ["a"]
    assert await ready(supervisor, "a") == before
    assert sorted(path.name for path in run_dir(world.state_dir).iterdir()) == ["a.json", "a.launch"]
    assert [line for line in world.told if line.startswith("b ")][-1] == "b stopped (SIGTERM)"


async def test_what_is_there_is_not_added_twice(world: World) -> None:
    """Whoever says it again, at once or later, starts nobody."""
    supervisor = await world.up()
    change = changing(world, supervisor)
    await asyncio.gather(change.add([job("a")]), change.add([job("a")]))
    before = await ready(supervisor, "a")
    await change.add([job("a"), job("b")])
    assert (await ready(supervisor, "a", "b"))["a"] == before["a"]


async def test_memory_comes_before_its_engines_and_goes_after(world: World) -> None:
    """As it does for those that a supervisor begins with."""
    supervisor = await world.up()
    change = changing(world, supervisor)
    checked = 'grep -q ready "$1/run/v.json" || exit 9; ' + SERVE
    await change.add([job("e", checked), job("v", "sleep 0.2; " + SERVE, "vault")])
    await ready(supervisor, "e", "v")
    assert supervisor.slots["e"].life.failures == 0, world.told
    world.told.clear()
    assert await change.remove(["v", "e"])
    assert [line.split()[0] for line in world.told] == ["e", "v"]


async def test_one_that_crashes_or_is_refused_can_be_taken_away(world: World) -> None:
    """It is not tried again, and its name is free."""
    supervisor = await world.up()
    change = changing(world, supervisor)
    await change.add([job("a", "exit 7")])
    assert await supervisor.wait(lambda: supervisor.slots["a"].life.failures >= 2, BOUND_S)
    assert await change.remove(["a", "nobody"])
    assert (supervisor.slots, read_record(world.state_dir, "a")) == ({}, None)
    await change.add([job("a")])
    await ready(supervisor, "a")


async def test_removed_twice_at_once_is_removed(world: World) -> None:
    """Whoever says it again waits for the same end."""
    supervisor = await world.up(job("a"))
    change = changing(world, supervisor)
    assert await asyncio.gather(change.remove(["a"]), change.remove(["a"])) == [True, True]
    assert supervisor.slots == {}


async def test_who_comes_is_watched_and_who_is_gone_is_not(world: World) -> None:
    """One that was added and is stopped by a signal is condemned, as any other; nobody watches one that left."""
    supervisor = await world.up(watched=True)
    change = changing(world, supervisor)
    await change.add([job("a")])
    pid = (await ready(supervisor, "a"))["a"]
    os.kill(pid, signal.SIGSTOP)
    assert await supervisor.wait(lambda: supervisor.slots["a"].life.pid not in (0, pid), BOUND_S), world.told
    assert any("a is stopped" in line for line in world.told)
    assert list(world.watching.watched) == ["a"]
    assert await change.remove(["a"])
    async with asyncio.timeout(BOUND_S):
        while world.watching.watched:
            await asyncio.sleep(0.01)


# -- the next supervisor


async def test_the_next_supervisor_goes_on_with_the_same_jobs(world: World) -> None:
    """Those that live are adopted, those that died meanwhile are started again; one that was to leave, and did not at
    the first word, is told again and does."""
    first = await world.up(job("a"))
    stubborn = job("leaves", "trap 'trap - TERM; >$1/heard' TERM; " + BECOME_READY + "while :; do sleep 1; done")
    await changing(world, first).add([job("lives"), job("dies"), stubborn])
    before = await ready(first, "lives", "dies", "leaves")
    leaving = asyncio.create_task(changing(world, first).remove(["leaves"]))
    assert await first.wait(lambda: first.slots["leaves"].life.phase is Phase.STOPPING, BOUND_S)
    await until((world.state_dir / "heard").exists, "the first word to be heard")
    leaving.cancel()
    world.lose(first)
    os.kill(before["dies"], signal.SIGKILL)
    set_aside(world.state_dir, "dies")  # as far as the first one came

    jobs = [replace(one, stop_bound_s=0.2) for one in kept_jobs(world.state_dir)]
    assert sorted(one.name for one in jobs) == ["a", "dies", "lives"]
    second = await world.start(*jobs)
    after = await ready(second, "a", "dies", "lives")
    assert after["lives"] == before["lives"]
    assert after["dies"] != before["dies"]
    assert await second.wait(lambda: second.slots["leaves"].life.phase is Phase.OVER, BOUND_S)
    assert not launch_path(world.state_dir, "leaves").exists()


@pytest.mark.parametrize(
    "launch", [WorkerLaunch(name="x"), VaultLaunch(name="x"), FrontendLaunch(name="x", drain_s=9.0)], ids=role_of
)
def test_a_kept_job_is_the_one_that_was_added(tmp_path: Path, launch: Launch) -> None:
    """With its probes, beats, group and bounds, from what is on disk alone; of settings that are not known here at
    least the name and the role."""
    one = Job.of(launch)
    write_record(tmp_path, Record("x", one.role, 0, 0, state="backing off"))
    launch_path(tmp_path, "x").write_bytes(one.settings)
    assert kept_jobs(tmp_path) == [one]
    odd = msgspec.json.encode({"nobody": "knows"})
    launch_path(tmp_path, "x").write_bytes(odd)
    assert [(kept.name, kept.role, kept.settings) for kept in kept_jobs(tmp_path)] == [("x", one.role, odd)]
