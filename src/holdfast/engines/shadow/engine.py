"""An engine made for memory that outlives it, a *tenant*, living in a vault's: together they are a shadow engine.

A tenant makes tokens; all that makes a `ShadowEngine` of it is here: memory wiring, load, check, wake, rest, what it
tells, its further processes, and the proof of what it took over. If its steps are made in another process, that one is
a seat (`ranks`), and the tenant talks to it.

Always true: before `wake` a tenant writes private memory only; what a wake needs was made while it stood by and was
tried by the canary, so nothing is waited for between the vault's grant and `begin`; a wake returns with every seat
under the epoch; the last outcome of a check stands while nothing is mapped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from holdfast.core.errors import HoldfastError
from holdfast.core.requests import GenerateRequest
from holdfast.core.tasks import Tasks
from holdfast.engines.contract import Capabilities, Engine, EngineEvents, Limits, Progress, Woken
from holdfast.engines.paged.canary import Dropped
from holdfast.engines.shadow.loading import WeightsPlan
from holdfast.engines.shadow.memory import VaultMemory
from holdfast.engines.shadow.pool import Owned
from holdfast.engines.shadow.proving import CANARY, Canary, Stage
from holdfast.engines.shadow.ranks import HOLD_S, Ranks
from holdfast.engines.shadow.told import Told
from holdfast.kv.geometry import Geometry
from holdfast.kv.resumes import Resumes
from holdfast.memory.client.pool_mapping import Home, PoolMapping
from holdfast.spec.engines import Place


class Tenant(Engine, Protocol):
    """An engine of this process, less its memory. `load` prepares it (threads, not weights), then come `settle`,
    `check`, and any number of (`begin`, `end`); it takes work between these two. Its weights are its memory's to verify
    and to renew."""

    weights: WeightsPlan
    # Of the KV pool, with the weights' identity in it: equal ones can adopt each other's blocks. Known after `settle`.
    geometry: Geometry
    private_bytes: int  # of memory behind the pool's pages that is its own, for canaries
    home: Home | None = None  # where the pages must be mapped, if its tensors cannot move; it has no `private_bytes`

    @property
    def canary(self) -> Canary:
        """Its known answer may be found by the first `check`."""

    @property
    def resumes(self) -> Resumes:
        """Since the last `begin`."""

    async def check(self, mapping: PoolMapping, dropped: Callable[[], bool]) -> str:
        """Answer the canary's question, alone, in private memory: what is to blame if it was wrong, or nothing. Nothing
        that is mapped moves meanwhile. Raise Dropped if `dropped`, which is asked between two of its steps, says so."""

    async def begin(self, owned: Owned) -> None:
        """Open the books over a pool that is ours now."""

    async def end(self) -> list[int]:
        """No step after the one under way; the streams that were left. The pages are touched no more."""

    @property
    def books(self) -> AbstractContextManager[object]:
        """Held while the pool's books change: for one whose steps are made in another thread than the loop's."""
        return nullcontext()

    async def verify(self) -> str:
        return ""

    async def renew(self) -> None:
        return

    async def settle(self, memory: VaultMemory, ranks: Ranks) -> None:
        """Start its further processes, if it has any, and have them loaded; beside the load of the weights here."""
        return

    def room(self) -> None:
        """Blocks came free: whoever waits for some may ask again."""
        return

    def submit_alone(self, stream: int, request: GenerateRequest) -> None:
        """As `submit`, in steps that no other stream is in, where an answer would depend on them."""
        self.submit(stream, request)


T = TypeVar("T", bound=Tenant)

log = logging.getLogger("holdfast.engine")


class VaultEngine(Generic[T]):
    """A `ShadowEngine` around a tenant."""

    def __init__(self, tenant: T, place: Place) -> None:
        self.tenant, self.place = tenant, place
        self._told = told = Told(self._passed, self._prove_again)
        self.ranks = Ranks(place, told)
        self.memory = VaultMemory(place, tenant.private_bytes, _Inhabitant(self))
        self.gpu_fence = self.memory.gpu_fence
        self._wrong = "it was never tried"  # the last canary's outcome
        self._hurries = False  # a takeover is due: a check under way is dropped
        self._tasks = Tasks("shadow engine")

    def __repr__(self) -> str:
        return f"<{self.tenant!r}, {self.memory!r}>"

    @property
    def limits(self) -> Limits:
        return self.tenant.limits

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.tenant.capabilities, shadow=True, weights=self.memory.client.weights_name)

    @property
    def last_epoch(self) -> int:
        return self.memory.client.last_epoch

    @property
    def resumes(self) -> Resumes:
        return self.tenant.resumes

    @property
    def proven(self) -> bool:
        return self._told.proving.over

    @property
    def proving(self) -> bool:
        return self._told.proving.under_way

    def submit(self, stream: int, request: GenerateRequest) -> None:
        self.tenant.submit(stream, request)

    def cancel(self, stream: int) -> None:
        self.tenant.cancel(stream)

    def withdraw(self, stream: int) -> bool:
        return self.tenant.withdraw(stream)

    def progress(self) -> Progress:
        return replace(self.tenant.progress(), load=self.memory.client.load)

    def ping(self, answer: Callable[[], None]) -> None:
        self.tenant.ping(answer)

    # -- loading and standing by

    async def load(self, events: EngineEvents) -> None:
        self._told.events = events
        tenant, memory, ranks = self.tenant, self.memory, self.ranks
        await tenant.load(self._told)
        settling = self._tasks.spawn(tenant.settle(memory, ranks), "settle")
        await asyncio.gather(memory.load(tenant.weights), settling)
        await memory.stand_by(tenant.geometry, tenant.home)
        if await self.check():
            return  # its caller checks too, and says so
        if self.place.unmapped:
            await asyncio.gather(memory.sleep(), ranks.sleep())

    async def check(self) -> str:
        """Asleep there is nothing to read: the last outcome stands. One that was begun goes on, even if nobody waits
        for it any more: what it reads must stay. A check of an engine that was right before is dropped when the owner
        of the pool is gone: the takeover does not wait for it, and the last outcome stands."""
        self._hurries = False
        if not self.memory.asleep:
            await self.memory.settled.wait()
            await asyncio.shield(self._tasks.spawn(self._check(), "check"))
        return self._wrong

    def _is_dropped(self) -> bool:
        return self._hurries and not self._wrong

    def hurry(self) -> None:
        """A takeover is due."""
        self._hurries = True

    async def _check(self) -> None:
        try:
            self._wrong = await (self._answer_together() if self.ranks.count else self._answer())
        except Dropped:
            log.info("a check was dropped: the owner is gone, or this engine takes over")

    async def _answer_together(self) -> str:
        async with self.ranks.turn:
            try:
                await self.ranks.order("hold", HOLD_S)
            except TimeoutError:
                return f"the memory of a rank was not at rest within {HOLD_S:g} s"
            try:
                wrong = await self._answer()
            except Dropped:
                await self.ranks.order("go_on", HOLD_S)
                raise
            await self.ranks.order("go_on", HOLD_S)
            return wrong

    async def _answer(self) -> str:
        async with self.memory.still:
            if self.memory.asleep:  # it was put to sleep a moment ago
                return self._wrong
            mapping = self.memory.pool.mapping
            assert mapping is not None, "private memory is mapped from the first load on"
            return await self.tenant.check(mapping, self._is_dropped)

    async def let_go(self) -> None:
        async with self.ranks.turn:
            await asyncio.gather(self.memory.sleep(), self.ranks.let_go())

    async def stand_up(self) -> str:
        async with self.ranks.turn:
            await asyncio.gather(self.memory.stand_up(), self.ranks.stand_up())
        return await self.check()

    async def stop(self) -> None:
        self._told.proving.end(alive=False)
        await self.tenant.stop()
        await self._tasks.stop()
        self.ranks.stop()
        await self.memory.close()

    # -- awake

    async def wake(self, epoch: int, pass_fds: tuple[int, ...] = ()) -> Woken:
        self.hurry()
        owned = await (self._own_together(epoch, pass_fds) if self.ranks.count else self.memory.own(epoch))
        await self.tenant.begin(owned)
        return Woken(owned.blocks, owned.reason, owned.marks)

    async def _own_together(self, epoch: int, pass_fds: tuple[int, ...]) -> Owned:
        ranks = self.ranks
        if ranks.turn.locked():
            self._told.loading("a canary is under way on every rank")
        async with ranks.turn:
            if ranks.guests:  # at this vault: there must be an epoch to join
                owned = await self.memory.own(epoch)
                await ranks.wake(epoch, pass_fds)
            else:  # they agree with one another on the way
                owned, _ = await asyncio.gather(self.memory.own(epoch), ranks.wake(epoch, pass_fds))
        return owned

    def prove(self) -> None:
        canary = self.tenant.canary
        self._told.proving.begin(canary)
        self.tenant.submit(CANARY, canary.request)

    def _prove_again(self) -> None:
        """In a turn of the loop of its own: an engine hears of it in the middle of a step."""
        asyncio.get_running_loop().call_soon(self._ask_again)

    def _ask_again(self) -> None:
        if self._told.proving.stage is not Stage.DOUBTED:
            return  # the leadership is over
        canary = self.tenant.canary
        self.tenant.cancel(CANARY)
        self._told.proving.begin(canary)
        try:
            self.tenant.submit_alone(CANARY, canary.request)
        except HoldfastError as error:
            self._told.cannot_ask(error.message)

    def serve_on(self) -> None:
        self._told.serve_on()

    def _passed(self) -> None:
        if (owned := self.memory.owned) is not None:
            with self.tenant.books:
                owned.pool.canary_passed()

    async def verify(self) -> str:
        here, *others = await asyncio.gather(self.memory.verify(), self.ranks.verify())
        wrong = [here, *(f"rank {rank}: {said}" for rank, said in enumerate(others[0], 1) if said)]
        return "; ".join(filter(None, wrong))

    async def renew(self) -> None:
        """On every rank, since they are one set; then it is tried, as after any load."""
        await asyncio.gather(self.memory.renew(), self.ranks.renew())
        self._wrong = "it was not tried since its weights were loaded anew"

    async def rest(self, *, believed: bool = True) -> None:
        self._told.proving.end(alive=believed)
        if not believed and (owned := self.memory.owned) is not None:
            with self.tenant.books:
                owned.pool.distrust()
        left = await self.tenant.end()
        if left:
            self._told.closed(left)
        await self.ranks.rest()
        await self.memory.rest()


class _Inhabitant:
    """What the memory tells."""

    def __init__(self, engine: VaultEngine[Any]) -> None:
        self._engine, self._told = engine, engine._told
        self.fatal, self.loading = self._told.fatal, self._told.loading

    @property
    def books(self) -> AbstractContextManager[object]:
        books: AbstractContextManager[object] = self._engine.tenant.books
        return books

    def owner_gone(self, epoch: int) -> None:
        self._engine.hurry()
        self._told.owner_gone(epoch)

    def memory(self, why: str) -> None:
        self._engine.ranks.doubt(0, why)

    def room(self) -> None:
        self._engine.tenant.room()
