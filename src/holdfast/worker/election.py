"""A standby's part in the election: wait for the lock, look after oneself meanwhile, and step out when asked to.

Always true: at most one `acquire` is under way; a lock won in the very moment of being asked to stop is given back; the
canary of a standby is never older than `canary_s` and one look; nothing here delays the moment the lock is won.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from holdfast.core.procfs import read_process
from holdfast.core.tasks import beside, first
from holdfast.failover.lock import FailoverLock

# While standing by: how often the canary and the lock's holder are looked at.
LOOK_S = 1.0
# A holder that the kernel shows stopped, or stuck in the kernel, for so many looks will not let go by itself.
STUCK_LOOKS = 3


class Election:
    """One engine's way to the lock, again and again. `check` raises if this engine must not stand for election."""

    def __init__(self, lock: FailoverLock, check: Callable[[], Awaitable[None]], canary_s: float) -> None:
        self._lock = lock
        self._check = check
        self._canary_s = canary_s
        self._checked_at_s = asyncio.get_running_loop().time()
        self._poked = asyncio.Event()
        self._stuck = 0
        self.asleep = False
        self.woken_s = 0.0  # when it was woken last, and has not led since; 0: it was not
        self.rested = asyncio.Event()  # it has no lock, nor is it about to step back from one
        self.rested.set()
        self.blocked = ""  # why nobody here can take over, as far as can be seen

    async def won(self, stop: asyncio.Event) -> asyncio.Event | None:
        """Wait for the lock; the event says that it is lost. None: asked to stop."""
        while not stop.is_set():
            if self.asleep:
                await self.poked_or(stop)
                continue
            async with beside(self._lock.acquire(), "acquire") as acquiring:
                await self._stand_by(acquiring, stop)
            if acquiring.cancelled():
                continue
            lost = acquiring.result()
            self.blocked = ""
            if not stop.is_set() and not self.asleep:
                self.rested.clear()
                return lost
            await self._lock.release()
        return None

    async def _stand_by(self, acquiring: asyncio.Future[asyncio.Event], stop: asyncio.Event) -> None:
        while not (acquiring.done() or stop.is_set() or self.asleep):
            async with beside(self._look(), "look") as looking:
                while not (looking.done() or acquiring.done() or stop.is_set() or self.asleep):
                    await first((stop.wait(), self._poked.wait()), (acquiring, looking))
                    self._poked.clear()
                if looking.done():
                    looking.result()

    async def _look(self) -> None:
        """Is this engine still right, and can the lock's holder ever let go?"""
        await asyncio.sleep(LOOK_S)
        loop = asyncio.get_running_loop()
        if loop.time() - self._checked_at_s > self._canary_s:
            self._checked_at_s = loop.time()
            await self._check()
        holder = await self._lock.owner()
        stat = read_process(holder.pid) if holder is not None and holder.pid else None
        if holder is None or stat is None or stat.start_ticks != holder.start_ticks or stat.state not in "TtD":
            self._stuck, self.blocked = 0, ""
            return
        self._stuck += 1
        if self._stuck >= STUCK_LOOKS:
            who = f"{holder.who}, pid {holder.pid}, state {stat.state}"
            self.blocked = f"failover impossible here: the lock is held by {who}, which does not end"

    # -- wishes

    def poke(self) -> None:
        """Something changed that whoever waits here should look at."""
        self._poked.set()

    def rest(self) -> None:
        self.asleep = True
        self.poke()

    def left(self) -> None:
        """It led, and the lock is given back."""
        self.rested.set()

    def take_part(self, now_s: float) -> None:
        if self.asleep:
            self.woken_s = now_s
        self.asleep = False
        self.poke()

    async def poked_or(self, *events: asyncio.Event) -> None:
        """Wait for a poke or one of these."""
        await first([self._poked.wait(), *(event.wait() for event in events)])
        self._poked.clear()
