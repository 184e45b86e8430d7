"""The lock server killed, frozen, slow and with a damaged file, by real processes.

Engines write a stamp of each emission, by the one monotonic clock of the machine: who has emitted when is read from
there, so that orders are checked and not guessed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.rigs.failover.locks import Engine, ServerRig, until

pytestmark = [pytest.mark.alone, pytest.mark.processes]
# A restarted server is back well within two thirds of this, also on a busy machine.
LONG_S = 60.0
# For tests that wait until it has passed. The holder's bound is two thirds of it: longer than a busy machine's pauses.
SHORT_S = 2.0
BOUND_SHARE = 2 / 3


class Story:
    """A server, an engine that holds the lock and emits, and one that waits."""

    def __init__(self, rig: ServerRig) -> None:
        self.rig, self.holder, self.waiter = rig, Engine(rig, "holder"), Engine(rig, "waiter")
        self.restarted_s = 0.0

    async def begin(self) -> None:
        await asyncio.gather(self.rig.start(), self.holder.start(), self.waiter.start())
        assert await self.holder.do("acquire") == "acquired"
        self.holder.order("emit")
        self.waiter.order("acquire")
        await self.until_one_waits()
        await until(lambda: self.emissions("holder"), "the holder emits")

    async def until_held_for_longer_than_the_bound(self) -> None:
        """Then it holds by pings that were answered, and no longer by the grant."""
        first_s = self.emissions("holder")[0]
        await until(lambda: self.emissions("holder")[-1] > first_s + self.rig.window_s, "it has held for a while")

    async def end(self) -> None:
        for engine in (self.holder, self.waiter):
            if engine._process is not None:
                await engine.kill()
        await self.rig.stop()

    async def until_one_waits(self) -> None:
        async def one_waits() -> bool:
            return await self.rig.waiting() == 1

        await until(one_waits, "the other waits")

    async def restart(self) -> None:
        self.restarted_s = time.monotonic()
        await self.rig.start()

    def emissions(self, who: str) -> list[float]:
        path = self.rig.directory / f"{who}.journal"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [float(line.removeprefix("emit ")) for line in lines if line.startswith("emit ")]

    async def waiter_leads(self) -> float:
        """The other is granted the lock; when it began to emit. The first one had stopped by then."""
        assert await self.waiter.answer() == "acquired"
        self.waiter.order("emit")
        first_s: float = (await until(lambda: self.emissions("waiter"), "the other emits"))[0]
        assert self.emissions("holder")[-1] < first_s, "both have emitted"
        return first_s

    async def waiter_leads_after_the_window(self) -> None:
        first_s = await self.waiter_leads()
        assert first_s >= self.restarted_s + self.rig.window_s, "granted inside the window"


@contextlib.asynccontextmanager
async def story(directory: Path, window_s: float, *, tcp: bool = False) -> AsyncIterator[Story]:
    begun = Story(ServerRig(directory, tcp=tcp, window_s=window_s))
    try:
        await begun.begin()
        yield begun
    finally:
        await begun.end()


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
async def test_server_killed_with_a_healthy_holder(tmp_path: Path, number: signal.Signals, tcp: bool) -> None:
    """No failover: the holder comes back in the window, never stops emitting, and the other goes on waiting."""
    async with story(tmp_path, LONG_S, tcp=tcp) as told:
        await told.rig.end(number)
        await told.restart()
        await until(lambda: "holder is back with the lock, grant 1" in told.rig.log.read_text(), "the holder is back")
        await told.until_one_waits()
        stamps = told.emissions("holder")
        await until(lambda: told.emissions("holder")[-1] > stamps[-1], "it emits on")
        assert "lost" not in (tmp_path / "holder.journal").read_text()
        # The place that came back is as good as the old one: its end is the other's grant, with no window.
        died_s = time.monotonic()
        await told.holder.kill()
        assert await told.waiter_leads() < died_s + LONG_S


async def test_server_killed_with_a_dead_holder(tmp_path: Path) -> None:
    """The holder dies while no server is there: the next one is granted the lock after the window, not before."""
    async with story(tmp_path, SHORT_S) as told:
        await told.rig.end(signal.SIGKILL)
        await told.holder.kill()
        await told.restart()
        await told.waiter_leads_after_the_window()


async def test_server_and_holder_killed_at_once(tmp_path: Path) -> None:
    """A server that died before it saw the holder's end: the restarted one gives the dead its window, then the next."""
    async with story(tmp_path, SHORT_S) as told:
        await told.rig.freeze()
        await told.holder.kill()
        await told.rig.end(signal.SIGKILL)
        await told.restart()
        await told.waiter_leads_after_the_window()


async def test_frozen_holder_keeps_its_place_until_it_is_killed(tmp_path: Path) -> None:
    """A living server does not take the lock from one that is silent, however long; its death frees it at once."""
    async with story(tmp_path, SHORT_S) as told:
        await told.holder.freeze()
        with pytest.raises(TimeoutError):
            await told.waiter.answer(bound_s=1.2 * SHORT_S)
        await told.holder.kill()
        await told.waiter_leads()


async def test_frozen_holder_that_wakes_after_its_bound_does_not_emit(tmp_path: Path) -> None:
    """Its event is set by the clock, ahead of anything its loop knows: not one emission, and the lock passes on."""
    async with story(tmp_path, SHORT_S) as told:
        await told.holder.freeze()
        frozen_s = time.monotonic()
        await until(lambda: time.monotonic() > frozen_s + SHORT_S, "its bound has passed")
        told.holder.signal(signal.SIGCONT)
        assert (await told.holder.answer()).startswith("lost")
        assert told.emissions("holder")[-1] < frozen_s
        await told.waiter_leads()


async def test_server_killed_with_a_frozen_holder(tmp_path: Path) -> None:
    """Another is granted the lock after the window; when the frozen one wakes it emits nothing."""
    async with story(tmp_path, SHORT_S) as told:
        await told.holder.freeze()
        frozen_s = time.monotonic()
        await told.rig.end(signal.SIGKILL)
        await told.restart()
        await told.waiter_leads_after_the_window()
        told.holder.signal(signal.SIGCONT)
        assert (await told.holder.answer()).startswith("lost")
        assert told.emissions("holder")[-1] < frozen_s
        assert told.waiter.process.returncode is None


async def test_grant_that_is_read_too_late_is_not_believed(tmp_path: Path) -> None:
    """Granted while it was frozen, and lost to another before it woke: it waits on, and is never a second holder."""
    async with story(tmp_path, SHORT_S) as told, told.rig.engine("third") as third:
        await told.waiter.freeze()
        await told.holder.kill()
        await until(lambda: "waiter has the lock, grant 2" in told.rig.log.read_text(), "it is granted all the same")
        await told.rig.end(signal.SIGKILL)
        await told.restart()
        assert await third.do("acquire") == "acquired"
        told.waiter.signal(signal.SIGCONT)
        await told.until_one_waits()
        with pytest.raises(TimeoutError):
            await told.waiter.answer(bound_s=0.1)
        assert await third.do("release") == "released"
        assert await told.waiter.answer() == "acquired"


async def test_server_slow_to_come_back(tmp_path: Path) -> None:
    """Later than the holder's bound: it has given up by itself, in time; the other is granted the lock afterwards."""
    async with story(tmp_path, SHORT_S) as told:
        await told.until_held_for_longer_than_the_bound()
        await told.rig.end(signal.SIGKILL)
        ended_s = time.monotonic()
        assert (await told.holder.answer()).startswith("lost")
        assert told.emissions("holder")[-1] < ended_s + SHORT_S * BOUND_SHARE
        await told.restart()
        await told.waiter_leads_after_the_window()


async def test_frozen_server_costs_the_holder_its_place_but_never_makes_two(tmp_path: Path) -> None:
    """Unanswered pings end the hold by its bound; the server, once it runs again, sees that and grants the next."""
    async with story(tmp_path, SHORT_S) as told:
        await told.until_held_for_longer_than_the_bound()
        await told.rig.freeze()
        frozen_s = time.monotonic()
        assert (await told.holder.answer()).startswith("lost")
        assert told.emissions("holder")[-1] < frozen_s + SHORT_S * BOUND_SHARE
        told.rig.thaw()
        await told.waiter_leads()


@pytest.mark.parametrize("damage", ["torn", "garbage", "empty", "edited"])
async def test_state_file_damaged(tmp_path: Path, damage: str) -> None:
    """Nobody can be verified: the holder is told at once that it has lost, the next one waits for a full window."""
    async with story(tmp_path, SHORT_S) as told:
        await told.rig.end(signal.SIGKILL)
        whole = told.rig.record.read_bytes()
        damaged = {
            "torn": whole[: len(whole) // 2],
            "garbage": bytes(range(256)),
            "empty": b"",
            "edited": whole.replace(b'"last_grant":1', b'"last_grant":2'),
        }
        told.rig.record.write_bytes(damaged[damage])
        await told.restart()
        assert (await told.holder.answer()).startswith("lost")
        await told.waiter_leads_after_the_window()
        assert "the holder of the lock is unknown" in told.rig.log.read_text()


async def test_state_file_missing(tmp_path: Path) -> None:
    """Nobody is on record: free at once. A holder whose file was removed is told so, and one holds in the end."""
    async with story(tmp_path, LONG_S) as told:
        await told.rig.end(signal.SIGKILL)
        told.rig.record.unlink()
        await told.restart()
        assert (await told.holder.answer()).startswith("lost")
        assert await told.waiter.answer() == "acquired"
        assert time.monotonic() < told.restarted_s + LONG_S, "there was nobody to wait for"
        owner = await told.rig.lock("a look").owner()
        assert owner is not None
        assert owner.pid == told.waiter.pid
