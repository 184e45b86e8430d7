"""The standing's promises, for any order of events; the defects it must not have (facts 14); and what each fault that
must be told apart comes to."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.health import standing as s
from holdfast.health.breaker import Closed, Opened
from holdfast.health.device_faults import fault_of
from holdfast.health.liveness import Judged, Verdict
from holdfast.health.outliers import Outliers, Pace, Paced
from holdfast.health.standing import (
    OWED_MAX,
    PROVING_S,
    TABLE,
    URGENCY,
    WEIGHTS,
    Cause,
    Drain,
    Effect,
    Event,
    Failing,
    Lift,
    MoveStreams,
    Note,
    Quarantine,
    Standing,
    Status,
    Weigh,
)

WEDGED = Judged(Verdict.ALIVE, Verdict.WEDGED, "step 7 does not move")
ALIVE = Judged(Verdict.PROBATION, Verdict.ALIVE, "it beats again")


class Worker:
    """One worker's standing and all that came of it, on time it makes up itself. It begins checked and HEALTHY."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.standing = Standing()
        self.effects: list[Effect] = []
        self.feed(s.Present(1, serving=True))
        self.passes()
        self.effects.clear()

    def feed(self, *events: Event) -> list[Effect]:
        """What these events gave, in order."""
        given: list[Effect] = []
        for event in events:
            self.standing, effects = s.step(self.standing, event, self.now)
            given += effects
        self.effects += given
        return given

    def passes(self, after_s: float = 1.0) -> list[Effect]:
        self.now += after_s
        return self.feed(s.CanaryPassed(self.standing.load, self.now))

    def fails(self, failing: Failing = Failing.NO_ANSWER, *, moving: bool = False) -> list[Effect]:
        self.now += 1.0
        return self.feed(s.CanaryFailed(self.standing.load, self.now, failing, "told", moving))

    def count(self, kind: type[Effect]) -> int:
        return sum(isinstance(effect, kind) for effect in self.effects)

    @property
    def status(self) -> Status:
        return Status(self.standing.status)


# -- the defects of facts 14, each by name


def test_unhealthy_has_a_way_back() -> None:
    """Every cause in the table can be lifted; and after three failed canaries, passed ones lead back to HEALTHY."""
    assert all(lifts for _, lifts in TABLE.values())
    worker = Worker()
    for _ in range(s.CANARY_FAILURES_MAX):
        worker.fails()
    assert (worker.status, worker.standing.weight) == (Status.UNHEALTHY, 0.0)
    worker.passes()
    assert (worker.status, worker.standing.weight) == (Status.SUSPICIOUS, 0.5)
    worker.passes(after_s=PROVING_S)
    assert (worker.status, worker.standing.weight) == (Status.HEALTHY, 1.0)


def test_a_further_failure_starts_no_second_migration() -> None:
    """Whatever else is found of a worker that has fallen, its streams were moved once."""
    worker = Worker()
    worker.feed(WEDGED)
    assert worker.count(MoveStreams) == 1
    for _ in range(5):
        worker.fails()
    worker.fails(Failing.WRONG)
    worker.feed(Opened("3 in a row", 60.0), WEDGED, s.Gone(1, "SIGKILL"))
    worker.feed(s.DeviceFaulted(fault_of("0000:01:00", 79), worker.now))
    assert worker.count(MoveStreams) == 1
    assert worker.status is Status.DEAD


def test_one_failed_canary_restarts_nothing_and_takes_no_stream() -> None:
    """Half the traffic and another canary, that is all; and there is no effect that restarts or kills at all."""
    worker = Worker()
    given = worker.fails()
    assert [type(effect) for effect in given] == [Weigh, s.AskCanary]
    assert (worker.status, worker.standing.weight) == (Status.SUSPICIOUS, 0.5)
    words = {word for effect in Effect.__args__ for word in ("Kill", "Restart", "Stop") if word in effect.__name__}
    assert words == set()


# -- what each fault comes to


def test_a_crash_is_a_death() -> None:
    """Its streams are moved once, whoever else misses it, and a fresh load is checked before it gets traffic."""
    worker = Worker()
    given = worker.feed(s.Gone(1, "SIGKILL"), Judged(Verdict.ALIVE, Verdict.STOPPED, "its process is gone"))
    assert Weigh(Status.DEAD, 0.0, "SIGKILL") in given
    assert worker.count(MoveStreams) == 1
    worker.feed(ALIVE, s.Present(2))
    assert worker.standing.weight == 0.0
    assert worker.count(MoveStreams) == 1


@pytest.mark.parametrize("verdict", [Verdict.STOPPED, Verdict.WEDGED, Verdict.GONE])
def test_stopped_or_wedged_is_unhealthy_and_its_streams_are_moved_once(verdict: Verdict) -> None:
    """The judge's word is enough, also when it is said twice."""
    worker = Worker()
    found = Judged(Verdict.SUSPECT, verdict, "as seen")
    given = worker.feed(found, found)
    assert [type(effect) for effect in given] == [Weigh, MoveStreams]
    assert worker.status is Status.UNHEALTHY


def test_slow_is_half_the_traffic_and_nothing_is_moved() -> None:
    """Three times slower, by the set's pace and by every canary of ten minutes."""
    worker = Worker()
    outliers = Outliers()
    for _ in range(600):
        worker.now += 1.0
        worker.feed(*outliers.measure({"a": 1.0, "b": 1.1, "me": 3.0, "d": 0.9}, worker.now))
        worker.feed(s.CanaryFailed(1, worker.now, Failing.SLOW, "3.1 times its usual time"))
    assert (worker.status, worker.standing.weight) == (Status.SUSPICIOUS, 0.5)
    assert worker.count(MoveStreams) == worker.count(Drain) == 0


def test_crawling_is_drained_by_plan_and_never_in_haste() -> None:
    """Twenty times slower than its set for ten seconds: drained; nothing is moved in haste, and it has a way back."""
    worker = Worker()
    outliers = Outliers()
    for second in range(30):
        worker.now += 1.0
        worker.feed(*outliers.measure({"a": 1.0, "b": 1.1, "me": 20.0, "d": 0.9}, worker.now))
        assert (worker.status is Status.DRAINING) == (second >= 10)
    assert (worker.count(Drain), worker.count(MoveStreams)) == (1, 0)
    worker.feed(Paced("me", Pace.NORMAL, 1.0))
    assert worker.status is Status.SUSPICIOUS
    worker.passes(after_s=PROVING_S)
    assert worker.status is Status.HEALTHY


def test_all_slow_is_nothing() -> None:
    """A set that is slow as a whole loses no traffic."""
    outliers = Outliers()
    workers = {name: Worker() for name in "abcd"}
    for second in range(120):
        times = 1.0 if second < 10 else 20.0
        for paced in outliers.measure({name: times * (1 + index / 10) for index, name in enumerate("abcd")}, second):
            workers[paced.name].feed(paced)
    assert {worker.status for worker in workers.values()} == {Status.HEALTHY}


def test_a_wrong_answer_quarantines_and_only_a_fresh_load_lifts_it() -> None:
    """At once, whatever came before or after; what it made since it was last right is named."""
    worker = Worker()
    good_s = worker.now
    given = worker.fails(Failing.WRONG)
    assert [type(effect) for effect in given] == [Weigh, Quarantine, MoveStreams]
    assert given[1] == Quarantine("canary wrong: told", good_s)
    for _ in range(20):
        worker.passes(after_s=100.0)
        worker.feed(ALIVE, Closed("it passed"), s.Present(1), s.DeviceCleared(worker.now), s.Tick())
    assert (worker.standing.quarantined, worker.standing.weight) == (True, 0.0)
    assert TABLE[Cause.WRONG][1] == {Lift.LOADED, Lift.ACQUITTED}
    worker.feed(s.Present(2, serving=True))
    assert (worker.standing.quarantined, worker.standing.weight) == (False, 0.0)
    worker.passes()
    assert worker.status is Status.HEALTHY


def test_late_probes_and_starvation_are_nothing() -> None:
    """Silence that its judge does not confirm, and canaries that are late while clients have tokens."""
    worker = Worker()
    for _ in range(20):
        worker.feed(Judged(Verdict.ALIVE, Verdict.SUSPECT, "silent"), Judged(Verdict.SUSPECT, Verdict.STARVED, "busy"))
        worker.fails(moving=True)
        worker.feed(ALIVE)
    assert worker.status is Status.HEALTHY
    assert {type(effect) for effect in worker.effects} == {Note}


# -- late, twice, and across restarts


def test_a_canary_of_an_earlier_load_says_nothing() -> None:
    """Neither a wrong answer of the old weights, nor a right one, is held against or for the new."""
    worker = Worker()
    worker.feed(s.Present(2, serving=False))
    before = worker.standing
    worker.now += 1.0
    worker.feed(s.CanaryFailed(1, worker.now, Failing.WRONG, "late"), s.CanaryPassed(1, worker.now), s.Gone(1, "old"))
    worker.feed(s.Present(1))
    assert worker.standing == before


def flapping() -> Worker:
    """A worker that has fallen twice within seconds, and whose judge calls it alive: it owes two canaries."""
    worker = Worker()
    worker.feed(WEDGED, ALIVE, WEDGED)
    worker.now += 1.0
    worker.feed(ALIVE)
    assert (worker.standing.owed, worker.status) == (2, Status.UNHEALTHY)
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
    assert (worker.standing.owed, worker.status) == (1, Status.SUSPICIOUS)


def test_the_last_pass_comes_after_its_customers_had_their_say() -> None:
    """A canary that passes right after the return does not end it; the one that is asked for later does."""
    worker = Worker()
    worker.feed(WEDGED)
    worker.now += 1.0
    worker.feed(ALIVE)
    worker.passes(after_s=PROVING_S - 0.1)
    assert worker.status is Status.SUSPICIOUS
    due_s = s.next_deadline_s(worker.standing)
    assert due_s is not None
    worker.now = due_s
    assert [type(effect) for effect in worker.feed(s.Tick(), s.Tick())] == [s.AskCanary]
    worker.passes(after_s=0.1)
    assert worker.status is Status.HEALTHY


def test_who_is_kept_away_for_flapping_has_no_streams_to_move() -> None:
    """What is found of it while it owes canaries without traffic is no further fall."""
    worker = flapping()
    worker.feed(Opened("3 in a row", 60.0), Closed("it passed"), WEDGED)
    assert (worker.standing.fall, worker.count(MoveStreams)) == (2, 2)


def test_an_older_failure_does_not_undo_a_newer_pass() -> None:
    """Canaries are heard in the order they were sent; a wrong answer counts however late it comes."""
    worker = Worker()
    sent_s = worker.now + 0.5
    worker.passes()
    before = worker.standing
    worker.feed(s.CanaryFailed(1, sent_s, Failing.NO_ANSWER, "late"))
    assert worker.standing == before
    worker.feed(s.CanaryFailed(1, sent_s, Failing.WRONG, "late"))
    assert worker.standing.quarantined


def test_a_device_fault_from_before_its_reset_is_old_news() -> None:
    """A kernel's log that is read again after the reset accuses nobody."""
    worker = Worker()
    fault = s.DeviceFaulted(fault_of("0000:01:00", 64), worker.now)
    worker.feed(fault)
    assert worker.status is Status.DRAINING
    worker.feed(s.DeviceCleared(worker.now + 1.0), fault)
    assert worker.status is Status.SUSPICIOUS


def test_what_a_newer_version_holds_against_it_is_not_forgotten() -> None:
    """A cause whose name is not known here is no traffic before a canary passed."""
    written = replace(Worker().standing, causes={"something-new": "why"})
    read = s.restore(written, 2000.0)
    assert (read.status, read.weight) == (Status.UNHEALTHY, 0.0)


def test_a_record_of_a_clock_that_was_ahead_keeps_nobody_away_for_ever() -> None:
    """Canaries that are sent from now on count, whatever time was written down."""
    worker = Worker()
    worker.now += 1e6
    worker.feed(WEDGED, ALIVE)
    worker.now -= 1e6
    worker.standing = s.restore(worker.standing, worker.now)
    worker.passes(after_s=PROVING_S)
    assert worker.status is Status.HEALTHY


def test_a_new_worker_gets_no_traffic_before_its_first_check_and_a_serving_one_keeps_its() -> None:
    """Whoever begins to keep verdicts while workers serve takes nothing away from them unseen."""
    new, effects = s.step(Standing(), s.Present(1), 0.0)
    assert (new.weight, [type(effect) for effect in effects]) == (0.0, [Weigh, s.AskCanary])
    serving, effects = s.step(Standing(), s.Present(1, serving=True), 0.0)
    assert (serving.weight, [type(effect) for effect in effects]) == (1.0, [Weigh, s.AskCanary])


def test_a_first_check_that_had_no_answer_costs_a_new_worker_nothing_once_it_passed() -> None:
    """It lost no traffic for that: nothing was found, and one canary may be lost to a hiccup."""
    worker = Worker()
    worker.feed(s.Present(2), s.CanaryFailed(2, worker.now, Failing.NO_ANSWER, "late"))
    assert worker.standing.weight == 0.0
    worker.now += 1.0
    worker.feed(s.CanaryPassed(2, worker.now))
    assert (worker.status, worker.standing.weight) == (Status.HEALTHY, 1.0)


# -- any order of events

loads = st.integers(1, 3)
ago_s = st.sampled_from([0.0, 0.5, 3.0, 40.0])
events = st.one_of(
    st.builds(lambda load, serving: s.Present(load, serving), loads, st.booleans()),
    st.builds(lambda load: s.Gone(load, "SIGKILL"), loads),
    st.builds(lambda load: s.ReportedFatal(load, "it says so"), loads),
    st.tuples(st.just("passed"), loads, ago_s),
    st.tuples(st.just("passed"), loads, ago_s),
    st.tuples(st.sampled_from(Failing), loads, ago_s),
    st.tuples(st.sampled_from([13, 48, 79]), ago_s),
    st.tuples(st.just("cleared"), ago_s),
    st.sampled_from([Opened("3 in a row", 60.0), Closed("it passed")]),
    st.builds(lambda verdict: Judged(Verdict.ALIVE, verdict, "seen"), st.sampled_from(Verdict)),
    st.builds(lambda pace: Paced("w", pace, 5.0), st.sampled_from(Pace)),
    st.just(s.Tick()),
)


def at(event: object, now_s: float) -> Event:
    """An event of the strategy, with its times."""
    match event:
        case ("passed", int(load), float(ago)):
            return s.CanaryPassed(load, now_s - ago)
        case (Failing() as failing, int(load), float(ago)):
            return s.CanaryFailed(load, now_s - ago, failing, "told", moving=ago == 3.0)
        case (int(number), float(ago)):
            return s.DeviceFaulted(fault_of("0000:01:00", number), now_s - ago)
        case ("cleared", float(ago)):
            return s.DeviceCleared(now_s - ago)
    return event  # type: ignore[return-value]


class Model:
    """What a simple mind remembers of the same events: who said something grave that nobody took back."""

    def __init__(self) -> None:
        self.load = 0
        self.wrong = self.open = self.lost = self.gone = self.engine = False

    def feed(self, event: Event) -> None:
        match event:
            case s.Present() if event.load > self.load:
                self.load, self.wrong, self.gone, self.engine = event.load, False, False, False
            case s.Present() if event.load == self.load:
                self.gone = False
            case s.Gone() | s.ReportedFatal() | s.CanaryFailed() if event.load == self.load:
                self.gone |= isinstance(event, s.Gone)
                self.engine |= isinstance(event, s.ReportedFatal)
                self.wrong |= isinstance(event, s.CanaryFailed) and event.failing is Failing.WRONG
            case Opened() | Closed():
                self.open = isinstance(event, Opened)
            case Judged():
                self.lost |= event.after in s.LOST
                self.lost &= event.after not in (Verdict.ALIVE, Verdict.PROBATION)

    def check(self, standing: Standing) -> None:
        assert standing.quarantined == self.wrong
        assert (standing.status == Status.DEAD) == self.gone
        if self.wrong or self.open or self.lost or self.gone or self.engine:
            assert standing.status in (Status.UNHEALTHY, Status.DEAD)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.3, 6.0, 700.0]), events, st.booleans()), max_size=50))
def test_no_order_of_events_breaks_its_promises(story: list[tuple[float, object, bool]]) -> None:
    """Weight follows from what is held; streams move once per fall; hearing twice or restarting changes nothing; and
    when every witness says that all is well, canaries lead back to HEALTHY."""
    standing, model, now_s = Standing(), Model(), 1000.0
    for gap_s, told, restart in story:
        now_s += gap_s
        event = at(told, now_s)
        before, (standing, effects) = standing, s.step(standing, event, now_s)
        model.feed(event)
        model.check(standing)
        check_step(before, standing, effects)
        again, repeated = s.step(standing, event, now_s)
        assert again == standing
        assert not [effect for effect in repeated if not isinstance(effect, Note | s.AskCanary)]
        if restart:
            read = msgspec.json.decode(msgspec.json.encode(standing), type=Standing)
            assert s.restore(read, now_s) == replace(standing, asked=False)
            standing = s.restore(read, now_s)
    heal(standing, now_s)


def check_step(before: Standing, after: Standing, effects: tuple[Effect, ...]) -> None:
    """What may come of one step."""
    held = [TABLE[Cause(cause)][0] for cause in after.causes]
    worst = max(held, key=URGENCY.index, default=Status.HEALTHY)
    assert URGENCY.index(Status(after.status)) >= URGENCY.index(worst)
    assert after.weight == WEIGHTS[Status(after.status)]
    moves = [effect for effect in effects if isinstance(effect, MoveStreams)]
    assert after.fall - before.fall == len(moves) <= 1
    if moves:
        assert after.status in (Status.UNHEALTHY, Status.DEAD)
        found = [TABLE[Cause(cause)][0] for cause in before.causes if cause != Cause.UNCHECKED]
        assert not {Status.UNHEALTHY, Status.DEAD} & set(found)
    assert (after.status != before.status) <= any(isinstance(effect, Weigh) for effect in effects)
    assert sum(isinstance(effect, Quarantine) for effect in effects) == (after.quarantined > before.quarantined)
    assert 0 <= after.owed <= OWED_MAX
    back = before.weight == 0.0 and after.weight == 1.0
    kept = {Cause(cause) for cause in before.causes if WEIGHTS[TABLE[Cause(cause)][0]] == 0.0}
    assert not back or kept == {Cause.UNCHECKED} or after.load > before.load


def heal(standing: Standing, now_s: float) -> None:
    """Every witness says that all is well, and then canaries pass."""
    load = standing.load + 1 if standing.quarantined or Cause.ENGINE in standing.causes else max(standing.load, 1)
    words = (s.Present(load), ALIVE, Closed("it passed"), Paced("w", Pace.NORMAL, 1.0))
    for event in (*words, s.DeviceCleared(now_s)):
        standing, _ = s.step(standing, event, now_s)
    for _ in range(OWED_MAX + 3):
        now_s += 30.0
        standing, _ = s.step(standing, s.CanaryPassed(load, now_s), now_s)
    assert (standing.status, standing.weight, dict(standing.causes)) == (Status.HEALTHY, 1.0, {})


def test_every_time_in_a_record_is_known_to_restore() -> None:
    """A field of time that `restore` does not look at could lie in the future for ever."""
    written = replace(Standing(), **{field.name: 9e9 for field in fields(Standing) if field.name.endswith("_s")})
    read = s.restore(written, 100.0)
    assert all(getattr(read, field.name) <= 105.0 for field in fields(Standing) if field.name.endswith("_s"))


def test_the_page_shows_the_table() -> None:
    """docs/health.md lists every cause with what it makes of a worker and what lifts it, as the table has it."""
    page = (Path(__file__).parents[2] / "docs" / "health.md").read_text()
    rows = [f"| {cause} | {status.name} | {'; '.join(sorted(lifts))} |" for cause, (status, lifts) in TABLE.items()]
    assert "\n".join(rows) in page
