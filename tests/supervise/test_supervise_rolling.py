"""Rollouts carried out: a real store, a real supervisor, and tiny processes in place of frontends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from holdfast.core.tasks import beside
from holdfast.rollout.machine import RolloutPhase
from holdfast.rollout.records import (
    OwnedElsewhere,
    RevisionResult,
    RolloutStatus,
    change_desired,
    deleted,
    paused,
    read_status,
)
from holdfast.spec.jobs import Job
from holdfast.spec.launch import FrontendLaunch
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.local import Machine
from holdfast.spec.manifest.whole import whole
from holdfast.store.contract import Snapshot
from holdfast.supervise.job_list import JobList
from holdfast.supervise.records import read_records
from holdfast.supervise.rollout_controller import RolloutController
from tests.rigs.supervise.rollouts import HERE, WAIT_S, Fast, Site, text

pytestmark = pytest.mark.alone


async def test_a_new_version_replaces_the_old_one_by_one(site: Site) -> None:
    """Never fewer serve than were asked for, and never more are there than one beyond; then the old ones are gone."""
    async with site.carried_out() as rolling:
        await site.apply(text("one"))
        await site.in_place(rolling, 1)
        old = site.ready
        assert len(old) == 2
        site.ready_min, site.most = 99, 0
        await site.apply(text("two"))
        await site.in_place(rolling, 2)
        assert (len(site.ready), site.ready_min, site.most) == (2, 2, 3)
        assert not old.keys() & site.ready.keys()
        fates = {number: entry.result for number, entry in (await site.history()).items()}
    assert fates[1] is RevisionResult.IN_PLACE
    assert any("revision 2 is in place" in line for line in site.told)


async def test_more_and_fewer_replace_nobody(site: Site) -> None:
    """How many there are is no part of a revision."""
    async with site.carried_out() as rolling:
        await site.apply(text("one"))
        await site.in_place(rolling, 1)
        old = site.ready
        assert (await site.apply(text("one", 3))).revision == 1
        await site.until(lambda: len(site.ready) == 3, "one more")
        assert old.items() <= site.ready.items()
        await site.apply(text("one", 1))
        await site.until(lambda: len(site.supervisor.slots) == 1, "two fewer")


@pytest.mark.parametrize(("fault", "why"), [("BAD", "times in a row"), ("MUTE", "did not come to serve")])
async def test_a_bad_version_is_undone_and_touches_nobody(site: Site, fault: str, why: str) -> None:
    """One replica of it was tried; those that served before do so all the while, and history says why."""
    async with site.carried_out() as rolling:
        await site.apply(text("one"))
        await site.in_place(rolling, 1)
        old = site.ready
        site.ready_min, site.most = 99, 0
        await site.apply(text(fault).replace("400", "400" if fault == "BAD" else "40"))  # one crashes, one is late
        await site.until(lambda: rolling.state.undone == 2, "the undo")
        await site.in_place(rolling, 1)
        await site.until(lambda: len(site.supervisor.slots) == 2, "the bad one to be gone")
        assert (site.ready, site.ready_min, site.most) == (old, 2, 3)
        entries = await site.history()
        while entries[2].result is RevisionResult.ROLLING:
            await asyncio.sleep(0.05)
            entries = await site.history()
    assert entries[2].result is RevisionResult.UNDONE
    assert why in entries[2].why


async def test_a_paused_rollout_waits_and_goes_on(site: Site) -> None:
    """Nobody is started while it is paused."""
    async with site.carried_out() as rolling:
        await site.apply(text("one"))
        await site.in_place(rolling, 1)
        await change_desired(site.store, "chat", paused("chat", on=True))
        await site.apply(text("two"))
        await site.until(lambda: rolling.state.desired_number == 2, "the wish to be heard")
        assert len(rolling.state.replicas) == 2
        await change_desired(site.store, "chat", paused("chat", on=False))
        await site.in_place(rolling, 2)


async def test_what_is_deleted_leaves_nothing(site: Site) -> None:
    """No process, no record on disk, no key in the store."""
    async with site.carried_out() as rolling:
        await site.apply(text("one"))
        await site.in_place(rolling, 1)
        await change_desired(site.store, "chat", deleted("chat", 2.0))
        async with asyncio.timeout(WAIT_S):
            await site.task
        assert site.supervisor.slots == {}
        assert not list((site.world.state_dir / "run").glob("*.launch"))
        async for event in site.store.watch("v1/"):
            assert event == Snapshot({})
            break


PAIR = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: chat}
spec:
  services:
    Worker: {componentType: worker, failover: {enabled: true}, resources: {limits: {gpu: 1}}}
"""
PATIENT = 'while ! [ -e "$1/go" ]; do sleep 0.01; done; f="$1/run/$2.json"; sed -i s/starting/ready/ "$f"; sleep 1000'


async def test_a_replica_that_was_half_started_is_completed(site: Site) -> None:
    """Its supervisor is killed when its memory has begun and its engines have not: the next one starts them, with the
    memory that is there."""
    folder, command = site.world.state_dir, site.world._command

    def patient(job: Job, *where: Path) -> Sequence[str]:
        return ["sh", "-c", PATIENT, "sh", str(folder), job.name] if job.role == "vault" else command(job, *where)

    site.world._command = patient
    async with site.carried_out():
        await site.apply(PAIR)
        await site.until(lambda: [record for record in read_records(folder) if record.pid], "its memory")
        (memory,) = read_records(folder)
        assert memory.role == "vault"
    (folder / "go").touch()
    async with site.carried_out():
        await site.until(lambda: len(site.ready) == 3, "its engines")
        assert site.ready[memory.name] == memory.pid


async def test_whoever_waits_can_read_how_far_it_is(site: Site) -> None:
    """By whom, of which wish, and in words; when nobody carries it out any more nothing stands there."""

    async def told(met: Callable[[RolloutStatus], object], what: str) -> RolloutStatus:
        found: list[RolloutStatus] = []
        end_s = time.monotonic() + WAIT_S
        while not (found and met(found[-1])):
            assert time.monotonic() < end_s, f"waited for {what}: {found[-1:]}"
            await asyncio.sleep(0.01)
            found += filter(None, [await read_status(site.store, "chat")])
        return found[-1]

    async with site.carried_out() as rolling:
        asked = await site.apply(text("one"))
        done = await told(lambda one: one.report is not None and one.report.is_done, "the first revision")
        assert (done.pid, done.serial, done.trouble) == (HERE.pid, asked.serial, "")
        asked = await site.apply(text("one", 3))
        more = await told(lambda one: one.serial == asked.serial and one.report, "one more to be asked for")
        assert not more.report.is_done, "though nothing is replaced"
        await told(lambda one: one.report.is_done, "one more")
        assert rolling.state.phase is RolloutPhase.STEADY
        kept = await site.history()
        assert [kept[number].manifest for number in kept] == [text("one")], "more replicas are no revision"
    assert await read_status(site.store, "chat") is None


async def test_it_goes_on_after_its_supervisor_died(site: Site) -> None:
    """Wherever that was: the next one keeps what is right, and replaces nobody twice."""
    async with site.carried_out() as rolling:
        await site.apply(text("one"))
        await site.in_place(rolling, 1)
    seen: set[str] = set()
    await site.apply(text("two"))
    for life in range(20):
        async with site.carried_out() as rolling:
            before = rolling.state.replicas
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S if life == 19 else 0.1 + 0.15 * life):
                    await site.in_place(rolling, 2)
                    break
            seen |= rolling.state.replicas.keys() | before.keys()
    assert len(site.ready) == 2
    assert len(seen) <= 4, f"two old ones and two new ones: {seen}"


async def test_two_who_carry_it_out_are_one(site: Site) -> None:
    """Whichever of them writes second what both have read ends, and has done nothing of it."""
    async with site.carried_out() as rolling:
        await site.apply(text("one"))
        await site.in_place(rolling, 1)
        changing = JobList(site.supervisor, site.world.state_dir)
        how = {"status": HERE, "tell": print, "clock": Fast()}
        other = RolloutController("chat", site.another, site.supervisor, changing, rolling.context, **how)
        async with beside(other.run(), "another") as task:
            await site.apply(text("two"))
            await asyncio.wait([task, site.task], timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            (ended,) = [one for one in (task, site.task) if one.done()]
            assert isinstance(ended.exception(), OwnedElsewhere)


async def test_a_deployment_whose_name_begins_alike_is_another(site: Site) -> None:
    """Its processes are not taken for replicas of a service that is wanted no more: they run on, whatever becomes of
    this one, and this one is in place without them."""
    other = check(text("v1", 1).replace("name: chat", "name: chat-more").encode()).manifest
    assert other is not None
    machine = Machine(site.world.state_dir, {"HOME": "/"})
    launches = whole(other, machine, (), lambda _engine, source, model: (source, model))
    jobs = [Job.of(launch) for launch in launches if isinstance(launch, FrontendLaunch)]
    async with site.carried_out() as rolling:
        await JobList(site.supervisor, site.world.state_dir).add(jobs)
        await site.until(lambda: len(site.ready) == 1, "the other")
        ((name, pid),) = site.ready.items()
        await site.apply(text("v1"))
        await site.in_place(rolling, 1)
        assert {one.service for one in rolling.state.replicas.values()} == {"Frontend"}
        assert len(rolling.state.replicas) == 2
        await change_desired(site.store, "chat", deleted("chat", 1.0))
        await site.until(site.task.done, "its end")
        assert site.ready == {name: pid}
