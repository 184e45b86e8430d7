"""A rank of an engine beside its leader: a seat with a vault, a device and a share of every block of its own.

It decides nothing. Orders come to its event loop; steps to a thread, as words on a socket of their own (`frames`); what
it found of its pool goes to a third one (`table`). Always true: private blocks are computed on only between `hold` and
`go_on`, pool blocks only between `wake` and `rest`; what the leader's index says is in this one's before anybody hears
of it; any failure ends the process, and with it the engine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.engines.shadow.acts import Act, done_again
from holdfast.engines.shadow.memory import VaultMemory
from holdfast.engines.shadow.seat import Order, Orders, Seat, SeatInhabitant, Tether, end, ends_when_emptied, orders_of
from holdfast.engines.shadow.table import RanksTable
from holdfast.spec.engines import Place


class RankLaunch(msgspec.Struct, frozen=True):
    """Descriptors that its leader has left open for it."""

    tether: Tether
    steps: int  # its end of the steps' socket pair
    table: int  # of another
    work: int  # a file with what it is told, written by the leader

    def told(self) -> bytes:
        with os.fdopen(self.work, "rb") as file:
            file.seek(0)
            return file.read()


class Rank(Seat):
    """`place` is this rank's own. Besides a seat's orders it has those that concern its own memory."""

    def __init__(self, launch: RankLaunch, orders: Orders, rank: int, place: Place, private_bytes: int = 0) -> None:
        self.rank, self.place = rank, place
        self.steps = socket.socket(fileno=launch.steps)
        # Devices are written side by side: a rank waits for the writers of its own device only.
        lock_dir = Path(place.vault_socket).parent / f"rank-{rank}"
        lock_dir.mkdir(exist_ok=True)
        self.memory = VaultMemory(place, private_bytes, SeatInhabitant(orders), lock_dir)
        ends_when_emptied(self.memory)
        table = socket.socket(fileno=launch.table)
        table.setblocking(False)
        self.memory.peers = RanksTable(rank, table, place.wake_s)
        self._orders = orders

    def orders(self) -> dict[str, Order]:
        own = self.hello, self.verify, self.renew
        return orders_of(self) | {each.__name__: each for each in own}

    async def hello(self) -> None:
        """Everything is imported."""

    async def sleep(self) -> None:
        await self.memory.sleep()

    async def let_go(self) -> None:
        await self.memory.sleep()

    async def stand_up(self) -> None:
        await self.memory.stand_up()

    async def hold(self) -> None:
        await self.memory.settled.wait()
        await self.memory.still.acquire()

    async def go_on(self) -> None:
        self.memory.still.release()

    async def wake(self, epoch: int) -> None:
        await self.memory.own(epoch)

    async def fence(self) -> None:
        await self.memory.gpu_fence.wait()
        if self.memory.owned is not None:
            self.memory.owned.pool.gpu_fence_passed()

    async def rest(self) -> None:
        await self.memory.rest()

    async def verify(self) -> str:
        return await self.memory.verify()

    async def renew(self) -> None:
        await self.memory.renew()

    # -- steps

    def begin_steps(self) -> None:
        # A daemon: a sum that waits for a dead peer must not keep the process from ending.
        threading.Thread(target=self._make_steps, name="steps", daemon=True).start()

    @abstractmethod
    def make_steps(self) -> None:
        """In its thread: whatever the leader tells, until it is gone."""

    def _make_steps(self) -> None:
        try:
            self.make_steps()
        except Exception as error:  # the thread's root: after it no step can be believed
            why = f"a step failed: {type(error).__name__}: {error}"
            with contextlib.suppress(OSError):  # the leader is gone too
                self._orders.note("end", why)
            end(why)

    def do_again(self, acts: Sequence[Act]) -> None:
        if acts:
            owned = self.memory.owned
            assert owned is not None, "only an owner's index changes"
            done_again(acts, owned.pool.index, owned.pool.epoch)
