"""The lease behind `FailoverLock`: the holder has stopped before etcd can give the lock to anyone else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.failover.etcd_lock import MARGIN_PER_LEASE
from holdfast.failover.lost_event import LostEvent
from tests.rigs.failover.locks import BOUND_S, Engine, EtcdRig, until
from tests.rigs.manual_clock import ManualClock

pytestmark = [pytest.mark.alone, pytest.mark.processes]


@pytest.fixture(params=["own"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EtcdRig]:
    """One with an etcd of its own, to be killed or frozen."""
    rig = EtcdRig(tmp_path, own=request.param == "own")
    await rig.start()
    try:
        yield rig
    finally:
        await rig.stop()


def stamps(rig: EtcdRig, engine: Engine, what: str) -> list[float]:
    path = rig.directory / f"{engine.who}.journal"
    lines = path.read_text().splitlines() if path.exists() else []
    return [float(line.split()[1]) for line in lines if line.startswith(f"{what} ")]


@pytest.mark.parametrize("rig", ["shared"], indirect=True)
async def test_holder_frozen_past_its_lease_emits_nothing_when_it_wakes(rig: EtcdRig) -> None:
    """SIGSTOP until another is elected, then SIGCONT: by its own journal it emitted nothing after the margin began."""
    async with rig.engine("frozen") as holder:
        assert await holder.do("acquire") == "acquired"
        holder.order("emit")
        await until(lambda: len(stamps(rig, holder, "emit")) > 20, "it emits")
        await holder.freeze()
        frozen_s = time.monotonic()
        other = rig.lock("other")
        elected = await asyncio.wait_for(other.acquire(), BOUND_S)
        elected_s = time.monotonic()
        assert elected_s - frozen_s > rig.lease_s * MARGIN_PER_LEASE, "the lease had not passed"
        holder.thaw()
        assert await holder.answer() == "lost"
        emitted, (lost_s,) = stamps(rig, holder, "emit"), stamps(rig, holder, "lost")
        assert emitted[-1] <= frozen_s
        assert lost_s >= elected_s
        assert not elected.is_set()
        await other.release()


async def test_etcd_killed_ends_the_holder_before_its_lease_can_have_passed(rig: EtcdRig) -> None:
    """No renewal is answered any more: the holder stops by its own clock, within the lease less the margin."""
    async with rig.engine("alone") as holder:
        assert await holder.do("acquire") == "acquired"
        holder.order("emit")
        await until(lambda: len(stamps(rig, holder, "emit")) > 20, "it emits")
        began_s = time.monotonic()
        rig.server.process.kill()
        rig.server.process.wait(BOUND_S)
        ended_s = time.monotonic()
        assert await holder.answer() == "lost"
        emitted, (lost_s,) = stamps(rig, holder, "emit"), stamps(rig, holder, "lost")
        # Renewed at the very latest in the moment of the end.
        assert emitted[-1] - ended_s < rig.lease_s * (1 - MARGIN_PER_LEASE)
        assert lost_s - began_s > 0.5, "one failed renewal is no reason to stop"


async def test_etcd_back_in_time_costs_nothing(rig: EtcdRig, caplog: pytest.LogCaptureFixture) -> None:
    """A short outage of etcd, longer than a renewal's time to be answered and shorter than the holder's: it holds on,
    and has not lost the lock later."""
    lock = rig.lock("patient")
    lost = await asyncio.wait_for(lock.acquire(), BOUND_S)
    assert isinstance(lost, LostEvent)
    rig.server.freeze()
    await until(lambda: "not renewed" in caplog.text, "a renewal that is not answered")
    rig.server.thaw()
    before_s = lost.deadline_s
    assert before_s is not None
    await until(lambda: (lost.deadline_s or 0.0) > before_s, "it is renewed")
    assert not lost.is_set()
    await lock.release()


async def test_acquire_outlasts_an_etcd_that_is_not_there(rig: EtcdRig) -> None:
    """Whoever waits goes on waiting while etcd is away, and is granted the lock when it is back; cancelling works."""
    lock, other = rig.lock("patient"), rig.lock("impatient")
    rig.server.freeze()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(other.acquire(), 0.2)
    assert await asyncio.wait_for(other.owner(), BOUND_S) is None
    waiting = asyncio.create_task(lock.acquire())
    await asyncio.sleep(0)
    rig.server.thaw()
    assert not (await asyncio.wait_for(waiting, BOUND_S)).is_set()
    await asyncio.wait_for(lock.release(), BOUND_S)


# -- the event itself


async def test_event_is_set_by_the_clock_even_if_the_loop_is_late() -> None:
    """Whoever asks after the deadline is told, though no timer has had its turn."""
    clock = ManualClock(asyncio.get_running_loop().time())
    lost = LostEvent(clock, clock.now_s + 3600)
    assert not lost.is_set()
    clock.now_s += 3600
    assert lost.is_set()
    assert not lost.extend(clock.now_s + 10)
    assert await asyncio.wait_for(lost.wait(), BOUND_S)


async def test_event_wakes_its_waiters_at_the_deadline_and_not_before() -> None:
    """An extension holds; one into the past does not bring the end nearer."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    lost = LostEvent(ManualClock(began_s), began_s + 0.05)
    assert lost.extend(began_s + 0.15)
    assert lost.extend(began_s)
    await asyncio.wait_for(lost.wait(), BOUND_S)
    assert loop.time() - began_s >= 0.149
    unbounded = LostEvent(ManualClock(began_s))
    assert not unbounded.is_set()
    unbounded.set()
    assert unbounded.is_set()
