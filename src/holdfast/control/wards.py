"""All workers' health, coupled: what happens to any of them in; what is to be asked, written, done out. Pure: no I/O,
no clock (`now_s` is wall time; one that goes back is taken as the last), no randomness but what is injected.

Theory (facts 13, 14, 22-24). Each machine below knows one thing of one worker: its canaries, its breaker, its standing.
What none of them can know is who else there is, and that is decided here. A wrong answer is the weights', so every
process that reads them hears of it: a standby, and one that starts later and maps what was convicted before. Who is
slow is so beside the others of its set. A device's fault is all its workers', also of those that come after. And the
weights that were convicted are verified, and loaded anew where they are damaged: where another set serves its streams
are there by then, and the last one does it in place, with its streams held by whoever has them. Where they are right,
the verdict is the process's: the weights are acquitted, and its standby takes over.

No verdict takes the last worker of a set away, or most of them at once (`health.last_resort`): those serve on, are
tried every few seconds, and fall only once others can take their streams. One that fails and has a standby hands over.

Nothing is done that is not written down first, and what is written down is enough to go on: `restore` gives another
process the same wards. So a verdict outlives its judge, nobody is revived because somebody forgot, and what was done
under a number (a fall, a canary, a load) is not done again.

Always true: the effects of a step are its records first, then deeds; every worker with weights of one name is
quarantined or none is; at most one question is out to a worker; a worker that is asleep is asked nothing; a name is
asked to be loaded anew at most once in `RELOAD_S`, and ever more seldom; only who is lost is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from holdfast.control.mates import convicts_of, kept_in, mates_of, standby_of
from holdfast.control.questions import expectations_of, name_of_key
from holdfast.control.ward import (
    FAILING,
    OWED_LOOK_S,
    OWED_S,
    PROBE_S,
    RELIEF_AGAIN_S,
    RELIEF_S,
    RELOAD_S,
    RIGHTS,
    Limits,
    Ward,
    errors_before,
    name_of,
    next_reload,
    were_asked,
)
from holdfast.control.words import (
    Answer,
    Ask,
    DeviceCleared,
    DeviceFaulted,
    Doubted,
    Effect,
    EngineFailed,
    Event,
    Flag,
    Forget,
    Found,
    Judged,
    Listed,
    Lost,
    NoAnswer,
    NoPlace,
    Paces,
    Relieve,
    Reload,
    Reported,
    Spared,
    Tick,
    Told,
    Verified,
    What,
    Write,
    WriteExpected,
)
from holdfast.health import breaker as b
from holdfast.health import canary as c
from holdfast.health import expectations as x
from holdfast.health import history, outliers
from holdfast.health import standing as s
from holdfast.health.device_faults import Severity
from holdfast.health.records import HealthRecord

# Dead workers whose records are kept, at most: the oldest go first. A worker that cannot start dies all day.
DEAD_MAX = 256
# Kinds of workers that are gone (another card, build, dtype or device), of which it is kept what they must answer and
# which loads were convicted: a deployment's last few versions.
LEFT_MAX = 16
DISPUTED = "others answer otherwise, and it is not known who is right; the weights of all of them are verified"
CONVICTED = "its weights were found to answer wrongly before"


class Wards:
    """Those of one deployment. `by`: who writes; `jitter` draws from [0, 1)."""

    __slots__ = (
        "_by", "_deeds", "_dirty", "_expectations", "_faults", "_jitter", "_limits", "_now_s", "_outliers", "_touched",
        "_wards", "_written",
    )  # fmt: skip

    def __init__(self, by: str, jitter: Callable[[], float], limits: Limits | None = None) -> None:
        self._by = by
        self._jitter = jitter
        self._limits = limits or Limits()
        self._now_s = 0.0
        self._wards: dict[str, Ward] = {}
        self._expectations: dict[x.Key, x.Expectations] = {}
        self._written: dict[str, x.Record] = {}  # expectations, as they were last written down, by name
        self._outliers: dict[x.Key, outliers.Outliers] = {}
        self._faults: dict[str, s.DeviceFaulted] = {}  # by device, the gravest
        self._deeds: list[Effect] = []
        self._dirty: dict[str, None] = {}  # wards that may have to be written, in order
        self._touched: dict[x.Key, None] = {}  # and expectations

    def __repr__(self) -> str:
        return f"<Wards {[repr(ward) for ward in self._wards.values()]}>"

    @property
    def standings(self) -> dict[str, s.Standing]:  # by path; the lost too, while they are remembered
        return {path: ward.standing for path, ward in self._wards.items()}

    @property
    def next_deadline_s(self) -> float | None:
        dues = [due for ward in self._wards.values() for due in ward.deadlines_s()]
        dues += [due for each in self._expectations.values() if (due := each.next_deadline_s) is not None]
        return min(dues, default=None)

    def restore(self, records: Mapping[str, HealthRecord], expected: Mapping[str, x.Record], now_s: float) -> None:
        """Go on from what is written down, before anything else happens. Who is there is to be told by `Found`, and
        what is wrong with devices by `DeviceFaulted`."""
        assert not self._wards, self
        self._now_s = now_s
        self._written = dict(expected)
        for path, record in records.items():
            ward = self._wards[path] = Ward(path, self._jitter, self._limits)
            ward.restore(record, now_s)

    def step(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Take what happened; what is to be done, in order."""
        self._now_s = max(self._now_s, now_s)
        self._take(event)
        writes: list[Effect] = []
        for key in self._touched:
            name, record = name_of_key(key), self._expectations[key].record()
            if (known := self._written.get(name)) is None or replace(known, at_unix_s=0.0) != record:
                self._written[name] = replace(record, at_unix_s=self._now_s)
                writes.append(WriteExpected(name, self._written[name]))
        for path in self._dirty:
            ward = self._wards.get(path)
            if ward and ward.record(ward.known.at_unix_s, ward.known.by) != ward.known:
                ward.known = ward.record(self._now_s, self._by)
                writes.append(Write(path, ward.known))
        deeds, self._deeds = self._deeds, []
        self._dirty.clear()
        self._touched.clear()
        return (*writes, *deeds)

    def _take(self, event: Event) -> None:
        match event:
            case Found():
                self._find(event)
            case Tick():
                self._tick()
            case Paces():
                self._compare(event.paces)
            case DeviceFaulted():
                fault = s.DeviceFaulted(event.fault, event.at_s)
                self._blame(event.device, fault)
                self._tell_device(event.device, fault)
            case DeviceCleared():
                self._faults.pop(event.device, None)
                self._tell_device(event.device, s.DeviceCleared(min(event.at_s, self._now_s)))
            case _ if event.path in self._wards:
                self._take_of(self._wards[event.path], event)

    def _take_of(self, ward: Ward, event: Event) -> None:
        """What concerns one worker that is known."""
        match event:
            case Listed():
                ward.find_s = None
            case Lost():
                self._lose(ward, event.reason)
            case Answer():
                self._hear(ward, event)
            case NoAnswer():
                moving = event.moving or (ward.canary.began_s is not None and ward.moved_s >= ward.canary.began_s)
                moving = moving and not event.failed
                self._tell_canary(ward, c.Unanswered(event.number, event.reason, moving, event.sound))
            case NoPlace():
                self._tell_canary(ward, c.Refused(event.number))
            case Doubted():
                self._tell_canary(ward, c.Asked(event.reason))
            case Judged():
                self._tell_standing(ward, event.judged)
            case Reported():
                ward.moved_s = self._now_s if event.tokens else ward.moved_s
                ward.errors = history.after_attempts(ward.errors, event.attempts.failed, self._now_s)
                self._tell_breaker(ward, event.attempts)
                self._check_failed(ward, event.attempts)
            case EngineFailed():
                self._tell_standing(ward, s.ReportedFatal(ward.standing.load, event.reason))
            case Verified():
                self._hear_verified(ward, event.load)
            case Spared():
                ward.spare = event.spare
                self._dirty[ward.path] = None

    # -- who is there

    def _find(self, event: Found) -> None:
        facts = event.facts
        ward = self._wards.setdefault(event.path, Ward(event.path, self._jitter, self._limits))
        if ward.is_older(facts):
            return
        before = ward.facts
        loaded = name_of(facts.weights or ward.path, facts.load or 1)
        fresh, ward.loaded = loaded != ward.loaded, loaded
        ward.facts, ward.find_s, ward.sought_until_s, ward.dead_s = facts, None, None, None
        if fresh:
            ward.accused, ward.verified, ward.rights = False, False, 0
        if not ward.standing.load:
            ward.errors = errors_before(facts, self._wards.values())
        load = ward.standing.load + fresh
        if before is None or before.key != facts.key:
            self._outliers.setdefault(facts.key, outliers.Outliers()).restore(ward.path, ward.pace)
        if before is not None and before.key != facts.key:
            self._outliers[before.key].forget(ward.path)
            self._tell_sets(before.key)
        self._tell_sets(facts.key)
        if fresh and ward.standing.load:
            self._tell_breaker(ward, b.Renewed())
        took_over = not fresh and before is not None and not before.active and were_asked(loaded, self._wards.values())
        self._tell_canary(ward, c.Present(load, took_over) if facts.active else c.Gone())
        # Engines of a group check themselves before they serve, and take over with streams.
        self._tell_standing(ward, s.Present(load, event.serving or bool(facts.group)))
        if not ward.standing.quarantined and self._is_convicted(loaded):
            self._tell_standing(ward, s.CanaryFailed(load, self._now_s, s.Failing.WRONG, CONVICTED))
        if ward.standing.quarantined:
            self._reload(loaded)
        for fault in [self._faults[device] for device in facts.devices if device in self._faults]:
            self._tell_standing(ward, fault)
        self._review(ward)

    def _lose(self, ward: Ward, reason: str) -> None:
        facts, ward.facts, ward.find_s, ward.sought_until_s = ward.facts, None, None, None
        if ward.dead_s is not None:
            return
        ward.dead_s = self._now_s
        self._tell_canary(ward, c.Gone())
        self._tell_standing(ward, s.Gone(ward.standing.load, reason))
        if facts is not None:
            self._outliers[facts.key].forget(ward.path)
            self._tell_sets(facts.key)

    def _tell_sets(self, key: x.Key) -> None:
        of_key = [w for w in self._wards.values() if w.facts and w.facts.key == key]
        if key not in self._expectations and of_key:
            self._expectations[key] = expectations_of(key, [w.facts for w in of_key if w.facts])
            if (written := self._written.get(name_of_key(key))) is not None:
                self._expectations[key].restore(written)
        sets: dict[str, bool] = {}
        for each in of_key:
            sets[each.loaded] = sets.get(each.loaded, False) or bool(each.facts and each.facts.verified)
        self._tell_expectations(key, x.Sets(sets))

    def _is_convicted(self, loaded: str) -> bool:
        written = any(loaded in record.convicted for record in self._written.values())
        wards = self._wards.values()
        return written or any(w.loaded == loaded and w.standing.quarantined and not w.misled for w in wards)

    # -- time

    def _tick(self) -> None:
        for ward in list(self._wards.values()):
            if ward.find_s is not None and ward.find_s <= self._now_s:
                self._lose(ward, "it was not found again")
            if ward.awake:
                self._tell_canary(ward, c.Tick())
                self._tell_breaker(ward, b.Tick())
                self._tell_standing(ward, s.Tick())
            if ward.relief_until_s is not None and ward.relief_until_s <= self._now_s:
                ward.relief_until_s = None
                self._review(ward)
            if ward.sought_until_s is not None and ward.sought_until_s <= self._now_s:
                ward.sought_until_s = None
                self._review(ward)
            if ward.probed and ward.probe_s <= self._now_s:
                self._probe(ward)
            if ward.owing and ward.look_s <= self._now_s:
                self._collect(ward)
            if ward.repace_s is not None and self._stands_alone(ward):
                self._forgive(ward)
            if ward.repace_s is not None and ward.repace_s <= self._now_s:
                ward.paced_s = self._now_s
                self._tell_canary(ward, c.Asked("is it in pace again?", peer=True))
            if ward.reload_again_s is not None and ward.reload_again_s <= self._now_s:
                self._reload(ward.loaded)
        for key in self._expectations:
            self._tell_expectations(key, x.Tick())
        dead = sorted((w.dead_s, w.path) for w in self._wards.values() if w.dead_s is not None)
        for place, (_, path) in enumerate(dead):
            if place < len(dead) - DEAD_MAX or (self._wards[path].forget_s or 0.0) <= self._now_s:
                del self._wards[path]
                self._deeds.append(Forget(path))
        self._prune()

    def _prune(self) -> None:
        """Forget what was expected of kinds of workers that are gone, but for the latest. A kind whose workers are yet
        to be found is not gone."""
        used = {w.facts.key for w in self._wards.values() if w.facts}
        sought = {w.model for w in self._wards.values() if w.facts is None and w.dead_s is None}
        left = ((name, one) for name, one in self._written.items() if not (one.key in used or one.key.card in sought))
        for name, record in sorted(left, key=lambda each: each[1].at_unix_s)[:-LEFT_MAX]:
            for kept in (self._expectations, self._outliers, self._touched):
                kept.pop(record.key, None)
            del self._written[name]
            self._deeds.append(WriteExpected(name, None))

    # -- what they do

    def _hear(self, ward: Ward, event: Answer) -> None:
        if ward.asked is None or ward.asked[0] != event.number or ward.facts is None:
            return
        key, question = ward.facts.key, ward.asked[1]
        expectations = self._expectations[key]
        wanted, said = expectations.questions[question].tokens, event.answer
        if len(said.tokens) < wanted:
            why = f"{len(said.tokens)} of {wanted} tokens came"
            self._tell_canary(ward, c.Unanswered(event.number, why, moving=bool(said.tokens)))
            return
        began_s = ward.canary.began_s or self._now_s
        others = [w for w in self._set_of(key) if w is not ward]
        ward.pace_s = event.took_s / len(said.tokens)
        # First the votes: what it is judged by may be learnt, or withdrawn, by this answer.
        stood = expectations.expected_of(question, ward.loaded)
        self._tell_expectations(key, x.Heard(ward.loaded, question, said))
        answered = c.Answered(
            event.number,
            question,
            event.took_s,
            len(said.tokens),
            event.occupancy,
            wrong=expectations.judge(question, said),
            peers=c.pace_of((w.canary for w in others), began_s),
            known=stood is not None and stood is expectations.expected_of(question, ward.loaded),
        )
        self._tell_canary(ward, answered)
        if ward.repace_s is not None:
            paces = {w.path: w.pace_s for w in (ward, *others) if w.pace_s is not None}
            self._measure(key, paces, only=ward.path)

    def _compare(self, paces: Mapping[str, float]) -> None:
        keys = {ward.facts.key: None for path in paces if (ward := self._wards.get(path)) and ward.facts}
        for key in keys:
            self._measure(key, {w.path: paces[w.path] for w in self._set_of(key) if w.path in paces})

    def _measure(self, key: x.Key, paces: Mapping[str, float], only: str | None = None) -> None:
        for paced in self._outliers[key].measure(paces, self._now_s, only):
            self._tell_standing(self._wards[paced.name], paced)
        for path in paces if only is None else ():
            self._wards[path].paced_s = self._now_s

    def _stands_alone(self, ward: Ward) -> bool:
        """Whether nobody else of its set can serve, nor is about to: a group that nobody serves for may be waking."""
        assert ward.facts
        of_key = [w for w in self._wards.values() if w.facts and w.facts.key == ward.facts.key]
        served = {w.facts.group for w in of_key if w.facts and w.facts.active}
        others = [w for w in of_key if w is not ward and not w.standing.quarantined]
        return not any(s.earned(w.standing) if w.awake else w.facts and w.facts.group not in served for w in others)

    def _collect(self, ward: Ward) -> None:
        """Ask for the next canary that it owes."""
        ward.look_s = self._now_s + OWED_LOOK_S
        at_once = ward.standing.last_resort or self._stands_alone(ward)
        if at_once or self._now_s >= max(ward.owed_s, ward.standing.fell_s) + OWED_S:
            ward.owed_s = self._now_s
            self._tell_canary(ward, c.Asked("it owes canaries"))

    def _forgive(self, ward: Ward) -> None:
        """Whoever is left alone is slower than nobody: slow answers are better than none."""
        assert ward.facts
        self._tell(ward, What.NOTE, "there is no other left to be slower than")
        self._outliers[ward.facts.key].restore(ward.path, outliers.Pace.NORMAL)
        self._tell_standing(ward, outliers.Paced(ward.path, outliers.Pace.NORMAL, 1.0))

    def _set_of(self, key: x.Key) -> list[Ward]:
        """Who could take each other's place."""
        return [
            w for w in self._wards.values() if w.awake and w.facts and w.facts.key == key and not w.standing.quarantined
        ]

    # -- the last resort

    def _review(self, ward: Ward) -> None:
        """Look who of its set must serve as a last resort, after something else than a verdict changed."""
        mates = mates_of(ward, self._wards.values())
        for mate in mates:
            self._relieve(mate, mates)
        self._keep(mates, kept_in(mates))

    def _keep(self, mates: list[Ward], kept: set[str]) -> None:
        for ward in mates:
            if (ward.path in kept) is not ward.standing.last_resort:
                self._tell_standing(ward, s.LastResort(ward.path in kept))

    def _probe(self, ward: Ward) -> None:
        """Try a worker that serves only because too few others can."""
        ward.probe_s = self._now_s + PROBE_S
        self._review(ward)
        if ward.breaker.state is b.State.OPEN:
            self._tell_breaker(ward, b.Probe())
        elif ward.tried:
            self._tell_canary(ward, c.Asked("too few others can serve"))

    def _check_failed(self, ward: Ward, attempts: b.Attempts) -> None:
        """Check a worker on which requests fail and none succeeds: few clients may take long to open its breaker, and
        one bad request must not."""
        fails = attempts.failed and not (attempts.succeeded or attempts.outlived)
        if fails and ward.awake and self._now_s >= ward.failed_s + PROBE_S:
            ward.failed_s = self._now_s
            self._tell_canary(ward, c.Asked("a request failed on it"))

    def _relieve(self, ward: Ward, mates: list[Ward]) -> None:
        """Ask a worker that fails, or answers wrongly with weights that are right, to hand over to its standby. Where
        another process was wrong with them too, the next one would be."""
        fails = ward.failing and not ward.standing.quarantined and not s.earned(ward.standing)
        misled = ward.misled and not convicts_of(ward, self._wards.values())
        standby = standby_of(ward, mates) if ward.awake and (fails or misled) else None
        asked_s = max(mate.relief_s for mate in mates if mate.group == ward.group)
        if standby is None or (asked_s and self._now_s < asked_s + RELIEF_AGAIN_S):
            return
        ward.relief_s, ward.relief_until_s = self._now_s, self._now_s + RELIEF_S
        causes = ward.standing.causes
        why = next(iter(causes[cause] for cause in (s.Cause.WRONG, *FAILING) if cause in causes))
        self._tell(ward, What.RELIEVED, f"it is to hand over to {standby.name}: {why}")
        self._deeds.append(Relieve(ward.path, fails, why))

    # -- devices

    def _blame(self, device: str, fault: s.DeviceFaulted) -> None:
        """Remember the gravest, for whoever comes to the device."""
        known = self._faults.get(device)
        graver = known is None or known.fault.severity is not Severity.FATAL
        if graver and fault.fault.severity is not Severity.IGNORABLE:
            self._faults[device] = fault

    def _tell_device(self, device: str, event: s.DeviceFaulted | s.DeviceCleared) -> None:
        for ward in self._wards.values():
            if device in ward.devices:
                self._tell_standing(ward, event)

    # -- weights that answer, and those that answer wrongly

    def _vouch(self, ward: Ward, passed: s.CanaryPassed) -> None:
        """Who sleeps cannot be asked: the first check of its weights is that of another that reads them, so that it can
        take over with its streams at once."""
        for other in self._wards.values():
            asleep = other.facts is not None and not other.awake and other.loaded == ward.loaded
            if asleep and s.Cause.UNCHECKED in other.standing.causes:
                self._tell_standing(other, s.CanaryPassed(other.standing.load, passed.asked_s, passed.right))

    def _convict(self, event: x.Convict) -> None:
        self._deeds.append(Told("", What.CONVICTED, f"{event.weights}: {event.reason}"))
        for ward in self._wards.values():
            if ward.loaded == event.weights:
                if ward.reload_in_dispute:
                    ward.reload_next_s = self._now_s  # that answer decided nothing
                failed = s.CanaryFailed(ward.standing.load, event.asked_s, s.Failing.WRONG, event.reason)
                self._tell_standing(ward, failed)
        self._reload(event.weights)

    def _hear_verified(self, ward: Ward, load: int) -> None:
        """Its weights are as they were written: if it was this process that answered wrongly with them, the verdict is
        its own; if another was too, the device is in doubt, and right answers are waited for."""
        if ward.facts is None or not ward.standing.quarantined or (ward.facts.load or load) != load or ward.verified:
            return
        ward.verified = True
        self._dirty[ward.path] = None
        if convicts_of(ward, self._wards.values()):
            self._tell(ward, What.NOTE, "its weights are right, and another process was wrong with them too")
            return
        self._acquit(ward)
        self._review(ward)

    def _clear(self, ward: Ward, passed: s.CanaryPassed) -> None:
        """Count right answers of a worker that is quarantined although its weights are right."""
        if ward.standing.quarantined and ward.verified:
            ward.rights = ward.rights + 1 if passed.right else 0
            if ward.rights >= RIGHTS:
                ward.accused = False
                self._acquit(ward)

    def _acquit(self, ward: Ward) -> None:
        """Its weights are right: no worker is quarantined for them but a process that was wrong itself."""
        assert ward.facts
        self._deeds.append(Told("", What.ACQUITTED, f"{ward.loaded}: these weights are as they were written"))
        self._tell_expectations(ward.facts.key, x.Acquitted(ward.loaded))
        for other in self._wards.values():
            if other.loaded == ward.loaded and other.standing.quarantined and not other.misled:
                other.verified, other.rights = False, 0
                self._tell_standing(other, s.Acquitted())

    def _dispute(self, key: x.Key) -> None:
        """Tell those who are in dispute, or not any more. Their weights are verified, one set after the other."""
        disputed = sorted(self._expectations[key].disputed)
        for ward in [w for w in self._wards.values() if w.facts and w.facts.key == key]:
            if (ward.loaded in disputed) is (s.Cause.DISPUTED in ward.standing.causes):
                continue
            if ward.loaded in disputed:
                ward.reload_next_s = max(ward.reload_next_s, self._now_s + disputed.index(ward.loaded) * RELOAD_S)
            self._tell_standing(ward, s.Disputed(DISPUTED if ward.loaded in disputed else ""))

    def _reload(self, loaded: str) -> None:
        """Have weights in doubt verified, and loaded anew where they are damaged, by one that has them and is awake."""
        holders = [w for w in self._wards.values() if w.awake and w.loaded == loaded and w.in_doubt]
        next_s, reloads = max(((w.reload_next_s, w.reloads) for w in holders), default=(0.0, 0))
        again = not reloads or self._now_s >= next_s
        if again:
            next_s, reloads = next_reload(next_s, reloads, self._now_s, self._jitter())
        for ward in holders:
            ward.reload_next_s, ward.reloads = next_s, reloads
            ward.reload_in_dispute = not ward.standing.quarantined
            self._dirty[ward.path] = None
        if not holders or not again:
            return
        first = holders[0]
        others = [w for w in self._wards.values() if w.awake and w.model == first.model and w.loaded != loaded]
        in_place = not any(w.standing.weight for w in others)
        assert first.facts
        often = f" ({reloads} times by now, next in {next_s - self._now_s:.0f} s)" if reloads > 1 else ""
        what = "verified, and loaded again where they are damaged" + ", in place" * in_place + often
        self._tell(first, What.RELOADED, f"its weights are to be {what}")
        why = first.standing.causes.get(s.Cause.WRONG, first.standing.reason)
        self._deeds.append(Reload(first.path, first.facts.load, in_place, why))

    # -- the machines, coupled

    def _tell_canary(self, ward: Ward, event: c.Event) -> None:
        self._dirty[ward.path] = None
        effects = ward.canary.step(event, self._now_s)
        if ward.canary.state is not c.State.ASKING:
            ward.asked = None
        for effect in effects:
            match effect:
                case c.Send():
                    self._ask(ward, effect)
                case c.Accuse():
                    self._tell(ward, What.ACCUSED, effect.reason)
                    ward.errors = history.with_error(ward.errors, history.ACCUSED, effect.reason, self._now_s)
                    assert ward.facts
                    ward.accused, ward.rights = True, 0
                    accused = x.Accused(ward.loaded, effect.question, effect.asked_s, effect.reason)
                    self._tell_expectations(ward.facts.key, accused)
                case c.AskPeers():
                    assert ward.facts
                    for other in self._set_of(ward.facts.key):
                        if other is not ward:
                            self._tell_canary(other, c.Asked(f"{ward.name} is late", peer=True))
                case c.Note():
                    self._tell(ward, What.NOTE, effect.reason)
                case b.CanaryAnswered():
                    self._tell_breaker(ward, effect)
                case s.CanaryPassed():
                    self._tell(ward, What.PASSED, "")
                    self._tell_standing(ward, effect)
                    self._clear(ward, effect)
                    self._vouch(ward, effect)
                case s.CanaryFailed():
                    self._tell(ward, What.FAILED, f"{effect.failing}: {effect.reason}")
                    self._tell_standing(ward, effect)

    def _ask(self, ward: Ward, effect: c.Send) -> None:
        assert ward.facts
        expectations = self._expectations[ward.facts.key]
        question = expectations.question_at(effect.turn) if effect.question is None else effect.question
        ward.asked, asked = (effect.number, question), expectations.questions[question]
        self._deeds.append(Ask(ward.path, effect.number, asked.prompt, asked.tokens, effect.within_s))

    def _tell_expectations(self, key: x.Key, event: x.Event) -> None:
        if key not in self._expectations:
            return
        self._touched[key] = None
        for effect in self._expectations[key].step(event, self._now_s):
            match effect:
                case x.AskSet():
                    holders = [w for w in self._wards.values() if w.awake and w.loaded == effect.weights]
                    for ward in holders[:1]:
                        self._tell_canary(ward, c.Asked(effect.reason, question=effect.question))
                case x.Convict():
                    self._convict(effect)
                case x.Note():
                    self._deeds.append(Told("", What.WITHDRAWN if effect.grave else What.NOTE, effect.reason))
        if not isinstance(event, x.Sets):  # at a beginning they are found one by one
            self._dispute(key)

    def _tell_breaker(self, ward: Ward, event: b.Event) -> None:
        self._dirty[ward.path] = None
        for effect in ward.breaker.step(event, self._now_s):
            match effect:
                case b.AskCanary():
                    self._tell_canary(ward, c.Asked("its breaker is half open", number=effect.number))
                case b.Opened() | b.Closed():
                    self._tell(ward, What.BREAKER, f"{type(effect).__name__.lower()}: {effect.reason}")
                    self._tell_standing(ward, effect)

    def _tell_standing(self, ward: Ward, event: s.Event) -> None:
        self._dirty[ward.path] = None
        before, verdict = ward.standing, ward.verdict
        ward.standing, effects = s.step(before, event, self._now_s)
        ward.errors = history.after_step(ward.errors, before, ward.standing, event, self._now_s)
        if ward.verdict == verdict:
            self._follow(ward, effects)
            return
        mates = mates_of(ward, self._wards.values())
        self._relieve(ward, mates)
        kept = kept_in(mates, falling=ward if before.weight else None)
        ward.standing, effects = s.step(before, event, self._now_s, last_resort=ward.path in kept)
        self._follow(ward, effects)
        self._keep(mates, kept)

    def _follow(self, ward: Ward, effects: tuple[s.Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case s.Weigh():
                    self._tell(ward, What.STATUS, f"{effect.status.name}, weight {effect.weight:g}: {effect.reason}")
                case s.Quarantine():
                    self._tell(ward, What.QUARANTINED, effect.reason)
                    self._deeds.append(Flag(ward.path, effect.right_s, effect.reason))
                case s.MoveStreams():
                    self._tell(ward, What.MOVED, effect.reason)
                case s.Drain():
                    self._tell(ward, What.DRAINED, effect.reason)
                case s.AskCanary():
                    self._tell_canary(ward, c.Asked(effect.reason))
                case s.Note():
                    self._tell(ward, What.NOTE, effect.reason)

    def _tell(self, ward: Ward, what: What, text: str) -> None:
        self._deeds.append(Told(ward.path, what, text))
