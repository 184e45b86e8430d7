"""The standing's promises, for any order of events; the defects it must not have (facts 14); and what each fault that
must be told apart comes to."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.ports import DeadlineReached
from holdfast.health import standing as s
from holdfast.health.breaker import BreakerClosed, BreakerOpened
from holdfast.health.device_faults import fault_of
from holdfast.health.liveness import Liveness, LivenessChanged
from holdfast.health.outliers import PaceClass, Paced
from holdfast.health.standing import (
    OWED_MAX,
    PROVING_S,
    TABLE,
    URGENCY,
    WEIGHTS,
    CanaryFailing,
    HealthCause,
    HealthNote,
    HealthStatus,
    MoveEjectedStreams,
    Quarantine,
    SetWeight,
    StandingEffect,
    StandingEvent,
    WorkerStanding,
)

WEDGED = LivenessChanged(Liveness.ALIVE, Liveness.WEDGED, "step 7 does not move")
ALIVE = LivenessChanged(Liveness.PROBATION, Liveness.ALIVE, "it beats again")


class Worker:
    """One worker's standing and all that came of it, on time it makes up itself. It begins checked and HEALTHY."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.standing = WorkerStanding()
        self.effects: list[StandingEffect] = []
        self.feed(s.WorkerPresent(1, serving=True))
        self.passes()
        self.effects.clear()

    def feed(self, *events: StandingEvent) -> list[StandingEffect]:
        """What these events gave, in order."""
        given: list[StandingEffect] = []
        for event in events:
            self.standing, effects = s.step(self.standing, event, self.now)
            given += effects
        self.effects += given
        return given

    def passes(self, after_s: float = 1.0) -> list[StandingEffect]:
        self.now += after_s
        return self.feed(s.CanaryPassed(self.standing.load, self.now))

    def fails(self, failing: CanaryFailing = CanaryFailing.NO_ANSWER, *, moving: bool = False) -> list[StandingEffect]:
        self.now += 1.0
        return self.feed(s.CanaryFailed(self.standing.load, self.now, failing, "told", moving))

    def count(self, kind: type[StandingEffect]) -> int:
        return sum(isinstance(effect, kind) for effect in self.effects)

    @property
    def status(self) -> HealthStatus:
        return HealthStatus(self.standing.status)


# -- late, twice, and across restarts


def test_a_canary_of_an_earlier_load_says_nothing() -> None:
    """Neither a wrong answer of the old weights, nor a right one, is held against or for the new."""
    worker = Worker()
    worker.feed(s.WorkerPresent(2, serving=False))
    before = worker.standing
    worker.now += 1.0
    worker.feed(
        s.CanaryFailed(1, worker.now, CanaryFailing.WRONG, "late"),
        s.CanaryPassed(1, worker.now),
        s.WorkerGone(1, "old"),
    )
    worker.feed(s.WorkerPresent(1))
    assert worker.standing == before


def flapping() -> Worker:
    """A worker that has fallen twice within seconds, and that is alive again: it owes two canaries."""
    worker = Worker()
    worker.feed(WEDGED, ALIVE, WEDGED)
    worker.now += 1.0
    worker.feed(ALIVE)
    assert (worker.standing.owed, worker.status) == (2, HealthStatus.UNHEALTHY)
    return worker


def test_a_pass_from_before_the_fall_does_not_pay_for_it() -> None:
    """A canary that was sent while it was still sound, and answers late, proves nothing about what came after."""
    worker = flapping()
    worker.feed(s.CanaryPassed(1, worker.standing.fell_s))
    assert worker.standing.owed == 2


def test_a_pass_counts_once() -> None:
    """Told twice, it pays for one of those that are owed."""
    worker = flapping()
    passed = s.CanaryPassed(1, worker.now)
    worker.feed(passed, passed)
    assert (worker.standing.owed, worker.status) == (1, HealthStatus.SUSPICIOUS)


def test_the_last_pass_comes_after_its_customers_had_their_say() -> None:
    """A canary that passes right after the return does not end it; the one that is asked for later does."""
    worker = Worker()
    worker.feed(WEDGED)
    worker.now += 1.0
    worker.feed(ALIVE)
    worker.passes(after_s=PROVING_S - 0.1)
    assert worker.status is HealthStatus.SUSPICIOUS
    due_s = s.next_deadline_s(worker.standing)
    assert due_s is not None
    worker.now = due_s
    assert [type(effect) for effect in worker.feed(DeadlineReached(), DeadlineReached())] == [s.CheckWorkerNow]
    worker.passes(after_s=0.1)
    assert worker.status is HealthStatus.HEALTHY


def test_who_is_kept_away_for_flapping_has_no_streams_to_move() -> None:
    """What is found of it while it owes canaries without traffic is no further fall."""
    worker = flapping()
    worker.feed(BreakerOpened("3 in a row", 60.0), BreakerClosed("it passed"), WEDGED)
    assert (worker.standing.fall, worker.count(MoveEjectedStreams)) == (2, 2)


def test_an_older_failure_does_not_undo_a_newer_pass() -> None:
    """Canaries are heard in the order they were sent; a wrong answer counts however late it comes."""
    worker = Worker()
    sent_s = worker.now + 0.5
    worker.passes()
    before = worker.standing
    worker.feed(s.CanaryFailed(1, sent_s, CanaryFailing.NO_ANSWER, "late"))
    assert worker.standing == before
    worker.feed(s.CanaryFailed(1, sent_s, CanaryFailing.WRONG, "late"))
    assert worker.standing.quarantined


def test_a_device_fault_from_before_its_reset_is_old_news() -> None:
    """A kernel's log that is read again after the reset accuses nobody."""
    worker = Worker()
    fault = s.DeviceReport(fault_of("0000:01:00", 64), worker.now)
    worker.feed(fault)
    assert worker.status is HealthStatus.DRAINING
    worker.feed(s.DeviceReport(None, worker.now + 1.0), fault)
    assert worker.status is HealthStatus.SUSPICIOUS


def test_what_a_newer_version_holds_against_it_is_not_forgotten() -> None:
    """A cause whose name is not known here is no traffic before a canary passed."""
    written = replace(Worker().standing, causes={"something-new": "why"})
    read = s.restore(written, 2000.0)
    assert (read.status, read.weight) == (HealthStatus.UNHEALTHY, 0.0)


def test_a_record_of_a_clock_that_was_ahead_keeps_nobody_away_for_ever() -> None:
    """Canaries that are sent from now on count, whatever time was written down."""
    worker = Worker()
    worker.now += 1e6
    worker.feed(WEDGED, ALIVE)
    worker.now -= 1e6
    worker.standing = s.restore(worker.standing, worker.now)
    worker.passes(after_s=PROVING_S)
    assert worker.status is HealthStatus.HEALTHY


def test_a_first_check_that_had_no_answer_costs_a_new_worker_nothing_once_it_passed() -> None:
    """It lost no traffic for that: nothing was found, and one canary may be lost to a hiccup."""
    worker = Worker()
    worker.feed(s.WorkerPresent(2), s.CanaryFailed(2, worker.now, CanaryFailing.NO_ANSWER, "late"))
    assert worker.standing.weight == 0.0
    worker.now += 1.0
    worker.feed(s.CanaryPassed(2, worker.now))
    assert (worker.status, worker.standing.weight) == (HealthStatus.HEALTHY, 1.0)


# -- any order of events

loads = st.integers(1, 3)
ago_s = st.sampled_from([0.0, 0.5, 3.0, 40.0])
events = st.one_of(
    st.builds(lambda load, serving: s.WorkerPresent(load, serving), loads, st.booleans()),
    st.builds(lambda load: s.WorkerGone(load, "SIGKILL"), loads),
    st.builds(lambda load: s.ReportedFatal(load, "it says so"), loads),
    st.tuples(st.just("passed"), loads, ago_s),
    st.tuples(st.just("passed"), loads, ago_s),
    st.tuples(st.sampled_from(CanaryFailing), loads, ago_s),
    st.tuples(st.sampled_from([13, 48, 79]), ago_s),
    st.tuples(st.just("cleared"), ago_s),
    st.sampled_from([BreakerOpened("3 in a row", 60.0), BreakerClosed("it passed")]),
    st.builds(lambda verdict: LivenessChanged(Liveness.ALIVE, verdict, "seen"), st.sampled_from(Liveness)),
    st.builds(lambda pace: Paced("w", pace, 5.0), st.sampled_from(PaceClass)),
    st.just(DeadlineReached()),
)


def at(event: object, now_s: float) -> StandingEvent:
    """An event of the strategy, with its times."""
    match event:
        case ("passed", int(load), float(ago)):
            return s.CanaryPassed(load, now_s - ago)
        case (CanaryFailing() as failing, int(load), float(ago)):
            return s.CanaryFailed(load, now_s - ago, failing, "told", moving=ago == 3.0)
        case (int(number), float(ago)):
            return s.DeviceReport(fault_of("0000:01:00", number), now_s - ago)
        case ("cleared", float(ago)):
            return s.DeviceReport(None, now_s - ago)
    return event  # type: ignore[return-value]


class Model:
    """What a simple mind remembers of the same events: who said something grave that nobody took back."""

    def __init__(self) -> None:
        self.load = 0
        self.wrong = self.open = self.lost = self.gone = self.engine = False

    def feed(self, event: StandingEvent) -> None:
        match event:
            case s.WorkerPresent() if event.load > self.load:
                self.load, self.wrong, self.gone, self.engine = event.load, False, False, False
            case s.WorkerPresent() if event.load == self.load:
                self.gone = False
            case s.WorkerGone() | s.ReportedFatal() | s.CanaryFailed() if event.load == self.load:
                self.gone |= isinstance(event, s.WorkerGone)
                self.engine |= isinstance(event, s.ReportedFatal)
                self.wrong |= isinstance(event, s.CanaryFailed) and event.failing is CanaryFailing.WRONG
            case BreakerOpened() | BreakerClosed():
                self.open = isinstance(event, BreakerOpened)
            case LivenessChanged():
                self.lost |= event.after in s.LOST
                self.lost &= event.after not in (Liveness.ALIVE, Liveness.PROBATION)

    def check(self, standing: WorkerStanding) -> None:
        assert standing.quarantined == self.wrong
        assert (standing.status == HealthStatus.DEAD) == self.gone
        if self.wrong or self.open or self.lost or self.gone or self.engine:
            assert standing.status in (HealthStatus.UNHEALTHY, HealthStatus.DEAD)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.3, 6.0, 700.0]), events, st.booleans()), max_size=50))
def test_no_order_of_events_breaks_its_promises(story: list[tuple[float, object, bool]]) -> None:
    """Weight follows from what is held; streams move once per fall; hearing twice or restarting changes nothing; and
    when every witness says that all is well, canaries lead back to HEALTHY."""
    standing, model, now_s = WorkerStanding(), Model(), 1000.0
    for gap_s, told, restart in story:
        now_s += gap_s
        event = at(told, now_s)
        before, (standing, effects) = standing, s.step(standing, event, now_s)
        model.feed(event)
        model.check(standing)
        check_step(before, standing, effects)
        again, repeated = s.step(standing, event, now_s)
        assert again == standing
        assert not [effect for effect in repeated if not isinstance(effect, HealthNote | s.CheckWorkerNow)]
        if restart:
            read = msgspec.json.decode(msgspec.json.encode(standing), type=WorkerStanding)
            assert s.restore(read, now_s) == replace(standing, asked=False)
            standing = s.restore(read, now_s)
    heal(standing, now_s)


def check_step(before: WorkerStanding, after: WorkerStanding, effects: tuple[StandingEffect, ...]) -> None:
    """What may come of one step."""
    held = [TABLE[HealthCause(cause)][0] for cause in after.causes]
    worst = max(held, key=URGENCY.index, default=HealthStatus.HEALTHY)
    assert URGENCY.index(HealthStatus(after.status)) >= URGENCY.index(worst)
    assert after.weight == WEIGHTS[HealthStatus(after.status)]
    moves = [effect for effect in effects if isinstance(effect, MoveEjectedStreams)]
    assert after.fall - before.fall == len(moves) <= 1
    if moves:
        assert after.status in (HealthStatus.UNHEALTHY, HealthStatus.DEAD)
        found = [TABLE[HealthCause(cause)][0] for cause in before.causes if cause != HealthCause.UNCHECKED]
        assert not {HealthStatus.UNHEALTHY, HealthStatus.DEAD} & set(found)
    assert (after.status != before.status) <= any(isinstance(effect, SetWeight) for effect in effects)
    assert sum(isinstance(effect, Quarantine) for effect in effects) == (after.quarantined > before.quarantined)
    assert 0 <= after.owed <= OWED_MAX
    back = before.weight == 0.0 and after.weight == 1.0
    kept = {HealthCause(cause) for cause in before.causes if WEIGHTS[TABLE[HealthCause(cause)][0]] == 0.0}
    assert not back or kept == {HealthCause.UNCHECKED} or after.load > before.load


def heal(standing: WorkerStanding, now_s: float) -> None:
    """Every witness says that all is well, and then canaries pass."""
    load = standing.load + 1 if standing.quarantined or HealthCause.ENGINE in standing.causes else max(standing.load, 1)
    words = (s.WorkerPresent(load), ALIVE, BreakerClosed("it passed"), Paced("w", PaceClass.NORMAL, 1.0))
    for event in (*words, s.DeviceReport(None, now_s)):
        standing, _ = s.step(standing, event, now_s)
    for _ in range(OWED_MAX + 3):
        now_s += 30.0
        standing, _ = s.step(standing, s.CanaryPassed(load, now_s), now_s)
    assert (standing.status, standing.weight, dict(standing.causes)) == (HealthStatus.HEALTHY, 1.0, {})


def test_every_time_in_a_record_is_known_to_restore() -> None:
    """A field of time that `restore` does not look at could lie in the future for ever."""
    written = replace(
        WorkerStanding(), **{field.name: 9e9 for field in fields(WorkerStanding) if field.name.endswith("_s")}
    )
    read = s.restore(written, 100.0)
    assert all(getattr(read, field.name) <= 105.0 for field in fields(WorkerStanding) if field.name.endswith("_s"))


def test_the_page_shows_the_table() -> None:
    """docs/health.md lists every cause with what it makes of a worker and what lifts it, as the table has it."""
    page = (Path(__file__).parents[2] / "docs" / "health.md").read_text()
    rows = [f"| {cause} | {status.name} | {'; '.join(sorted(lifts))} |" for cause, (status, lifts) in TABLE.items()]
    assert "\n".join(rows) in page
