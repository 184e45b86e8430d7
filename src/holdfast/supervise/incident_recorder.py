"""Writes down, for the supervisor, each unasked end of a process and each verdict of control that takes a worker's
traffic, and asks other processes until all is known of it.

Always true: an incident is on disk before its process is started again, or as soon as the disk takes it; until then it
is kept here, and nothing else waits for it; a process that keeps ending before it is ready is one incident, with a
count. The end of a part (a vault's server, its keeper) counts only while the job it belongs to lives and was not asked
to leave: one that takes its parts along is an incident of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from holdfast.core.address import parse_address
from holdfast.core.ports import Clock, Network
from holdfast.core.procfs import is_ending
from holdfast.failover.journal import Term, read_terms
from holdfast.health.status_page import VerdictShown
from holdfast.spec.jobs import Job
from holdfast.supervise.engine_groups import with_groups
from holdfast.supervise.incidents import (
    INCIDENTS_MAX,
    Incident,
    complete,
    ended_unix_s,
    led,
    read_own,
    write_incidents,
)
from holdfast.supervise.lock import beat
from holdfast.supervise.machine import Fell, Life, Phase
from holdfast.supervise.processes import Processes, exit_words
from holdfast.supervise.records import Record, forget, journals_dir, read_record, read_records
from holdfast.supervise.slots import Slot
from holdfast.supervise.status import look
from holdfast.supervise.status_client import get_facts
from holdfast.supervise.verdicts import decided, last_trouble, trouble

LOOK_S = 1.0  # between two rounds of questions while something is not known yet, or not written
BEAT_S = 1.0  # between two signs that this supervisor looks: as exact as people want to know since when it does not
# Streams of a dead worker have their next token within a second; slower ones are seen by the next look.
HEARD_S = 5.0
GIVEN_UP_S = 120.0  # what no process has said by then none will


Key = tuple[float, str]  # when, and the name


class IncidentRecorder:
    """Keeps the incidents of one state directory; `apart`: of one supervisor among several there, by its name."""

    def __init__(self, state_dir: Path, clock: Clock, apart: str = "") -> None:
        self._state_dir = state_dir
        self._clock = clock
        self._apart = apart
        self.incidents = {(incident.unix_s, incident.name): incident for incident in read_own(state_dir, apart)}
        self._down: dict[str, Key] = {}  # of those whose process is not ready again
        # Of those without traffic, by control's verdict; that outlives us, so what was told of it goes on.
        told = [(key, one) for key, one in self.incidents.items() if one.verdict and one.back_after_s is None]
        self._unwell = {name: key for key, one in told for name in (one.name, *one.also)}
        self._open: set[Key] = set()  # about which more may be heard
        self._news = asyncio.Event()
        self._written = True
        # The last two times it looked: when it was stopped, it may hear of an end before or after it looks again.
        self._looked_ns = [self._now_ns()] * 2

    def fell(self, slot: Slot, fell: Fell) -> None:
        """Its process ended unasked, just now."""
        job, key = slot.job, self._down.get(slot.job.name)
        verdict = self.incidents.get(unwell) if (unwell := self._unwell.pop(job.name, None)) else None
        if unwell and verdict and verdict.name == job.name and not verdict.pid:
            self._ended(unwell, slot, fell)
            return
        if not fell.was_ready and key in self.incidents:
            same = self.incidents[key]
            self._keep(key, replace(same, times=same.times + 1, why=fell.how))
            return
        instance = slot.record.instance if slot.record is not None and slot.record.pid == fell.pid else ""
        terms = self._terms(job.group)
        epoch = led(terms, fell.pid, self._looked_ns[0])
        part = ("active" if epoch else "standby") if job.group and fell.was_ready else ""
        ended_s = ended_unix_s(terms, epoch, self._clock.unix_s())
        made = Incident(ended_s, job.name, job.role, fell.pid, fell.how, part, job.group, instance, epoch)
        key = self._down[job.name] = (made.unix_s, made.name)
        self._keep(key, made)

    def back(self, slot: Slot) -> None:
        """A process of this name is ready."""
        key = self._down.pop(slot.job.name, None)
        if key in self.incidents:
            incident = self.incidents[key]
            self._keep(key, replace(incident, back_after_s=round(self._clock.unix_s() - incident.unix_s, 3)))

    def _ended(self, key: Key, slot: Slot, fell: Fell) -> None:
        """The process of one that had lost its traffic ended: the same incident."""
        same, terms = self.incidents[key], self._terms(slot.job.group)
        epoch = led(terms, fell.pid, self._looked_ns[0])
        self._down[same.name] = key
        ended_s = ended_unix_s(terms, epoch, self._clock.unix_s())
        why = f"{same.why}; died: {fell.how}"
        self._keep(key, replace(same, pid=fell.pid, why=why, epoch=epoch, ended_unix_s=ended_s))

    def decided(self, verdicts: Sequence[VerdictShown]) -> None:
        """What control holds against workers now."""
        for verdict in verdicts:
            key, words = self._unwell.get(verdict.name), trouble(verdict)
            if key in self.incidents:
                if verdict.weight > 0.0 and not verdict.spare:
                    del self._unwell[verdict.name]
                    same = self.incidents[key]
                    gone_s = max(same.back_after_s or 0.0, verdict.since_unix_s - same.unix_s)
                    self._keep(key, replace(same, back_after_s=round(gone_s, 3)))
            elif words and verdict.name not in self._down:
                self._fell(verdict, words)
            elif verdict.weight > 0.0 and (words := last_trouble(verdict)):
                self._fell_briefly(verdict, words)

    def _fell_briefly(self, verdict: VerdictShown, words: str) -> None:
        """It lost its traffic and has it again, both between two looks, or that is told already."""
        at_s = verdict.fell_unix_s
        if self._joined(verdict, words, at_s) is not None:
            return
        if len(self.incidents) >= INCIDENTS_MAX and at_s < next(iter(self.incidents))[0]:
            return  # it was told, and is forgotten
        made = Incident(at_s, verdict.name, "worker", 0, verdict.fell_for[words], "", verdict.group, verdict.instance)
        times = {"detected_unix_s": at_s, "back_after_s": round(max(0.0, verdict.since_unix_s - at_s), 3)}
        self._keep((at_s, verdict.name), replace(made, verdict=words, fall=verdict.fall, **times))

    def _fell(self, verdict: VerdictShown, words: str) -> None:
        began_s = verdict.since_unix_s
        if (same := self._joined(verdict, words, began_s)) is not None:
            self._unwell[verdict.name] = same
            return
        key = self._unwell[verdict.name] = (began_s, verdict.name)
        made = Incident(began_s, verdict.name, "worker", 0, verdict.reason, "", verdict.group, verdict.instance)
        isolated_s = verdict.written_unix_s or None
        self._keep(
            key,
            replace(made, verdict=words, fall=verdict.fall, detected_unix_s=began_s, isolated_unix_s=isolated_s),
        )

    def _joined(self, verdict: VerdictShown, words: str, at_s: float) -> Key | None:
        """The incident that this is of, if that is told: its own, or that of an engine that shares its weights; which
        lasts as long as one of them has no traffic, even if one ended meanwhile."""
        lasting = set(self._unwell.values())
        for key, one in self.incidents.items():
            mine = bool(one.verdict) and verdict.name in (one.name, *one.also)
            shared = bool(one.group) and (one.group, one.verdict) == (verdict.group, words)
            back_s = None if key in lasting else one.back_after_s
            if (mine or shared) and one.unix_s <= at_s <= one.unix_s + (math.inf if back_s is None else back_s):
                if not mine:
                    self._keep(key, replace(one, also=(*one.also, verdict.name)))
                return key
        return None

    async def listen(self, network: Network) -> None:
        """Hear what control decides; for ever. What stands is told, and when each last fell and for what: so nothing
        that was over between two looks is missed, and a restart of either tells nothing twice."""
        while True:
            await asyncio.sleep(LOOK_S)
            records = read_records(self._state_dir)
            asked = [record for record in records if record.role == "control" and record.status]
            answers = await asyncio.gather(
                *(get_facts(parse_address(record.status), network, LOOK_S) for record in asked)
            )
            page = decided([facts for facts in answers if facts is not None])
            if page is not None and page.leads:
                # A name may be that of one before, or of one elsewhere: of ours the one that has it now is meant.
                ours = {record.name: record.instance for record in records if record.instance}
                self.decided([one for one in page.verdicts if one.instance == ours.get(one.name, one.instance)])

    async def run(self, network: Network) -> None:
        """Ask around while something is not known; for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._open or not self._written:
                await asyncio.sleep(LOOK_S)
                if self._open:
                    await self._ask(network)
                if not self._written:
                    self._write()

    async def look_on(self) -> None:
        """Remember, and show, that this supervisor looks; for ever."""
        while True:
            self._looked_ns = [self._looked_ns[1], self._now_ns()]
            beat(self._state_dir)
            await asyncio.sleep(BEAT_S)

    async def _ask(self, network: Network) -> None:
        groups = {self.incidents[key].name: self.incidents[key].group for key in self._open}
        statuses = with_groups(await look(self._state_dir, network), groups)
        for key in sorted(self._open):
            incident = self.incidents[key]
            self._keep(key, complete(incident, statuses, self._terms(incident.group)))
            if self._is_told(self.incidents[key]):
                self._open.discard(key)

    def _is_told(self, incident: Incident) -> bool:
        age_s = self._clock.unix_s() - incident.process_ended_s
        whole = incident.back_after_s is not None and bool(incident.successor or not incident.epoch)
        return age_s > GIVEN_UP_S or (whole and age_s > HEARD_S)

    def _now_ns(self) -> int:
        return round(self._clock.monotonic_s() * 1e9)

    def _terms(self, group: str) -> list[Term]:
        with contextlib.suppress(OSError):
            return read_terms(journals_dir(self._state_dir, group)) if group else []
        return []

    def _keep(self, key: Key, incident: Incident) -> None:
        if self.incidents.get(key) == incident:
            return
        self.incidents[key] = incident
        self._open.add(key)
        if len(self.incidents) > INCIDENTS_MAX:
            oldest = next(iter(self.incidents))
            del self.incidents[oldest]
            self._open.discard(oldest)
        self._news.set()
        self._write()

    def _write(self) -> None:
        try:
            write_incidents(self._state_dir, list(self.incidents.values()), self._apart)
        except OSError:
            self._written = False  # a full disk: it is tried again while `run` runs
        else:
            self._written = True


PARTS_LOOK_S = 1.0  # between two looks for new ones
MISSED_LOOK_S = 0.1  # while one is missed: its peer has another within a second


class PartProcesses:
    """Processes that a job starts and looks after itself: not the supervisor's to start again, but its to write down
    when one ends alone. Holds every part of the jobs in `whole`, by its pidfd, from the first look at its record on."""

    def __init__(
        self, state_dir: Path, processes: Processes, whole: Mapping[str, Slot], witness: IncidentRecorder
    ) -> None:
        self._state_dir = state_dir
        self._processes = processes
        self._whole = whole
        self._witness = witness
        self._held: dict[str, int] = {}  # pids by name; 0: it ended, and there is no other yet

    async def run(self) -> None:
        """For ever."""
        while True:
            self.look()
            await asyncio.sleep(MISSED_LOOK_S if self.misses_any else PARTS_LOOK_S)

    @property
    def misses_any(self) -> bool:
        """Whether one ended and its job has no other yet."""
        return not all(self._held.values())

    def look(self) -> None:
        """Hold parts that are new; of a job that is gone no part is missed, and nothing is left."""
        records = read_records(self._state_dir)
        ours = {record.name for record in records if record.part_of in self._whole}
        self._held = {name: pid for name, pid in self._held.items() if pid or name in ours}
        for record in records:
            if record.name not in ours or self._held.get(record.name):
                self._tidy(record)
                continue  # not ours, or held: one that follows is new once the end of the one before was heard
            if record.name in self._whole:
                continue  # left behind by a job that is gone, and being stopped
            if (process := self._processes.adopt(record)) is None:
                continue
            slot = Slot.of(Job(record.name, record.role))
            slot.record = record
            self._held[record.name] = record.pid
            process.on_exit(partial(self._gone, slot, record.pid, record.part_of))
            self._witness.back(slot)

    def _tidy(self, record: Record) -> None:
        """A vault that had to be killed could not do it itself."""
        known = record.part_of in self._whole or record.name in self._whole
        if record.part_of and not known and not record.alive and read_record(self._state_dir, record.part_of) is None:
            forget(self._state_dir, record.name)

    def _gone(self, slot: Slot, pid: int, part_of: str, status: int | None) -> None:
        if self._held.get(slot.job.name) == pid:
            self._held[slot.job.name] = 0
        whole = self._whole[part_of].life if part_of in self._whole else Life()
        if whole.phase in (Phase.STARTING, Phase.READY) and is_ending(whole.pid) is False:
            self._witness.fell(slot, Fell(pid, exit_words(status, ""), was_ready=True))
