"""The life of an engine that has a standby, or is one: stand by, be elected, fence, adopt, announce, serve, step back.

Order, always: load (by role) → canary → Standby, known under its own key → the election's lock → past the CPU fence,
the pool under a new epoch → the journal has the term → Active on the frontends' open connections → the instance's key.
The engine then proves itself beside the work that begins; if it is disproved, a standby that is ready takes over, and
where there is none it serves on, with everyone told that its answers may be wrong, until there is one.

Always true: nothing is announced or registered before it is so; whoever is told that the lock is lost sends nothing
more; between lock and announcement nothing is awaited but the vault's grant, and weights where they are lost or in
doubt; a wake that fails ends the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError
from holdfast.core.requests import Output
from holdfast.core.tasks import Tasks, done_before
from holdfast.discovery.keys import INSTANCES, LOADINGS, STANDBYS
from holdfast.engines.contract import EngineEvents, ShadowEngine
from holdfast.failover.journal import Journal, next_epoch
from holdfast.failover.lifecycle import (
    Announced,
    Ended,
    Loaded,
    LockWon,
    MemoryProblem,
    MustLoad,
    Rested,
    StandDown,
    State,
    WakeFailed,
)
from holdfast.failover.lock import FailoverLock
from holdfast.worker.election import Election
from holdfast.worker.failures import FAILURES, in_words
from holdfast.worker.process import Worker
from holdfast.worker.sleeping import Sleeping
from holdfast.worker.timeline import Timeline

log = logging.getLogger("holdfast.worker")

# From the deadline after which /live says no to giving a wake up oneself, at least: a supervisor, which wants to hear
# that no three times a second apart, acts first; this is for where there is none.
SUPERVISOR_S = 10.0
CANARY_S = 20.0  # a standby's last canary is younger than this and one look: under 30 s
REPLACED_LOOK_S = 2.0  # between two looks for a standby, by a leader whose answers are in doubt
HANDOVER_S = 3.0  # to step back from the pool in a planned handover; then the process's end fences it


class Shadow(EngineEvents):
    """One engine of a group, from load to exit. It hears what the engine tells."""

    def __init__(self, worker: Worker, engine: ShadowEngine, lock: FailoverLock, journals: Path) -> None:
        self._worker = worker
        self._clock = worker.clock
        self._engine = engine
        self._lock = lock
        self._journals = journals  # of its group, one file per engine
        self._load_s = worker.settings.place.load_s
        self._journal = Journal(journals / f"{worker.settings.name}.journal", worker.clock)
        self._leading = False  # tokens may go out
        self._lost = asyncio.Event()  # the lock's own word that they may not, by its clock
        self._election = Election(lock, self._check, CANARY_S)
        self._over = ""  # why the leadership must end at once
        self._timeline: Timeline | None = None
        self._patience: asyncio.Timeout | None = None  # with the wake under way
        self._seen_gone = (0, 0.0)  # the leader that the vault saw go last, by its epoch, and when
        self._renewing = ""  # why the weights are to be loaded anew
        self._renewed = asyncio.Event()
        self._leaving: tuple[str, bool] | None = None  # why it is to hand over and exit, and whether it is believed
        self._tasks = Tasks(f"shadow {worker.settings.name}")
        worker.more_facts = self.facts
        worker.is_asleep = lambda: self._election.asleep
        worker.is_proving = lambda: self._leading and engine.proving
        worker.actions.update(Sleeping(worker, engine, self._election).actions())
        worker.renewal.renew = self._renew
        worker.step_down = self._leave

    async def run(self, stop: asyncio.Event, on_ready: Callable[[dict[str, Any]], None]) -> None:
        """Until `stop`, or until this engine must not go on (UserError: the process exits with 1)."""
        worker = self._worker
        async with worker.opened():
            worker.list_loading()
            if not await done_before(stop, self._load(), "load"):
                worker.step(Ended("asked to stop"))
                return
            worker.introduce(active=False)
            worker.step(Loaded())
            worker.register(STANDBYS)
            self._tasks.spawn(worker.withdraw(LOADINGS), "withdraw")
            on_ready(worker.where)
            while (lost := await self._election.won(stop)) is not None:
                self._lost = lost
                while woken := await done_before(stop, self._wake(), "wake"):
                    await self._serve(stop)
                    if not self._renewing or self._done(stop):
                        break
                    # The lock is kept; streams wait, if there is nobody else; what these weights made is not believed.
                    await self._hand_over(self._renewing, believed=False)
                    await self._stand_by()
                if not woken:
                    break
                await self._step_back(for_good=stop.is_set())
            if worker.life.state in (State.STANDBY, State.WAKING):
                worker.step(StandDown("asked to stop"))
            await worker.leave()

    async def _load(self) -> None:
        try:
            async with asyncio.timeout(self._load_s):
                await self._engine.load(self)
        except FAILURES as error:
            raise UserError(f"the engine could not be loaded: {in_words(error)}") from error
        await self._check()

    async def _check(self) -> None:
        if wrong := await self._engine.check():
            self._worker.step(Ended("the canary's answer was wrong"))
            raise UserError(f"the canary's answer was wrong: {wrong}")

    # -- taking over

    def memory(self, why: str) -> None:
        if self._worker.life.state is not State.DEAD:
            self._worker.step(MemoryProblem(why))

    def owner_gone(self, epoch: int) -> None:
        self._lock.nudge()
        if self._worker.life.state is State.INIT:
            return  # it was gone before this engine came: when, nobody here has seen
        self._seen_gone = (epoch, self._clock.monotonic_s())
        if self._worker.life.state is State.WAKING and self._timeline is not None:
            self._timeline.mark_end(*self._seen_gone)  # the lock was quicker than the news

    async def _wake(self) -> None:
        worker, engine = self._worker, self._engine
        known = max(engine.last_epoch, worker.life.epoch)
        epoch = next_epoch(known, int(self._clock.unix_s() * 1000))
        before = 0 if self._renewing else known  # it takes over from nobody then
        woken_s, self._election.woken_s = self._election.woken_s, 0.0  # it leads by that once
        unix_s = self._clock.unix_s()
        timeline = self._timeline = Timeline(self._journals, epoch, unix_s, after=before, woken_s=woken_s)
        timeline.mark("lock", self._clock.monotonic_s())
        timeline.mark_end(*self._seen_gone)
        worker.step(LockWon(epoch, contended=before > 0))
        try:
            bound_s = worker.settings.place.wake_s + max(worker.settings.place.wake_s, SUPERVISOR_S)
            async with asyncio.timeout(bound_s) as self._patience:
                if self._renewing:
                    await self._load_anew()
                woken = timeline.woken = await engine.wake(epoch, self._lock.pass_fds())
        except FAILURES as error:
            worker.step(WakeFailed(in_words(error)))
            raise UserError(f"could not take over under epoch {epoch}: {in_words(error)}") from error
        for name, at_s in woken.marks.items():
            timeline.mark(name, at_s)
        self._announce(epoch)
        log.info("leads with %s", f"no KV: {woken.reason}" if woken.reason else f"{woken.blocks} whole blocks of KV")

    async def _load_anew(self) -> None:
        """With the lock in hand: nobody else can lead with what is replaced."""
        self.loading(self._renewing)
        await self._engine.renew()
        await self._check()
        if self._lost.is_set():
            raise TimeoutError("the election's lock was lost while the weights were loaded anew")

    def loading(self, why: str) -> None:
        """Weights in a wake: they get a load's time, since the wake's own is for a look at what is mapped."""
        if self._worker.life.state is State.WAKING and self._patience is not None:
            log.warning("waking takes longer: %s", why)
            self._worker.list_loading()
            self._worker.step(MustLoad(why, self._load_s))
            self._patience.reschedule(asyncio.get_running_loop().time() + self._load_s + SUPERVISOR_S)

    def _announce(self, epoch: int) -> None:
        worker = self._worker
        self._over, self._leading, worker.doubt = "", True, ""
        self._engine.prove()
        self._journal.begin(epoch)
        worker.introduce(active=True, epoch=epoch)
        worker.sessions.announce(epoch)
        worker.step(Announced(epoch))
        assert self._timeline is not None
        self._timeline.mark("announced", self._clock.monotonic_s())
        worker.register(INSTANCES)
        for prefix in (STANDBYS, LOADINGS):
            self._tasks.spawn(worker.withdraw(prefix), "withdraw")
        self._tasks.spawn(self._await_gpu_fence(self._timeline), "gpu fence")
        self._renewing = ""
        self._renewed.set()

    async def _await_gpu_fence(self, timeline: Timeline) -> None:
        await self._engine.gpu_fence.wait()
        timeline.mark("gpu_fence", self._clock.monotonic_s())

    # -- serving

    async def _serve(self, stop: asyncio.Event) -> None:
        """Until there is a reason not to."""
        while not (self._done(stop) or self._renewing):
            await self._election.poked_or(stop, self._lost)
            if self._lost.is_set():
                self._end_at_once("the election's lock is lost")

    def _done(self, stop: asyncio.Event) -> bool:
        """It is to lead no more."""
        return stop.is_set() or self._election.asleep or bool(self._over or self._leaving)

    def outputs(self, outputs: list[Output]) -> bool:
        if not self._leading:
            return True
        if self._lost.is_set():  # asked of its clock: a process that was frozen finds out here, before it sends
            self._end_at_once("the election's lock is lost")
            return True
        self._journal.sent()
        keeping_up = self._worker.sessions.outputs(outputs)
        if self._timeline is not None:
            self._timeline.mark("first_token", self._clock.monotonic_s())
        return keeping_up

    def closed(self, streams: list[int]) -> None:
        self._worker.sessions.closed(streams)

    def fatal(self, why: str) -> None:
        self._worker.sessions.fatal(why)

    def disproved(self, why: str) -> None:
        self._tasks.spawn(self._resolve_doubt(why, self._worker.life.epoch), "doubt")

    async def _resolve_doubt(self, why: str, epoch: int) -> None:
        """Leave the place to a standby if one is ready. Otherwise serve on and say so: streams that end for want of an
        engine are worse off than those that may be wrong, and are told. A standby that comes later takes over."""
        worker = self._worker
        ready = await worker.has_standby()
        if not self._leads(epoch):
            return
        if ready:
            self._end_at_once(why)
            return
        worker.doubt = f"{why}; no standby is ready to take over, so it serves on until one is"
        log.error("%s", worker.doubt)
        worker.introduce(active=True, epoch=epoch)
        worker.sessions.announce(epoch, worker.doubt)
        self._engine.serve_on()
        while self._leads(epoch):
            await asyncio.sleep(REPLACED_LOOK_S)
            if self._leads(epoch) and await worker.has_standby():
                self._leave(f"{why}; a standby is ready to take over", believed=False)
                return

    def _leads(self, epoch: int) -> bool:
        return self._leading and self._worker.life.epoch == epoch

    def _end_at_once(self, why: str) -> None:
        """Nothing more goes out; frontends see their connections end and take their streams elsewhere."""
        if not self._over:
            log.error("%s: sending nothing more", why)
            self._over, self._leading = why, False
            self._worker.sessions.reset_connections()
            self._election.poke()

    async def _step_back(self, *, for_good: bool) -> None:
        """A planned end: streams first, then the pool, then the lock. An unplanned one ends the process."""
        worker = self._worker
        if self._over:
            worker.step(StandDown(self._over))
            worker.step(Ended(self._over))
            raise UserError(self._over)
        if self._leaving is not None:
            why, believed = self._leaving
            await self._hand_over(why, believed=believed)
            await self._lock.release()
            await worker.leave()
            raise UserError(f"handed over to its standby: {why}")
        await self._hand_over("asked to stop" if for_good else "asked to sleep")
        await self._lock.release()
        if not for_good:
            await self._stand_by()
            self._renewing = ""  # nobody's next takeover is to be a load
            self._renewed.set()
            self._election.left()

    async def _hand_over(self, why: str, *, believed: bool = True) -> None:
        worker = self._worker
        worker.step(StandDown(why))
        worker.hand_back(why)
        self._leading = False
        worker.introduce(active=False)
        try:
            async with asyncio.timeout(HANDOVER_S):
                await self._engine.rest(believed=believed)
        except FAILURES as error:
            raise UserError(f"could not step back from the pool: {in_words(error)}") from error

    async def _stand_by(self) -> None:
        self._worker.register(STANDBYS)
        await self._worker.withdraw(INSTANCES)
        self._worker.step(Rested())

    # -- operators, and control

    def _leave(self, why: str, believed: bool) -> None:
        """Have it hand over and exit, if it leads."""
        if self._leading and self._leaving is None:
            self._leaving = why, believed
            self._election.poke()

    async def _renew(self, why: str) -> None:
        """Returns when it leads again; refuses if it does not lead, or is put to sleep before."""
        self._renewed.clear()
        if self._leading:
            self._renewing = why
            self._election.poke()
            await self._renewed.wait()
        if not self._leading:
            raise UserError(f"{why}; they were not loaded anew, because it leads no more")

    def facts(self) -> dict[str, Any]:
        """What a member of a group shows beyond a worker's own facts."""
        facts = {"asleep": self._election.asleep, "proven": self._engine.proven, **asdict(self._engine.resumes)}
        if self._election.blocked:
            facts["reason"] = self._election.blocked
        if self._timeline is not None:
            facts["failover"] = self._timeline.facts()
        return facts
