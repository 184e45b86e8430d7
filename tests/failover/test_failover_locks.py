"""The contract of every election lock, by real processes that are really killed; `KINDS` of the rig names the locks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.failover.lock import FailoverLock
from holdfast.testing.processes import fd_count
from tests.rigs.failover.locks import BOUND_S, KINDS, Engine, LockRig, until

pytestmark = [pytest.mark.alone, pytest.mark.processes]
ENGINES = 8
RETURNS = 3  # of winners who stand in line again, before one is killed
# Longer than any lock's poll: a second winner would have shown itself.
SHOWN_S = 0.06
# A lock that is free is granted much sooner, one that is held not within this.
REFUSED_S = 0.3
# What was given up is gone by then, and not merely forgotten: sooner than a lease could have passed.
GIVEN_UP_S = 15.0


@pytest.fixture(params=list(KINDS))
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LockRig]:
    rig = KINDS[request.param](tmp_path)
    await rig.start()
    try:
        yield rig
    finally:
        await rig.stop()


@pytest.fixture
async def locks(rig: LockRig) -> AsyncIterator[list[FailoverLock]]:
    """Three engines' locks in this process."""
    made = [rig.lock(f"engine {number}") for number in range(3)]
    try:
        yield made
    finally:
        for lock in made:
            await lock.release()


async def granted(lock: FailoverLock, bound_s: float = BOUND_S) -> asyncio.Event:
    return await asyncio.wait_for(lock.acquire(), bound_s)


async def refused(lock: FailoverLock) -> None:
    with pytest.raises(TimeoutError):
        await granted(lock, REFUSED_S)


async def test_acquire_and_release(locks: list[FailoverLock]) -> None:
    """Granted to one who asks, freed by release, granted again; the event is set by the release, and never cleared."""
    first, second, _ = locks
    await first.release()  # of what is not held: nothing happens
    lost = await granted(first)
    assert not lost.is_set()
    await first.release()
    assert lost.is_set()
    again = await granted(second)
    await second.release()
    anew = await granted(first)
    assert not anew.is_set()
    assert lost.is_set()
    assert again.is_set()


async def test_contention(locks: list[FailoverLock]) -> None:
    """Others wait as long as it is held, and each gets it in the end, one at a time."""
    first, *others = locks
    lost = await granted(first)
    await asyncio.gather(*(refused(other) for other in others))
    waits = [asyncio.create_task(granted(other)) for other in others]
    await asyncio.sleep(0)
    assert not lost.is_set()
    await first.release()
    done, waiting = await asyncio.wait(waits, timeout=BOUND_S, return_when=asyncio.FIRST_COMPLETED)
    assert (len(done), len(waiting)) == (1, 1)
    assert not done.pop().result().is_set()
    winner = others[next(index for index, wait in enumerate(waits) if wait.done())]
    await winner.release()
    assert not (await waiting.pop()).is_set()


async def test_holder_sigkilled(rig: LockRig, locks: list[FailoverLock]) -> None:
    """SIGKILL of the holder is enough; whoever waits is granted the lock without anybody's help."""
    async with rig.engine("dead") as holder:
        assert await holder.do("acquire") == "acquired"
        waiting = asyncio.create_task(granted(locks[0]))
        await asyncio.sleep(0)
        assert not waiting.done()
        await holder.kill()
        locks[0].nudge()
        assert not (await waiting).is_set()


async def test_waiter_sigkilled(rig: LockRig, locks: list[FailoverLock]) -> None:
    """A waiter that dies is never granted the lock: the next one who lives is."""
    lost = await granted(locks[0])
    async with rig.engine("dead") as waiter:
        waiter.order("acquire")
        assert await waiter.do("owner") != "null"  # it has looked, so it waits
        await waiter.kill()
        assert not lost.is_set()
        await locks[0].release()
        await granted(locks[1])


async def test_owner(rig: LockRig, locks: list[FailoverLock]) -> None:
    """Nobody, then the one who holds it, by name and process, as others see it and it itself; nobody after release."""
    assert await locks[0].owner() is None
    async with rig.engine("engine 7") as holder:
        assert await holder.do("acquire") == "acquired"
        seen = await locks[0].owner()
        assert seen is not None
        assert seen.engine == "engine 7"
        assert seen.pid in (holder.pid, 0)
        assert seen.since_unix_s > 0
        assert json.loads(await holder.do("owner"))["who"] == "engine 7"
        assert await holder.do("release") == "released"
        assert await locks[0].owner() is None


@pytest.mark.long
async def test_race_of_eight(rig: LockRig) -> None:
    """Eight processes race, again and again, also after a winner's SIGKILL: exactly one is inside each time."""
    async with contextlib.AsyncExitStack() as stack:
        rigs = [rig.engine(f"engine {number}") for number in range(ENGINES)]
        engines = await asyncio.gather(*(stack.enter_async_context(engine) for engine in rigs))
        answers = {}
        for engine in engines:
            engine.order("enter")
            answers[asyncio.create_task(engine.answer(6 * BOUND_S))] = engine
        winners: list[Engine] = []
        for turn in range(RETURNS + ENGINES):
            winners.append(winner := await one_winner(answers))
            if turn == RETURNS:
                (rig.directory / "inside").unlink()  # first: the next may be inside before we see this one's end
                await winner.kill()
                continue
            assert await winner.do("leave") == "left"
            if turn < RETURNS:
                winner.order("enter")
                answers[asyncio.create_task(winner.answer(6 * BOUND_S))] = winner
        assert len({winner.who for winner in winners[RETURNS:]}) == ENGINES, "each who waited got it in the end"


async def one_winner(answers: dict[asyncio.Task[str], Engine]) -> Engine:
    done, _ = await asyncio.wait(answers, timeout=BOUND_S, return_when=asyncio.FIRST_COMPLETED)
    more, _ = await asyncio.wait(answers, timeout=SHOWN_S, return_when=asyncio.ALL_COMPLETED)
    assert [answer.result() for answer in done | more] == ["inside"]
    return answers.pop(done.pop())


async def test_rank_that_outlives_its_parent(rig: LockRig, locks: list[FailoverLock]) -> None:
    """A rank lives on after its parent's SIGKILL. Where it inherited the lock, the lock stays closed until it ends.

    A connection or a lease is the parent's alone: that lock comes free, and elects somebody while the rank still can
    write. This is why the vault admits: its registry of processes keeps the fence closed for all kinds of locks (see
    test_rank_of_the_old_epoch_that_lives_keeps_the_fence_closed)."""
    async with rig.engine("parent") as parent:
        before = int(await parent.do("rank"))
        try:
            assert await parent.do("acquire") == "acquired"
            after = int(await parent.do("rank"))
            await parent.kill()
            if rig.ranks_keep_it:
                await refused(locks[0])
                os.kill(after, signal.SIGKILL)
                await refused(locks[0])  # the one that was started before the lock was held keeps it as well
                os.kill(before, signal.SIGKILL)
            await granted(locks[0])
            assert rig.ranks_keep_it or os.kill(before, 0) is None  # it lives
        finally:
            for rank in (before, after):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)


async def test_cancelled_acquire_leaks_nothing(rig: LockRig, locks: list[FailoverLock]) -> None:
    """Waits cancelled at every moment leave no descriptor, no task, no waiter and no lease behind."""
    holder, lock, third = locks
    await until(lambda: nobody_waits(rig), "what earlier tests killed is gone")
    await granted(holder)
    fds, tasks = fd_count(), len(asyncio.all_tasks())
    for moment in range(12):
        waiting = asyncio.create_task(lock.acquire())
        await asyncio.wait([waiting], timeout=0.002 * moment)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await until(lambda: fd_count() <= fds and len(asyncio.all_tasks()) <= tasks, "everything is closed")
    await until(lambda: nobody_waits(rig), "no waiter is left")
    await holder.release()
    await granted(third)


async def nobody_waits(rig: LockRig) -> bool:
    return await rig.waiting() == 0


async def test_acquire_cancelled_while_it_is_granted_holds_nothing(rig: LockRig, locks: list[FailoverLock]) -> None:
    """Whichever comes first, the grant or the cancel: who was cancelled does not keep the lock."""
    holder, lock, third = locks
    await until(lambda: nobody_waits(rig), "what earlier tests killed is gone")
    for moment in range(8):
        await granted(holder)
        waiting = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0.005)
        await holder.release()
        lock.nudge()
        await asyncio.wait([waiting], timeout=0.001 * moment)
        waiting.cancel()
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            assert not waiting.result().is_set()
            await lock.release()
        await granted(third, GIVEN_UP_S)
        await third.release()
        # A lease that etcd grants after its revoke has come holds no key, and runs out.
        await until(lambda: nobody_waits(rig), "nothing is left behind")


async def test_acquiring_again_does_not_deadlock(rig: LockRig, locks: list[FailoverLock]) -> None:
    """The holder is answered at once with the same event; another object of its process waits like anybody else."""
    first, second, _ = locks
    lost = await granted(first)
    fds = fd_count()
    assert await granted(first) is lost
    await until(lambda: fd_count() <= fds, "no other descriptor")  # a renewal may have one for a moment
    waiting = asyncio.create_task(granted(second))
    await asyncio.sleep(0)
    assert not waiting.done()
    await first.release()  # one release is enough, and the loop was free to make it
    assert not (await waiting).is_set()
    await refused(first)


async def test_lock_taken_away_under_its_holder_is_lost(rig: LockRig, locks: list[FailoverLock]) -> None:
    """Its file or key removed: another can be elected, and the first one learns that it no longer is."""
    if not rig.can_be_recreated:
        pytest.skip("there is no file or key that anybody could take away: the connection is the lock")
    first, second, _ = locks
    lost = await granted(first)
    await rig.take_away()
    elected = await granted(second)
    await asyncio.wait_for(lost.wait(), BOUND_S)
    assert not elected.is_set()
    await first.release()
    assert not elected.is_set(), "giving up what was lost must not touch the new holder's"
    await refused(first)
    await second.release()
    await granted(first)
