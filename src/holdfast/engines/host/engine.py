"""`VaultEngine` turns a `HostedEngine` into a `FailoverEngine`, whose memory outlives its process.

The hosted engine makes tokens. `VaultEngine` does everything else: memory, load, check, wake, standby, events, further
processes (`ranks`), and the proof that adopted KV is right.

Always true:
- Before `wake` a hosted engine writes private memory only.
- A standby prepares everything that a wake needs, and the canary has tested it. So nothing is waited for between the
  vault's grant and `begin`.
- When a wake returns, every rank works under the epoch.
- While nothing is mapped, the result of the last check counts.
- After a takeover no token is sent before the canary's first token was right. After a wrong answer none is sent until a
  second answer was right or `serve_on` was called.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from holdfast.core.errors import HoldfastError
from holdfast.core.requests import GenerateRequest, Output
from holdfast.core.tasks import Tasks
from holdfast.engines.contract import Capabilities, Engine, EngineEvents, Limits, Progress, Woken
from holdfast.engines.host.loading import WeightsPlan
from holdfast.engines.host.memory import VaultMemory
from holdfast.engines.host.pool import Owned
from holdfast.engines.host.proving import CANARY, Canary, Proving, Stage
from holdfast.engines.paged.canary import Dropped
from holdfast.engines.ranks.leader import HOLD_S, RankProcesses
from holdfast.kv.geometry import Geometry
from holdfast.kv.pool import Resumes
from holdfast.memory.client.pool import Home, PoolMapping
from holdfast.spec.engines import FailoverSettings

log = logging.getLogger("holdfast.engine")


class ProvedEvents(EngineEvents):
    """Passes events of the hosted engine, its memory and its ranks on to the worker; holds output while the adopted KV
    is unproven."""

    def __init__(self, engine: VaultEngine[Any]) -> None:
        self.events: EngineEvents  # from `load` on
        self._engine = engine
        self.proving = Proving(engine.on_proved)
        self._doubts: dict[int, str] = {}  # by rank: why its memory may be damaged

    def outputs(self, outputs: list[Output]) -> bool:
        proving = self.proving
        if proving.under_way:
            before, outputs = proving.stage, proving.filter_outputs(outputs)
            if proving.stage is not before:
                self._tell_stage(proving.stage)
        return self.events.outputs(outputs) if outputs else True

    def _tell_stage(self, stage: Stage) -> None:
        if stage is Stage.DOUBTED:
            log.warning("the canary's answer was wrong after taking over: it is asked again before anything is sent")
            # Later in the event loop: the answer came in the middle of a step.
            asyncio.get_running_loop().call_soon(self._engine.ask_again)
        elif stage is Stage.DISPROVED:
            self.events.disproved("the canary's answer was wrong after taking over, twice")

    def cannot_ask(self, why: str) -> None:
        """Count a canary that could not be submitted as answered wrongly."""
        log.warning("the canary could not be asked: %s", why)
        self.proving.miss()
        self._tell_stage(self.proving.stage)

    def closed(self, streams: list[int]) -> None:
        if others := [stream for stream in streams if stream != CANARY]:
            self.events.closed(others)

    def fatal(self, why: str) -> None:
        self.events.fatal(why)

    def memory(self, why: str, rank: int = 0) -> None:
        """Store why this rank's memory may be damaged ("": it is verified); report the first such rank."""
        self._doubts[rank] = why
        doubts = [f"rank {at}: {doubt}" if at else doubt for at, doubt in self._doubts.items() if doubt]
        self.events.memory(doubts[0] if doubts else "")

    def loading(self, why: str) -> None:
        self.events.loading(why)

    def owner_gone(self, epoch: int) -> None:
        self._engine.drop_check()
        self.events.owner_gone(epoch)

    @property
    def books(self) -> AbstractContextManager[object]:
        books: AbstractContextManager[object] = self._engine.hosted.books
        return books

    def room(self) -> None:
        self._engine.hosted.room()


class HostedEngine(Engine, Protocol):
    """An engine in this process, without its memory. `load` starts its threads but loads no weights; then come
    `prepare`, `check`, and any number of (`begin`, `end`). It takes work between `begin` and `end`. `VaultMemory`
    verifies and renews its weights."""

    weights: WeightsPlan
    # The KV pool's, with the weights' identity: engines of equal geometry can adopt each other's blocks. Known after
    # `prepare`.
    geometry: Geometry
    private_bytes: int  # size of the private memory behind the pool's pages, for canaries
    home: Home | None = None  # where the pages must be mapped, if its tensors cannot move; then no `private_bytes`

    @property
    def canary(self) -> Canary:
        """Return the canary; the first `check` may find its known answer."""

    @property
    def resumes(self) -> Resumes:
        """Return the counts since the last `begin`."""

    async def check(self, mapping: PoolMapping, dropped: Callable[[], bool]) -> str:
        """Run the canary alone in private memory; return the likely cause of a wrong answer, or "". Mappings do not
        move meanwhile. Call `dropped` between two steps, and raise Dropped if it returns True."""

    async def begin(self, owned: Owned) -> None:
        """Start to schedule streams on this pool."""

    async def end(self) -> list[int]:
        """Start no further step, leave the pages alone after the current one, and return the unfinished streams."""

    @property
    def books(self) -> AbstractContextManager[object]:
        """Return the lock to hold while the pool's bookkeeping changes, for an engine with a step thread."""
        return nullcontext()

    async def verify(self) -> str:
        return ""

    async def renew(self) -> None:
        return

    async def prepare(self, memory: VaultMemory, ranks: RankProcesses) -> None:
        """Start its rank processes, if any, and have them load. Runs while this process loads its weights."""
        return

    def room(self) -> None:
        """Retry requests that wait for blocks: some came free."""
        return

    def submit_alone(self, stream: int, request: GenerateRequest) -> None:
        """Submit a request that must run without other streams, if its answer could depend on the batch."""
        self.submit(stream, request)


T = TypeVar("T", bound=HostedEngine)


class VaultEngine(Generic[T]):
    def __init__(self, hosted: T, failover: FailoverSettings) -> None:
        self.hosted, self.failover = hosted, failover
        self._events = ProvedEvents(self)
        self.ranks = RankProcesses(failover, self._events)
        self.memory = VaultMemory(failover, hosted.private_bytes, self._events)
        self.gpu_fence = self.memory.gpu_fence
        self._wrong = "it was never tried"  # the last canary's result
        self._takeover_due = False  # the current check is dropped
        self._tasks = Tasks("vault engine")

    def __repr__(self) -> str:
        return f"<{self.hosted!r}, {self.memory!r}>"

    @property
    def limits(self) -> Limits:
        return self.hosted.limits

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.hosted.capabilities, failover=True, weights=self.memory.client.weights_name)

    @property
    def last_epoch(self) -> int:
        return self.memory.client.last_epoch

    @property
    def resumes(self) -> Resumes:
        return self.hosted.resumes

    @property
    def proven(self) -> bool:
        return self._events.proving.over

    @property
    def proving(self) -> bool:
        return self._events.proving.under_way

    def submit(self, stream: int, request: GenerateRequest) -> None:
        self.hosted.submit(stream, request)

    def cancel(self, stream: int) -> None:
        self.hosted.cancel(stream)

    def withdraw(self, stream: int) -> bool:
        return self.hosted.withdraw(stream)

    def progress(self) -> Progress:
        return replace(self.hosted.progress(), load=self.memory.client.load)

    def ping(self, answer: Callable[[], None]) -> None:
        self.hosted.ping(answer)

    # -- loading and standing by

    async def load(self, events: EngineEvents) -> None:
        self._events.events = events
        hosted, memory, ranks = self.hosted, self.memory, self.ranks
        await hosted.load(self._events)
        preparing = self._tasks.spawn(hosted.prepare(memory, ranks), "prepare")
        await asyncio.gather(memory.load(hosted.weights), preparing)
        await memory.stand_by(hosted.geometry, hosted.home)
        if await self.check():
            return  # the caller checks too, and reports it
        if self.failover.unmapped:
            await asyncio.gather(memory.unmap(), ranks.order("sleep", self.failover.load_s))

    async def check(self) -> str:
        """Answer the canary; return the likely cause of a wrong answer, or "".

        - An unmapped engine has nothing to read: the last result counts.
        - A check goes on even if its caller is cancelled: the memory it reads must stay mapped.
        - If the pool's owner ends, the check is dropped and the last result counts, if that was right: the takeover
          does not wait."""
        self._takeover_due = False
        if not self.memory.asleep:
            await self.memory.weights_ready.wait()
            await asyncio.shield(self._tasks.spawn(self._check(), "check"))
        return self._wrong

    def drop_check(self) -> None:
        """Drop the current check: a takeover is due."""
        self._takeover_due = True

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
            if self.memory.asleep:  # it was unmapped while this waited for the lock
                return self._wrong
            mapping = self.memory.pool.mapping
            assert mapping is not None, "private memory is mapped from the first load on"
            return await self.hosted.check(mapping, lambda: self._takeover_due and not self._wrong)

    async def unmap(self) -> None:
        async with self.ranks.turn:
            await asyncio.gather(self.memory.unmap(), self.ranks.order("unmap", self.failover.load_s))

    async def remap(self) -> str:
        async with self.ranks.turn:
            await asyncio.gather(self.memory.remap(), self.ranks.order("remap", self.failover.load_s))
        return await self.check()

    async def stop(self) -> None:
        self._events.proving.end(alive=False)
        await self.hosted.stop()
        await self._tasks.stop()
        self.ranks.stop()
        await self.memory.close()

    # -- awake

    async def wake(self, epoch: int, pass_fds: tuple[int, ...] = ()) -> Woken:
        self.drop_check()
        owned = await (self._own_together(epoch, pass_fds) if self.ranks.count else self.memory.own(epoch))
        await self.hosted.begin(owned)
        return Woken(owned.blocks, owned.reason, owned.marks)

    async def _own_together(self, epoch: int, pass_fds: tuple[int, ...]) -> Owned:
        ranks = self.ranks
        if ranks.turn.locked():
            self._events.loading("a canary is under way on every rank")
        async with ranks.turn:
            if ranks.share_vault:  # they join the epoch, so this vault must grant it first
                owned = await self.memory.own(epoch)
                await ranks.wake(epoch, pass_fds)
            else:  # the ranks must agree with each other while they wake
                owned, _ = await asyncio.gather(self.memory.own(epoch), ranks.wake(epoch, pass_fds))
        return owned

    def prove(self) -> None:
        canary = self.hosted.canary
        self._events.proving.begin(canary)
        self.hosted.submit(CANARY, canary.request)

    def ask_again(self) -> None:
        if self._events.proving.stage is not Stage.DOUBTED:
            return  # the leadership is over
        canary = self.hosted.canary
        self.hosted.cancel(CANARY)
        self._events.proving.begin(canary)
        try:
            self.hosted.submit_alone(CANARY, canary.request)
        except HoldfastError as error:
            self._events.cannot_ask(error.message)

    def serve_on(self) -> None:
        if held := self._events.proving.release():
            self._events.events.outputs(held)

    def on_proved(self) -> None:
        if (owned := self.memory.owned) is not None:
            with self.hosted.books:
                owned.pool.canary_passed()

    async def verify(self) -> str:
        here, *others = await asyncio.gather(self.memory.verify(), self.ranks.verify())
        wrong = [here, *(f"rank {rank}: {found}" for rank, found in enumerate(others[0], 1) if found)]
        return "; ".join(filter(None, wrong))

    async def renew(self) -> None:
        """Load the weights again on every rank, since they are one set. The next check must test them."""
        await asyncio.gather(self.memory.renew(), self.ranks.renew())
        self._wrong = "it was not tried since its weights were loaded again"

    async def become_standby(self, *, believed: bool = True) -> None:
        self._events.proving.end(alive=believed)
        if not believed and (owned := self.memory.owned) is not None:
            with self.hosted.books:
                owned.pool.distrust()
        left = await self.hosted.end()
        if left:
            self._events.closed(left)
        await self.ranks.order("become_standby", self.failover.wake_s)
        await self.memory.become_standby()
