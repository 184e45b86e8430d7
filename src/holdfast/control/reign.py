"""One reign: from what is written down, over what happens, to what is decided, until the lock is lost.

A shell: it hands `Wards` what happens to workers, and does what they ask for. Always true: nothing is decided before
the whole book was read after the lock was got; what is decided is written down before anything follows from it; nothing
is written or done once the lock is lost. Should somebody else write a verdict meanwhile (a control that lost the lock
and did not know it), the reign is over and the next begins from what is written, so no verdict is lost to another. A
bug in one step costs that step, and is logged.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from holdfast.control import words as w
from holdfast.control.book import Book, decoded
from holdfast.control.contact import Contact
from holdfast.control.level_loop import LevelLoop
from holdfast.control.metrics import ControlMetrics
from holdfast.control.outbox import Outbox
from holdfast.control.reports import Tally
from holdfast.control.ward import limits_of
from holdfast.control.wards import Wards
from holdfast.core.ports import World
from holdfast.core.tasks import Tasks, first
from holdfast.discovery.keys import EXPECTED, FAULTS, HEALTH, REPORTS, InstanceKey
from holdfast.discovery.registry import Appeared, Change, Instance, Withdrawn
from holdfast.health import expectations
from holdfast.health.liveness import TICK_S
from holdfast.health.records import DeviceRecord, HealthRecord, Report
from holdfast.spec.launch import ControlLaunch
from holdfast.store.contract import Store

log = logging.getLogger("holdfast.control")

SUM_TICKS = 10  # reports are summed once a second
LEVEL_TICKS = 2  # as often as beats come under work
# After a `Tick` that failed by a bug of ours: its deadline is still in the past, and the log is not to be flooded.
FAILED_REST_S = 5.0
LOUD = frozenset({
    w.What.MOVED, w.What.DRAINED, w.What.QUARANTINED, w.What.ACCUSED, w.What.RELOADED, w.What.RELIEVED,
    w.What.ACQUITTED, w.What.WITHDRAWN,
})  # fmt: skip
QUIET = frozenset({w.What.PASSED})


class Reign:
    """What one control does while it has the lock. `lost` is set when it has it no longer."""

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
        self._by = f"{settings.name}/{os.getpid()}/{world.rng.getrandbits(32):08x}"  # of every reign its own
        own = f"{settings.deployment}/"
        self._expected, self._reports, self._faults = EXPECTED + own, REPORTS + own, FAULTS + own
        self._disputed = asyncio.Event()
        self._outbox = Outbox(store, lost)
        self._wards = Wards(self._by, world.rng.random, limits_of(settings.health))
        self.levels = LevelLoop(
            settings.levels, settings.deployment, self._outbox, unix_s=lambda: self.now_s, tell=self.tell
        )
        self._tasks = Tasks("reign", self._failed)
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._ticks = 0
        self._rests_until_s = 0.0
        self._due_s: float | None = None  # when the wards want to be told the time; None: they are asked, at a tick
        # Wall time that never goes back nor leaps: from this moment on it is the machine's own clock.
        self._ahead_s = world.clock.unix_s() - world.clock.monotonic_s()
        self._tally = Tally(self.now_s)
        self.book = Book(store, settings.deployment)
        self.contacts: dict[InstanceKey, Contact] = {}
        self.begun = False

    def members(self) -> dict[str, tuple[str, bool]]:
        """Of each engine that is in contact, by path: its group, and whether it is active."""
        known = {key: contact.facts for key, contact in self.contacts.items() if contact.facts is not None}
        return {key.path: (facts.group, facts.active) for key, facts in known.items()}

    @property
    def now_s(self) -> float:
        return self._world.clock.monotonic_s() + self._ahead_s

    @property
    def reason(self) -> str:
        """Why nothing is decided now, if that is so."""
        if not self.begun:
            return "reading what is written down"
        return f"what is decided waits to be written: {self._outbox.failing}" if self._outbox.failing else ""

    async def run(self) -> None:
        """Until the lock is lost, or somebody else writes."""
        self.book.open()
        try:
            await first((self._lost.wait(), self.book.whole.wait()), (self.book.failed,))
            if not self._lost.is_set() and self.book.whole.is_set():
                self._begin()
                await first((self._lost.wait(), self._disputed.wait()), (self.book.failed, self._broken))
            for future in (self.book.failed, self._broken):
                if future.done():
                    future.result()
        finally:
            self._disputed.set()  # what its contacts say as they end is nobody's fault
            self._broken.cancel()
            await self._tasks.stop()
            await self.book.close()

    def _failed(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    def _begin(self) -> None:
        values = self.book.values
        records = decoded(values, HEALTH, HealthRecord)
        expected = decoded(values, self._expected, expectations.Record)
        self._wards.restore(records, expected, self.now_s)
        self.levels.begin(values, records, (key.path for key in self.book.registry.instances))
        for place in (*(HEALTH + path for path in records), *(self._expected + name for name in expected)):
            self._outbox.stands(place, values[place])
        self._read(values)
        log.info("goes on from %d verdicts", len(records))
        self.begun = True
        self._on_begin()
        self.book.read_by(self)
        for key, instance in self.book.registry.instances.items():
            self._meet(instance, serving=HEALTH + key.path not in values)  # one that cannot be read is a verdict too
        self._tasks.spawn(self._outbox.run(), "outbox")
        self._tasks.spawn(self._tick(), "ticks")

    # -- from the book

    def found(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Appeared):
                self._meet(change.instance, serving=False)
            elif isinstance(change, Withdrawn) and (contact := self.contacts.get(change.instance.key)) is not None:
                contact.withdraw()

    def _meet(self, instance: Instance, *, serving: bool) -> None:
        known = self.contacts.get(instance.key)
        if known is not None and known.instance == instance:
            known.withdrawn = False  # its key went and came back; the contact never cared
            return
        if known is not None:
            known.end()
        world, token = self._world, self._settings.engine_token
        contact = Contact(instance, world.network, world.rng, self._by, self, serving=serving, token=token)
        self.contacts[instance.key] = contact
        self.tell(w.Listed(contact.path))
        self._tasks.spawn(self._keep(contact), instance.name)

    async def _keep(self, contact: Contact) -> None:
        await contact.keep()
        if self.contacts.get(contact.instance.key) is contact:
            del self.contacts[contact.instance.key]

    def wrote(self, key: str, value: bytes | None) -> None:
        written = {key: value} if value is not None else {}
        self._read(written)
        for path, record in decoded(written, HEALTH, HealthRecord).items():
            # Of a control that led before, whose last word came late; not what stood, and is written again.
            if record.by != self._by and value != self._outbox.wanted(key):
                log.warning("%s wrote a verdict on %s meanwhile; beginning anew from what is written", record.by, path)
                self._disputed.set()
                self._outbox.close()  # at once: what is written now would be lost
        if value is None:
            self._outbox.check(self.book.values)

    def _read(self, written: Mapping[str, bytes]) -> None:
        """What others wrote: frontends, and controls of what their machines' devices say."""
        for frontend, report in decoded(written, self._reports, Report).items():
            self._tally.take(frontend, report)
            self.levels.reported(frontend, report)
        for device, record in decoded(written, self._faults, DeviceRecord).items():
            self.tell(w.device_event(device, record))

    def reread(self) -> None:
        self._outbox.check(self.book.values)

    # -- from the contacts

    def tell(self, event: w.Event) -> None:
        """The root of a step: whatever a bug does to it, the next one comes."""
        if self._lost.is_set() or self._disputed.is_set():
            return
        try:
            effects = self._wards.step(event, self.now_s)
            self._perform(effects)
            self._metrics.heard(event, effects)
            self._due_s = None
            self.levels.heard(event, effects, self.contacts.values())
        except Exception:
            log.exception("bug in a step of the wards; this was not taken: %s", event)
            if isinstance(event, w.Tick):
                self._rests_until_s = self._loop.time() + FAILED_REST_S

    def pinged(self, path: str, took_s: float | None) -> None:
        self._metrics.checked(path, "ping", "failed" if took_s is None else "passed", took_s)

    def is_sound(self, path: str, since_s: float) -> bool:
        return self.hears(path, since_s) or all(one.path == path for one in self.contacts.values())

    def hears(self, path: str, since_s: float) -> bool:
        return any(one.heard_s >= since_s for one in self.contacts.values() if one.path != path)

    # -- time

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._loop.time()
            self._ticks += 1
            for contact in list(self.contacts.values()):
                self._tick_one(contact, now_s)
            if self._ticks % LEVEL_TICKS == 0:
                self._tick_levels()
            if self._ticks % SUM_TICKS == 0:
                self._sum_up()
            if self._due_s is None:
                self._due_s = due_s if (due_s := self._wards.next_deadline_s) is not None else math.inf
            if self._due_s <= self.now_s and now_s >= self._rests_until_s:
                self.tell(w.Tick())

    def _tick_one(self, contact: Contact, now_s: float) -> None:
        """A root too: a bug with one worker is not the others'."""
        try:
            contact.tick(now_s)
        except Exception:
            log.exception("bug in a tick of %r", contact)

    def _tick_levels(self) -> None:
        """A root too: no verdict waits for a bug in levels."""
        try:
            self.levels.tick(self.contacts.values())
        except Exception:
            log.exception("bug in a step of the levels")

    def _sum_up(self) -> None:
        paths = {f"{key.instance:x}": key.path for key in self.contacts}
        for instance, happened in self._tally.flush(self.now_s).items():
            if instance in paths:
                self.tell(w.Reported(paths[instance], happened.attempts(), happened.tokens))
        paces = {paths[one]: pace for one, pace in self._tally.paces(self.now_s).items() if one in paths}
        if paces:
            self.tell(w.Paces(paces))

    # -- what is to be done

    def _perform(self, effects: tuple[w.Effect, ...]) -> None:
        written: list[str] = []
        by_path = {contact.path: contact for contact in self.contacts.values()} if effects else {}
        for effect in effects:
            match effect:
                case w.Write():
                    written.append(HEALTH + effect.path)
                    self._outbox.put(written[-1], msgspec.json.encode(effect.record))
                case w.WriteExpected():
                    written.append(self._expected + effect.name)
                    self._outbox.put(written[-1], None if effect.record is None else msgspec.json.encode(effect.record))
                case w.Forget():
                    self._outbox.put(HEALTH + effect.path, None)
                    self._tally.forget(effect.path.rpartition("/")[2])
                    self._metrics.forget(effect.path)
                case w.Ask() if effect.path in by_path:
                    by_path[effect.path].ask(effect)
                case w.Ask():
                    gone = w.NoAnswer(effect.path, effect.number, "it is not in contact", sound=False)
                    self._loop.call_soon(self.tell, gone)
                case w.Reload() if effect.path in by_path:
                    self._outbox.after([HEALTH + effect.path, *written], partial(by_path[effect.path].reload, effect))
                case w.Relieve() if effect.path in by_path:
                    down = partial(by_path[effect.path].step_down, effect)
                    self._outbox.after([HEALTH + effect.path, *written], down)
                case w.Flag():
                    self._outbox.after([HEALTH + effect.path, *written], partial(self._flag, effect))
                case w.Told():
                    self._say(effect)

    def _flag(self, effect: w.Flag) -> None:
        streams, counted = self._tally.streams_since(effect.path.rpartition("/")[2], effect.since_s)
        many = f"{'' if counted else 'at least '}{streams} streams of the last {self.now_s - effect.since_s:.0f} s"
        log.error("%s: %s may be wrong: %s", effect.path, many, effect.reason)
        self._metrics.quarantined(streams)

    def _say(self, told: w.Told) -> None:
        level = logging.WARNING if told.what in LOUD else logging.DEBUG if told.what in QUIET else logging.INFO
        name = next((one.instance.name for one in self.contacts.values() if one.path == told.path), told.path)
        log.log(level, "%s: %s", name or "all", told.text)
