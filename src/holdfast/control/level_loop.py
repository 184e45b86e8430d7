"""Hands `Levels` what control hears of its workers, and has written down what they decide.

A shell without a task of its own: whoever leads calls it. Always true: the level and the spares are decided from the
verdicts as they are handed to be written, never from others; a level is written when it changes, with its time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from holdfast.control import words as w
from holdfast.control.contact import Contact
from holdfast.control.levels import Beaten, Came, Ended, Event, Facts, Levels, Tick, Weighed, Went, WriteLevel
from holdfast.control.outbox import Outbox
from holdfast.discovery.keys import LEVELS
from holdfast.health.records import HealthRecord, Report
from holdfast.routing.capacity import Capacity
from holdfast.routing.degradation import Degradation, DegradationError, LevelRecord
from holdfast.routing.spares import Spared
from holdfast.spec.levels import LevelSettings
from holdfast.wire.messages import Beat

log = logging.getLogger("holdfast.control")

FRONTENDS_MAX = 256  # whose last report is remembered
COUNT_MAX = 2**53  # between two reports: more is nothing that was counted


class LevelLoop:
    """One reign's level and spares. `tell`: to the wards, of a worker that becomes a spare or is none any more."""

    def __init__(
        self,
        settings: LevelSettings,
        deployment: str,
        outbox: Outbox,
        *,
        unix_s: Callable[[], float],
        tell: Callable[[w.Spared], None],
    ) -> None:
        self._settings = settings
        self._key = LEVELS + deployment
        self._outbox = outbox
        self._unix_s = unix_s
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._levels = Levels(settings)
        self._beats: dict[str, Beat] = {}  # the last that was taken, by path
        self._records: dict[str, HealthRecord] = {}  # as they are to stand, by path
        self._ended: dict[str, tuple[int, int, int]] = {}  # as last reported, by frontend

    def __repr__(self) -> str:
        return f"<LevelLoop {self._levels!r}>"

    @property
    def capacity(self) -> Capacity | None:
        return self._levels.capacity

    def begin(self, values: Mapping[str, bytes], records: Mapping[str, HealthRecord], there: Iterable[str]) -> None:
        """Go on from what stands: the level, and the verdicts. `there`: the paths of workers that are in the store."""
        self._records = dict(records)
        judged = any(path in records for path in there)
        record: LevelRecord | None = None
        try:
            record = msgspec.json.decode(values[self._key], type=LevelRecord) if self._key in values else None
            if record is not None:
                Degradation(self._settings.times, record)  # it can be gone on from
            log.info("goes on from level %d", record.level if record is not None else 0)
        except (ValueError, RecursionError, DegradationError) as error:
            log.warning("cannot read %s: %s; beginning anew", self._key, error)
            record = None
        self._levels = Levels(self._settings, record, judged=judged)
        if record is not None:
            self._outbox.stands(self._key, values[self._key])

    def heard(self, event: w.Event, effects: Sequence[w.Effect], contacts: Iterable[Contact]) -> None:
        """The wards took this, and decided that."""
        match event:
            case w.Found():
                welcome = next((one.welcome for one in contacts if one.path == event.path), None)
                places = welcome.concurrency if welcome is not None else 1
                own = event.facts
                facts = Facts(own.name, f"{own.model}/{own.kind}", places, group=own.group, active=own.active)
                self._step(Came(event.path, facts))
                if (record := self._records.get(event.path)) is not None:
                    self._step(Weighed(event.path, record))
            case w.Lost():
                self._beats.pop(event.path, None)
                self._step(Went(event.path))
        for effect in effects:
            if isinstance(effect, w.Write):
                self._records[effect.path] = effect.record
                self._step(Weighed(effect.path, effect.record))
            elif isinstance(effect, w.Forget):
                self._records.pop(effect.path, None)

    def reported(self, frontend: str, report: Report) -> None:
        """A frontend's counts of requests that ended well; its first report is where counting begins."""
        now = (report.ended, report.prompt_tokens, report.answer_tokens)
        before = self._ended.pop(frontend, now)
        self._ended[frontend] = now
        if len(self._ended) > FRONTENDS_MAX:
            del self._ended[next(iter(self._ended))]
        more = [count - known for count, known in zip(now, before, strict=True)]
        if more[0] > 0 and min(more) >= 0 and max(more) <= COUNT_MAX:  # what else it says is no count
            self._step(Ended(*more))

    def tick(self, contacts: Iterable[Contact]) -> None:
        """Ten times a second."""
        here = {contact.path: contact for contact in contacts}
        if len(self._beats) > len(here):  # of those that are gone one may have come last
            self._beats = {path: beat for path, beat in self._beats.items() if path in here}
        for contact in here.values():
            beat = contact.beats.last
            if beat is not None and beat is not self._beats.get(contact.path):
                self._beats[contact.path] = beat
                self._step(Beaten(contact.path, beat.running, beat.tokens, beat.blocks))
        if self._loop.time() >= self._levels.next_deadline_s():
            self._step(Tick())

    def _step(self, event: Event) -> None:
        for effect in self._levels.step(event, self._loop.time()):
            match effect:
                case WriteLevel():
                    record = replace(effect.record, since_unix_s=self._unix_s())
                    self._outbox.put(self._key, msgspec.json.encode(record))
                    if effect.changed:
                        log.warning("level %d: %s", record.level, record.reason)
                case Spared():
                    name = self._records[effect.name].name
                    log.info("%s %s: %s", name, "is a spare" if effect.spare else "serves", effect.reason)
                    self._tell(w.Spared(effect.name, effect.spare))
