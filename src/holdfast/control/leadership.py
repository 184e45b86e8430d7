"""The work of a leading control process: it reads the records, feeds events to the health controller and the level
controller, and carries out their decisions, until the lock is lost.

A shell: `HealthController` and `LevelController` decide. If another control writes a verdict meanwhile (it lost the
lock and does not know it yet), this leadership ends and the next begins from the records, so that no verdict is lost.
The level controller gets each verdict when it is passed to the outbox. A bug in one step costs that step and is logged.

Always true:
- Nothing is decided before the whole store view was read after the lock was acquired.
- A decision is written before it is acted on.
- Nothing is written or done once the lock is lost.
- A level is written when it changes, with its time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from holdfast.control import health_controller as hc
from holdfast.control.degradation import (
    BeatReceived,
    LevelController,
    LevelEvent,
    RequestsEnded,
    VerdictWritten,
    WorkerCame,
    WorkerWent,
    WriteLevel,
)
from holdfast.control.health_controller import HealthController, NoticeKind
from holdfast.control.metrics import ControlMetrics
from holdfast.control.outbox import Outbox
from holdfast.control.reports import ReportTally
from holdfast.control.store_view import StoreView, decoded
from holdfast.control.worker_health import limits_of
from holdfast.control.worker_probe import WorkerProbe
from holdfast.core.ports import DeadlineReached, World
from holdfast.core.tasks import Tasks, first
from holdfast.discovery.keys import EXPECTED, FAULTS, HEALTH, LEVELS, REPORTS, InstanceKey
from holdfast.discovery.registry import Appeared, Change, Instance, Withdrawn
from holdfast.health import expectations
from holdfast.health.liveness import TICK_S
from holdfast.health.records import DeviceRecord, HealthRecord, ReportRecord
from holdfast.routing.capacity import Capacity
from holdfast.routing.degradation import Degradation, DegradationError, LevelRecord
from holdfast.routing.spares import SpareChanged
from holdfast.spec.health import LevelSettings
from holdfast.spec.launch import ControlLaunch
from holdfast.store.contract import Store
from holdfast.wire.messages import Beat

log = logging.getLogger("holdfast.control")

FRONTENDS_MAX = 256  # last reports that are kept
COUNT_MAX = 2**53  # a larger difference between two reports is corrupt
SUM_TICKS = 10  # reports are summed once a second
LEVEL_TICKS = 2  # as often as beats come under work
# The pause after a `DeadlineReached` that failed by a bug of ours: its deadline stays in the past, and would be retried
# at every tick and flood the log.
FAILED_PAUSE_S = 5.0
LOUD = frozenset({
    NoticeKind.MOVED, NoticeKind.DRAINED, NoticeKind.QUARANTINED, NoticeKind.ACCUSED, NoticeKind.RELOADED,
    NoticeKind.RELIEVED, NoticeKind.ACQUITTED, NoticeKind.WITHDRAWN, NoticeKind.REPLACED,
})  # fmt: skip


class LevelLoop:
    """Feeds the level controller and writes what it decides. `on_spare` is called when a worker becomes a spare or
    stops being one."""

    def __init__(
        self,
        settings: LevelSettings,
        deployment: str,
        outbox: Outbox,
        *,
        unix_s: Callable[[], float],
        on_spare: Callable[[hc.SpareAssigned], None],
    ) -> None:
        self._settings = settings
        self._key = LEVELS + deployment
        self._outbox = outbox
        self._unix_s = unix_s
        self._on_spare = on_spare
        self._loop = asyncio.get_running_loop()
        self._levels = LevelController(settings)
        self._beats: dict[str, Beat] = {}  # the last that was fed, by path
        self._records: dict[str, HealthRecord] = {}  # as written or waiting to be written, by path
        self._ended: dict[str, tuple[int, int, int]] = {}  # as last reported, by frontend

    @property
    def capacity(self) -> Capacity | None:
        return self._levels.capacity

    def begin(self, values: Mapping[str, bytes], records: Mapping[str, HealthRecord], there: Iterable[str]) -> None:
        """Continue from the records of the level and of the workers. `there`: the paths of workers in the store."""
        self._records = dict(records)
        continues = any(path in records for path in there)
        record: LevelRecord | None = None
        try:
            record = msgspec.json.decode(values[self._key], type=LevelRecord) if self._key in values else None
            if record is not None:
                Degradation(self._settings.times, record)  # raises if the record is impossible
            log.info("goes on from level %d", record.level if record is not None else 0)
        except (ValueError, RecursionError, DegradationError) as error:
            log.warning("cannot read %s: %s; starting from level 0", self._key, error)
            record = None
        self._levels = LevelController(self._settings, record, continues=continues)
        if record is not None:
            self._outbox.adopt(self._key, values[self._key])

    def on_health_step(
        self, event: hc.HealthEvent, effects: Sequence[hc.HealthEffect], probes: Iterable[WorkerProbe]
    ) -> None:
        """Pass the health controller's event and its new verdicts to the level controller."""
        match event:
            case hc.WorkerFound():
                welcome = next((one.welcome for one in probes if one.path == event.path), None)
                places = welcome.concurrency if welcome is not None else 1
                self._step(WorkerCame(event.path, event.facts, places))
                if (record := self._records.get(event.path)) is not None:
                    self._step(VerdictWritten(event.path, record))
            case hc.WorkerLost():
                self._beats.pop(event.path, None)
                self._step(WorkerWent(event.path))
        for effect in effects:
            if isinstance(effect, hc.WriteVerdict):
                self._records[effect.path] = effect.record
                self._step(VerdictWritten(effect.path, effect.record))
            elif isinstance(effect, hc.ForgetWorker):
                self._records.pop(effect.path, None)

    def on_report(self, frontend: str, report: ReportRecord) -> None:
        """Count the requests that ended well since the frontend's last report; its first report counts nothing."""
        now = (report.ended, report.prompt_tokens, report.answer_tokens)
        before = self._ended.pop(frontend, now)
        self._ended[frontend] = now
        if len(self._ended) > FRONTENDS_MAX:
            del self._ended[next(iter(self._ended))]
        more = [count - known for count, known in zip(now, before, strict=True)]
        if more[0] > 0 and min(more) >= 0 and max(more) <= COUNT_MAX:  # otherwise nothing ended, or it is corrupt
            self._step(RequestsEnded(*more))

    def tick(self, probes: Iterable[WorkerProbe]) -> None:
        """Feed the latest beats; called five times a second."""
        here = {probe.path: probe for probe in probes}
        if len(self._beats) > len(here):  # forget the beats of workers that are gone
            self._beats = {path: beat for path, beat in self._beats.items() if path in here}
        for probe in here.values():
            beat = probe.beats.last
            if beat is not None and beat is not self._beats.get(probe.path):
                self._beats[probe.path] = beat
                self._step(BeatReceived(probe.path, beat.running, beat.tokens, beat.blocks))
        if self._loop.time() >= self._levels.next_deadline_s():
            self._step(DeadlineReached())

    def _step(self, event: LevelEvent) -> None:
        for effect in self._levels.step(event, self._loop.time()):
            match effect:
                case WriteLevel():
                    record = replace(effect.record, since_unix_s=self._unix_s())
                    self._outbox.put(self._key, msgspec.json.encode(record))
                    if effect.changed:
                        log.warning("level %d: %s", record.level, record.reason)
                case SpareChanged():
                    name = self._records[effect.name].name
                    log.info("%s %s: %s", name, "is a spare" if effect.spare else "serves", effect.reason)
                    self._on_spare(hc.SpareAssigned(effect.name, effect.spare))


class Leadership:
    """One control while it holds the lock. `lost` is set when it loses the lock."""

    def __init__(
        self,
        settings: ControlLaunch,
        store: Store,
        world: World,
        lost: asyncio.Event,
        metrics: ControlMetrics,
        *,
        on_begin: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._world = world
        self._lost = lost
        self._metrics = metrics
        self._on_begin = on_begin
        self._loop = asyncio.get_running_loop()
        self._by = f"{settings.name}/{os.getpid()}/{world.rng.getrandbits(32):08x}"  # different for each leadership
        own = f"{settings.deployment}/"
        self._expected, self._reports, self._faults = EXPECTED + own, REPORTS + own, FAULTS + own
        self._disputed = asyncio.Event()
        self._outbox = Outbox(store, lost)
        self._health = HealthController(self._by, world.rng.random, limits_of(settings.health))
        self.levels = LevelLoop(
            settings.levels, settings.deployment, self._outbox, unix_s=lambda: self.now_s, on_spare=self.on_event
        )
        self._tasks = Tasks("leadership", self._failed)
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._ticks = 0
        self._paused_until_s = 0.0
        self._due_s: float | None = None  # when the health controller's next tick is due; None: unknown
        # Wall time without steps: from now on it advances with the machine's monotonic clock.
        self._ahead_s = world.clock.unix_s() - world.clock.monotonic_s()
        self._tally = ReportTally(self.now_s)
        self.store_view = StoreView(store, settings.deployment)
        self.probes: dict[InstanceKey, WorkerProbe] = {}
        self.begun = False

    def members(self) -> dict[str, tuple[str, bool]]:
        """Return the group of each connected engine, by path, and whether it is active."""
        known = {key: probe.facts for key, probe in self.probes.items() if probe.facts is not None}
        return {key.path: (facts.group, facts.active) for key, facts in known.items()}

    @property
    def now_s(self) -> float:
        return self._world.clock.monotonic_s() + self._ahead_s

    @property
    def reason(self) -> str:
        """Return why nothing is decided now; empty if decisions are made."""
        if not self.begun:
            return "reading the records"
        return f"decisions wait to be written: {self._outbox.failing}" if self._outbox.failing else ""

    async def run(self) -> None:
        """Lead until the lock is lost or another control writes a verdict."""
        self.store_view.open()
        try:
            await first((self._lost.wait(), self.store_view.whole.wait()), (self.store_view.failed,))
            if not self._lost.is_set() and self.store_view.whole.is_set():
                self._begin()
                await first((self._lost.wait(), self._disputed.wait()), (self.store_view.failed, self._broken))
            for future in (self.store_view.failed, self._broken):
                if future.done():
                    future.result()
        finally:
            self._disputed.set()  # events of probes that end now are ignored
            self._broken.cancel()
            await self._tasks.stop()
            await self.store_view.close()

    def _failed(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    def _begin(self) -> None:
        values = self.store_view.values
        records = decoded(values, HEALTH, HealthRecord)
        expected = decoded(values, self._expected, expectations.ExpectationsRecord)
        self._health.restore(records, expected, self.now_s)
        self.levels.begin(values, records, (key.path for key in self.store_view.registry.instances))
        for place in (*(HEALTH + path for path in records), *(self._expected + name for name in expected)):
            self._outbox.adopt(place, values[place])
        self._read_values(values)
        log.info("goes on from %d verdicts", len(records))
        self.begun = True
        self._on_begin()
        self.store_view.read_by(self)
        for key, instance in self.store_view.registry.instances.items():
            self._probe_instance(
                instance, serving=HEALTH + key.path not in values
            )  # an unreadable record counts as a verdict too
        self._tasks.spawn(self._outbox.run(), "outbox")
        self._tasks.spawn(self._tick(), "ticks")

    # -- from the store view

    def on_instances(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Appeared):
                self._probe_instance(change.instance, serving=False)
            elif isinstance(change, Withdrawn) and (probe := self.probes.get(change.instance.key)) is not None:
                probe.withdraw()

    def _probe_instance(self, instance: Instance, *, serving: bool) -> None:
        known = self.probes.get(instance.key)
        if known is not None and known.instance == instance:
            known.withdrawn = False  # its key was deleted and came back; its connection stayed
            return
        if known is not None:
            known.end()
        world, token = self._world, self._settings.engine_token
        probe = WorkerProbe(instance, world.network, world.rng, self._by, self, serving=serving, token=token)
        self.probes[instance.key] = probe
        self.on_event(hc.WorkerListed(probe.path))
        self._tasks.spawn(self._run_probe(probe), instance.name)

    async def _run_probe(self, probe: WorkerProbe) -> None:
        await probe.keep()
        if self.probes.get(probe.instance.key) is probe:
            del self.probes[probe.instance.key]

    def on_value(self, key: str, value: bytes | None) -> None:
        written = {key: value} if value is not None else {}
        self._read_values(written)
        for path, record in decoded(written, HEALTH, HealthRecord).items():
            # Another control that led before wrote it late; it is not a record that we read at the start and rewrote.
            if record.by != self._by and value != self._outbox.wanted(key):
                log.warning("%s wrote a verdict on %s meanwhile; starting again from the records", record.by, path)
                self._disputed.set()
                self._outbox.close()  # at once: anything written now would be lost
        if value is None:
            self._outbox.check(self.store_view.values)

    def _read_values(self, written: Mapping[str, bytes]) -> None:
        """Read the frontends' reports, and the device faults that controls wrote."""
        for frontend, report in decoded(written, self._reports, ReportRecord).items():
            self._tally.add_report(frontend, report)
            self.levels.on_report(frontend, report)
        for device, record in decoded(written, self._faults, DeviceRecord).items():
            self.on_event(hc.DeviceRead(device, record.report(device)))

    def on_reread(self) -> None:
        self._outbox.check(self.store_view.values)

    # -- from the probes

    def on_event(self, event: hc.HealthEvent) -> None:
        """Step the health controller; a bug costs this step only."""
        if self._lost.is_set() or self._disputed.is_set():
            return
        try:
            effects = self._health.step(event, self.now_s)
            self._do_effects(effects)
            self._metrics.count_canary(event, effects)
            self._due_s = None
            self.levels.on_health_step(event, effects, self.probes.values())
        except Exception:
            log.exception("bug in a step of the health controller; this event was not applied: %s", event)
            if isinstance(event, DeadlineReached):
                self._paused_until_s = self._loop.time() + FAILED_PAUSE_S

    def on_ping(self, path: str, took_s: float | None) -> None:
        self._metrics.checked(path, "ping", "failed" if took_s is None else "passed", took_s)

    def heard_other_or_alone(self, path: str, since_s: float) -> bool:
        return self.heard_other_since(path, since_s) or all(one.path == path for one in self.probes.values())

    def heard_other_since(self, path: str, since_s: float) -> bool:
        return any(one.heard_s >= since_s for one in self.probes.values() if one.path != path)

    # -- time

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._loop.time()
            self._ticks += 1
            for probe in list(self.probes.values()):
                self._tick_part(probe, partial(probe.tick, now_s))
            if self._ticks % LEVEL_TICKS == 0:
                self._tick_part(self.levels, partial(self.levels.tick, self.probes.values()))
            if self._ticks % SUM_TICKS == 0:
                self._sum_reports()
            if self._due_s is None:
                self._due_s = due_s if (due_s := self._health.next_deadline_s) is not None else math.inf
            if self._due_s <= self.now_s and now_s >= self._paused_until_s:
                self.on_event(DeadlineReached())

    def _tick_part(self, part: WorkerProbe | LevelLoop, tick: Callable[[], None]) -> None:
        """Tick one worker's probe or the level loop; a bug there does not affect other parts, and delays no verdict."""
        try:
            tick()
        except Exception:
            log.exception("bug in a tick of %r", part)

    def _sum_reports(self) -> None:
        paths = {f"{key.instance:x}": key.path for key in self.probes}
        for instance, happened in self._tally.flush(self.now_s).items():
            if instance in paths:
                self.on_event(hc.AttemptsReported(paths[instance], happened.attempts(), happened.tokens))
        paces = {paths[one]: pace for one, pace in self._tally.paces(self.now_s).items() if one in paths}
        if paces:
            self.on_event(hc.PacesMeasured(paces))

    # -- effects

    def _do_effects(self, effects: tuple[hc.HealthEffect, ...]) -> None:
        written: list[str] = []
        by_path = {probe.path: probe for probe in self.probes.values()} if effects else {}
        for effect in effects:
            match effect:
                case hc.WriteVerdict():
                    written.append(HEALTH + effect.path)
                    self._outbox.put(written[-1], msgspec.json.encode(effect.record))
                case hc.WriteExpectations():
                    written.append(self._expected + effect.name)
                    self._outbox.put(written[-1], None if effect.record is None else msgspec.json.encode(effect.record))
                case hc.ForgetWorker():
                    self._outbox.put(HEALTH + effect.path, None)
                    self._tally.forget(effect.path.rpartition("/")[2])
                    self._metrics.forget(effect.path)
                case hc.AskWorker() if effect.path in by_path:
                    by_path[effect.path].ask(effect)
                case hc.AskWorker():
                    gone = hc.AnswerMissing(effect.path, effect.number, "it is not connected", sound=False)
                    self._loop.call_soon(self.on_event, gone)
                case hc.ReloadWeights() if effect.path in by_path:
                    self._outbox.after([HEALTH + effect.path, *written], partial(by_path[effect.path].reload, effect))
                case hc.HandOverToStandby() if effect.path in by_path:
                    down = partial(by_path[effect.path].step_down, effect)
                    self._outbox.after([HEALTH + effect.path, *written], down)
                case hc.FlagAnswers():
                    self._outbox.after([HEALTH + effect.path, *written], partial(self._flag, effect))
                case hc.Notice():
                    self._log(effect)

    def _flag(self, effect: hc.FlagAnswers) -> None:
        streams, counted = self._tally.streams_since(effect.path.rpartition("/")[2], effect.since_s)
        many = f"{'' if counted else 'at least '}{streams} streams of the last {self.now_s - effect.since_s:.0f} s"
        log.error("%s: %s may be wrong: %s", effect.path, many, effect.reason)
        self._metrics.quarantined(streams)

    def _log(self, notice: hc.Notice) -> None:
        quiet = notice.what is NoticeKind.PASSED
        level = logging.WARNING if notice.what in LOUD else logging.DEBUG if quiet else logging.INFO
        name = next((one.instance.name for one in self.probes.values() if one.path == notice.path), notice.path)
        log.log(level, "%s: %s", name or "all", notice.text)
