"""Runs an engine of a failover group: stand by, win the election, fence, adopt, announce, serve, step back.

The order of a takeover:

1. Load the engine and ask the canary.
2. Become Standby, registered under a standby key.
3. Win the election lock.
4. Pass the CPU fence and get the pool under a new epoch.
5. Write the term to the journal.
6. Announce Active on the frontends' open connections.
7. Register the instance's key.
8. While serving, prove with a known question that what was taken over is right.

If the proof fails and a standby is ready, the standby takes over. Otherwise the engine serves until one is ready, and
tells frontends that its answers may be wrong.

Always true: the engine announces and registers only what is already true; an engine that lost the lock sends nothing
more; between lock and announcement it waits only for the vault's grant, and for weights that are lost or must be loaded
again; the process exits if a wake fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError
from holdfast.core.procfs import read_process
from holdfast.core.requests import Output
from holdfast.core.tasks import Tasks, beside, done_before, first
from holdfast.discovery.keys import INSTANCES, LOADINGS, STANDBYS
from holdfast.engines.contract import FATAL_ERRORS, EngineEvents, FailoverEngine, Woken
from holdfast.failover.journal import SILENT_S, Journal, Term, next_epoch, read_terms
from holdfast.failover.lifecycle import (
    Announced,
    Drained,
    Ended,
    Loaded,
    LockWon,
    MemoryProblem,
    MustLoad,
    StandDown,
    State,
    WakeFailed,
)
from holdfast.failover.lock import FailoverLock
from holdfast.worker.admin_actions import Actions
from holdfast.worker.process import Worker

# Interval at which a standby checks its canary's age and the lock's holder.
LOOK_S = 1.0
# A holder that is stopped, or stuck in the kernel, in this many checks in a row will not release the lock by itself.
STUCK_LOOKS = 3


class Election:
    """One engine's part in the election: it waits for the lock, each time it stands by. `check` asks the canary and
    raises if the engine must not lead.

    Always true: at most one `acquire` runs; a lock won during a request to stop or sleep is released; a standby's last
    canary is never older than `canary_s` plus one `LOOK_S`; the checks never delay winning the lock."""

    def __init__(self, lock: FailoverLock, check: Callable[[], Awaitable[None]], canary_s: float) -> None:
        self._lock = lock
        self._check = check
        self._canary_s = canary_s
        self._checked_at_s = asyncio.get_running_loop().time()
        self._poked = asyncio.Event()
        self._stuck = 0
        self.asleep = False
        self.woken_s = 0.0  # when it was last woken from sleep, until it leads; 0: it was not
        self.stepped_back = asyncio.Event()  # it holds no lock, and has finished stepping back
        self.stepped_back.set()
        self.blocked = ""  # why no engine can take over now: the lock's holder is stuck

    async def won(self, stop: asyncio.Event) -> asyncio.Event | None:
        """Wait for the lock and return the event that is set when it is lost; return None once `stop` is set."""
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
                self.stepped_back.clear()
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
        """Ask the canary if it is due, and check whether the lock's holder is stuck."""
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
            which = f"{holder.engine}, pid {holder.pid}, state {stat.state}"
            self.blocked = f"failover impossible here: the lock is held by {which}, which does not end"

    # -- called by the worker

    def poke(self) -> None:
        """Wake the waiting task, which then checks what changed."""
        self._poked.set()

    def sleep(self) -> None:
        self.asleep = True
        self.poke()

    def left(self) -> None:
        self.stepped_back.set()

    def take_part(self, now_s: float) -> None:
        if self.asleep:
            self.woken_s = now_s
        self.asleep = False
        self.poke()

    async def poked_or(self, *events: asyncio.Event) -> None:
        """Wait for `poke` or one of the events."""
        await first([self._poked.wait(), *(event.wait() for event in events)])
        self._poked.clear()


log = logging.getLogger("holdfast.worker")

# Least time between a wake's deadline (from then on /live answers no) and giving the wake up in this process. A
# supervisor acts earlier, after three failed probes a second apart; this is for workers without a supervisor.
SUPERVISOR_S = 10.0
CANARY_S = 20.0  # a standby's last canary is at most this plus `LOOK_S` old: under 30 s
REPLACED_LOOK_S = 2.0  # how often a leader that may answer wrongly looks for a standby
HANDOVER_S = 3.0  # to step back from the pool in a planned handover; after that the process exits, which fences it
WOKEN = "it was woken"
UNSEEN = "its successor's lock; no standby saw its end"
STEPS = ("eof", "lock", "fence", "adopted", "announced", "first_token", "gpu_fence")


class Timeline:
    """The times of one takeover's steps, counted from the dead leader's last token.

    All times are from the machine's monotonic clock, so times of two processes can be compared. A step that has not
    happened is absent. Zero is:

    - the last token of the dead leader;
    - if that leader had been silent for `SILENT_S`: when the vault saw its end;
    - if this engine started later and saw no end: when it won the lock;
    - if this engine slept when the last leader ended: when it was woken.

    A first start has no dead leader, even if journals of an earlier deployment name one.
    """

    def __init__(self, journals: Path, epoch: int, unix_s: float, *, after: int, woken_s: float = 0.0) -> None:
        self._journals = journals
        self._after = after  # the epoch of this memory's last leader; 0: none, this is a first start
        self._woken_s = woken_s  # when the engine was woken from sleep; 0: it did not sleep
        self.epoch = epoch
        self.unix_s = unix_s
        self.marks: dict[str, float] = {}
        self.woken: Woken | None = None
        self._predecessor: Term | None = None
        self._looked = False

    def mark(self, step: str, at_s: float) -> None:
        """Note when a step was done; later calls for the same step are ignored."""
        self.marks.setdefault(step, at_s)

    def mark_end(self, epoch: int, at_s: float) -> None:
        """Note when a leader's end was seen, if it is the leader this engine takes over from. With several standbys
        another leader may have come and ended since."""
        if epoch and epoch == self._after:
            self.mark("eof", at_s)

    def facts(self) -> dict[str, Any]:
        """Return each step's time in milliseconds since zero, and how many KV blocks were adopted."""
        if not self.marks:
            return {}
        before = self._before()
        woke = self._woken_s > self.marks.get("eof", 0.0)  # the last leader ended before the engine was woken
        marks = {step: at_s for step, at_s in self.marks.items() if step != "eof"} if woke else self.marks
        began_s = self._woken_s if woke else min(marks.values())
        heard_s = before.last_sent_ns / 1e9 if before is not None else 0.0
        zero_s = heard_s if not woke and 0.0 <= began_s - heard_s < SILENT_S else began_s
        facts: dict[str, Any] = {"epoch": self.epoch, "unix_s": self.unix_s, "woke": woke}
        facts["from_epoch"] = before.epoch if before is not None else 0
        if before is not None:
            facts |= {"from_engine": before.engine, "from_pid": before.pid}
        seen = "its end, as seen by the vault" if "eof" in self.marks else UNSEEN
        facts["zero"] = WOKEN if woke else "the last leader's last token" if zero_s == heard_s else seen
        facts["died_ms"] = 0.0
        for step in STEPS:
            if step in marks:
                facts[f"{step}_ms"] = round((marks[step] - zero_s) * 1000, 2)
        if self.woken is not None:
            facts |= {"blocks": self.woken.blocks, "why_empty": self.woken.reason}
        facts["zero_monotonic_s"] = zero_s
        return facts

    def _before(self) -> Term | None:
        """Return the last leader's term. Reads the journals once, when facts are requested, never during a takeover."""
        if self._after and not self._looked:
            self._looked = True
            older = [term for term in read_terms(self._journals) if term.epoch < self.epoch]
            self._predecessor = older[-1] if older else None
        return self._predecessor


def error_text(error: BaseException) -> str:
    return str(error) or type(error).__name__


class SleepActions:
    """The admin actions that put an engine of a group to sleep, with its memory mapped or unmapped, and wake it.

    Always true: a sleeping engine holds no lock and takes no part in the election; an engine whose memory was unmapped
    takes part again only after it has mapped the memory and passed the canary."""

    def __init__(self, worker: Worker, engine: FailoverEngine, election: Election) -> None:
        self._worker = worker
        self._engine = engine
        self._election = election

    def actions(self) -> Actions:
        return {"sleep": self.sleep, "let_go": self.let_go, "wake_up": self.wake_up}

    async def sleep(self) -> str:
        """Step back and take no part in the election until `wake_up`."""
        if self._worker.life.state is State.INIT:
            raise UserError("it is still loading; it can sleep once it stands by")
        self._election.sleep()
        await self._election.stepped_back.wait()
        if self._election.asleep:
            self._worker.introduce(active=False)  # the welcome now says "asleep": no leader counts it as a standby
        return "asleep: it takes no part in the election until it is woken"

    async def let_go(self) -> str:
        """Sleep and unmap the vault's memory, so that the vault can move it to host memory."""
        await self.sleep()
        try:
            await self._engine.unmap()
        except FATAL_ERRORS as error:
            raise UserError(f"it could not let go of its memory: {error_text(error)}") from error
        return "asleep, and nothing of the vault's is mapped until it is woken"

    async def wake_up(self) -> str:
        """Map the memory again, ask the canary, and take part in the election, which decides which engine leads."""
        if self._election.asleep:
            await self._stand_up()
        slept = self._election.asleep
        self._election.take_part(self._worker.clock.monotonic_s())
        if slept:
            self._worker.introduce(active=False)
        return "it takes part in the election again"

    async def _stand_up(self) -> None:
        try:
            wrong = await self._engine.remap()
        except FATAL_ERRORS as error:
            raise UserError(f"it stays asleep: {error_text(error)}") from error
        if wrong:
            self._worker.sessions.fatal(f"the canary's answer was wrong after it was woken: {wrong}")


class FailoverWorker(EngineEvents):
    """A worker with one engine of a failover group, from load to exit; it receives the engine's events."""

    def __init__(self, worker: Worker, engine: FailoverEngine, lock: FailoverLock, journals: Path) -> None:
        self._worker = worker
        self._clock = worker.clock
        self._engine = engine
        self._lock = lock
        self._journals = journals  # of its group, one file per engine
        self._load_s = worker.settings.failover.load_s
        self._journal = Journal(journals / f"{worker.settings.name}.journal", worker.clock)
        self._leading = False  # tokens may go out
        self._lost = asyncio.Event()  # the lock's event: set, by the lock's own deadline, when the lock is lost
        self._election = Election(lock, self._check, CANARY_S)
        self._over = ""  # why the leadership must end at once
        self._timeline: Timeline | None = None
        self._wake_bound: asyncio.Timeout | None = None  # of the last wake
        self._seen_gone = (0, 0.0)  # the leader whose end the vault reported last: its epoch, and when
        self._renewing = ""  # why the weights are to be loaded again
        self._renewed = asyncio.Event()
        self._leaving: tuple[str, bool] | None = None  # why to hand over and exit, and whether its KV is trusted
        self._tasks = Tasks(f"failover worker {worker.settings.name}")
        worker.more_facts = self.facts
        worker.is_asleep = lambda: self._election.asleep
        worker.is_proving = lambda: self._leading and engine.proving
        worker.actions.update(SleepActions(worker, engine, self._election).actions())
        worker.renewal.renew = self._renew
        worker.step_down = self._leave

    async def run(self, stop: asyncio.Event, on_ready: Callable[[dict[str, Any]], None]) -> None:
        """Run until `stop`; raise UserError if this engine must not continue (the process exits with 1)."""
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
                    # The lock is kept. Streams wait if there is no other worker. KV made with these weights is not
                    # trusted.
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
        except FATAL_ERRORS as error:
            raise UserError(f"the engine could not be loaded: {error_text(error)}") from error
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
            return  # the leader ended before this engine was loaded: the time of its end is not known
        self._seen_gone = (epoch, self._clock.monotonic_s())
        if self._worker.life.state is State.WAKING and self._timeline is not None:
            self._timeline.mark_end(*self._seen_gone)  # the lock was won before the vault reported the end

    async def _wake(self) -> None:
        worker, engine = self._worker, self._engine
        known = max(engine.last_epoch, worker.life.epoch)
        epoch = next_epoch(known, int(self._clock.unix_s() * 1000))
        before = 0 if self._renewing else known  # a renewal takes over from no other engine
        woken_s, self._election.woken_s = self._election.woken_s, 0.0  # counts for the first takeover after it only
        unix_s = self._clock.unix_s()
        timeline = self._timeline = Timeline(self._journals, epoch, unix_s, after=before, woken_s=woken_s)
        timeline.mark("lock", self._clock.monotonic_s())
        timeline.mark_end(*self._seen_gone)
        worker.step(LockWon(epoch, contended=before > 0))
        try:
            bound_s = worker.settings.failover.wake_s + max(worker.settings.failover.wake_s, SUPERVISOR_S)
            async with asyncio.timeout(bound_s) as self._wake_bound:
                if self._renewing:
                    await self._load_again()
                woken = timeline.woken = await engine.wake(epoch, self._lock.pass_fds())
        except FATAL_ERRORS as error:
            worker.step(WakeFailed(error_text(error)))
            raise UserError(f"could not take over under epoch {epoch}: {error_text(error)}") from error
        for name, at_s in woken.marks.items():
            timeline.mark(name, at_s)
        self._announce(epoch)
        log.info("leads with %s", f"no KV: {woken.reason}" if woken.reason else f"{woken.blocks} whole blocks of KV")

    async def _load_again(self) -> None:
        """Load the weights again while holding the lock, so that no other engine leads with the old ones."""
        self.loading(self._renewing)
        await self._engine.renew()
        await self._check()
        if self._lost.is_set():
            raise TimeoutError("the election's lock was lost while the weights were loaded again")

    def loading(self, why: str) -> None:
        """Extend a wake's deadline to the time of a load; the normal one only suffices to check mapped weights."""
        if self._worker.life.state is State.WAKING and self._wake_bound is not None:
            log.warning("waking takes longer: %s", why)
            self._worker.list_loading()
            self._worker.step(MustLoad(why, self._load_s))
            self._wake_bound.reschedule(asyncio.get_running_loop().time() + self._load_s + SUPERVISOR_S)

    def _announce(self, epoch: int) -> None:
        worker = self._worker
        self._over, self._leading, worker.inexact_reason = "", True, ""
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
        """Serve until asked to stop, sleep, hand over or renew, or until the lock is lost."""
        while not (self._done(stop) or self._renewing):
            await self._election.poked_or(stop, self._lost)
            if self._lost.is_set():
                self._end_at_once("the election's lock is lost")

    def _done(self, stop: asyncio.Event) -> bool:
        return stop.is_set() or self._election.asleep or bool(self._over or self._leaving)

    def outputs(self, outputs: list[Output]) -> bool:
        if not self._leading:
            return True
        if self._lost.is_set():  # reads the clock: a process that was frozen notices the loss here, before it sends
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
        self._tasks.spawn(self._hand_over_or_flag(why, self._worker.life.epoch), "disproved")

    async def _hand_over_or_flag(self, why: str, epoch: int) -> None:
        """Let a standby take over if one is ready. Otherwise continue to serve until one is, and tell the frontends
        that answers may be wrong: for a stream that is better than to end without an engine."""
        worker = self._worker
        ready = await worker.has_standby()
        if not self._leads(epoch):
            return
        if ready:
            self._end_at_once(why)
            return
        worker.inexact_reason = f"{why}; no standby is ready to take over, so it serves on until one is"
        log.error("%s", worker.inexact_reason)
        worker.introduce(active=True, epoch=epoch)
        worker.sessions.announce(epoch, worker.inexact_reason)
        self._engine.serve_on()
        while self._leads(epoch):
            await asyncio.sleep(REPLACED_LOOK_S)
            if self._leads(epoch) and await worker.has_standby():
                self._leave(f"{why}; a standby is ready to take over", believed=False)
                return

    def _leads(self, epoch: int) -> bool:
        return self._leading and self._worker.life.epoch == epoch

    def _end_at_once(self, why: str) -> None:
        """Send nothing more and abort all connections; frontends then resume their streams on other workers."""
        if not self._over:
            log.error("%s: sending nothing more", why)
            self._over, self._leading = why, False
            self._worker.sessions.reset_connections()
            self._election.poke()

    async def _step_back(self, *, for_good: bool) -> None:
        """End a planned leadership: hand back the streams, then the pool, then the lock. Raise UserError, which ends
        the process, after an unplanned one or a handover for good."""
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
            self._renewing = ""  # the next takeover must not load weights
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
                await self._engine.become_standby(believed=believed)
        except FATAL_ERRORS as error:
            raise UserError(f"could not step back from the pool: {error_text(error)}") from error

    async def _stand_by(self) -> None:
        self._worker.register(STANDBYS)
        await self._worker.withdraw(INSTANCES)
        self._worker.step(Drained())

    # -- operators, and control

    def _leave(self, why: str, believed: bool) -> None:
        """Make the engine hand over and exit, if it leads."""
        if self._leading and self._leaving is None:
            self._leaving = why, believed
            self._election.poke()

    async def _renew(self, why: str) -> None:
        """Load the weights again and return when the engine leads again; raise UserError if it does not lead, or is put
        to sleep meanwhile."""
        self._renewed.clear()
        if self._leading:
            self._renewing = why
            self._election.poke()
            await self._renewed.wait()
        if not self._leading:
            raise UserError(f"{why}; they were not loaded again, because it leads no more")

    def facts(self) -> dict[str, Any]:
        """Return the facts that a worker of a group has besides every worker's."""
        facts = {"asleep": self._election.asleep, "proven": self._engine.proven, **asdict(self._engine.resumes)}
        if self._election.blocked:
            facts["reason"] = self._election.blocked
        if self._timeline is not None:
            facts["failover"] = self._timeline.facts()
        return facts
