"""One worker's canaries: the schedule and the check of answers, for any order of events, and the defects they must not
have (facts 14)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.ports import DeadlineReached
from holdfast.health.breaker import CANARY_S, CanaryAnswered
from holdfast.health.canary import (
    CLEAN,
    JITTER_MAX,
    LOST_S,
    PAUSES_S,
    SAMPLES_MIN,
    TOOK_OVER_S,
    TRIES,
    TRY_S,
    WRONGS_MAX,
    Accuse,
    AskPeers,
    CanaryEffect,
    CanaryEvent,
    CanaryGone,
    CanaryLimits,
    CanaryPresent,
    CanaryRecord,
    CanaryState,
    CheckRequested,
    HealthNote,
    SendTry,
    TryAnswered,
    TryRefused,
    TryUnanswered,
    WorkerCanary,
    pace_of,
)
from holdfast.health.standing import CanaryFailed, CanaryFailing, CanaryPassed
from tests.rigs.worlds.health import HealthRig


class Asker:
    """Steps one worker's machine, and remembers the last try."""

    def __init__(self, draw: float = 0.0) -> None:
        self.canary = WorkerCanary("w", lambda: draw)
        self.now = 1000.0
        self.number = 0

    def tell(self, event: CanaryEvent) -> tuple[CanaryEffect, ...]:
        effects = self.canary.step(event, self.now)
        sent = [effect for effect in effects if isinstance(effect, SendTry)]
        assert len(sent) <= 1
        if sent:
            self.number = sent[0].number
        return effects

    def until_due(self) -> tuple[CanaryEffect, ...]:
        """Wait for what is next."""
        assert self.canary.next_deadline_s is not None
        self.now = max(self.now, self.canary.next_deadline_s)
        return self.tell(DeadlineReached())

    def answer(
        self, took_s: float = 0.01, *, occupancy: float = 0.0, wrong: str = "", peers: float | None = None
    ) -> tuple[CanaryEffect, ...]:
        return self.tell(TryAnswered(self.number, 0, took_s, 8, occupancy, wrong, peers))

    def tries(self, *took_s: float, occupancy: float = 0.0, peers: float | None = None) -> tuple[CanaryEffect, ...]:
        """One check whose tries take so long; what came of the last."""
        effects: tuple[CanaryEffect, ...] = ()
        for one in took_s:
            self.until_due()
            effects = self.answer(one, occupancy=occupancy, peers=peers)
        return effects

    def learn(self, took_s: float = 0.01, *, occupancy: float = 0.0, checks: int = 10) -> None:
        for _ in range(checks):
            self.tries(took_s, occupancy=occupancy)


def asker(draw: float = 0.0) -> Asker:
    """Of a worker that is there and passed its first check."""
    made = Asker(draw)
    assert made.tell(CanaryPresent(1)) == (SendTry(1, 1),)
    assert made.answer() == (CanaryPassed(1, 1000.0),)
    return made


def test_an_asker_that_was_stopped_does_not_make_a_canary_dear() -> None:
    """What was read an hour late took as long as a try may: the next check comes in hours, not in months, and what is
    written down can be read."""
    made = Asker()
    made.tell(CanaryPresent(1))
    made.answer(3600.0)
    record = msgspec.json.decode(msgspec.json.encode(made.canary.record()), type=CanaryRecord)
    assert record.cost_s == TRY_S
    assert record.baselines[0].mean_s == TRY_S / 8


def kinds(effects: tuple[CanaryEffect, ...]) -> list[type]:
    return [type(effect) for effect in effects]


# -- the defects of facts 14, each by name


def test_canaries_run_side_by_side() -> None:
    """All workers are asked at the same moment, and those that never answer delay nobody's next."""
    made = HealthRig({name: name for name in "abcd"})
    made.workers["a"].how = "silent"
    made.workers["b"].how = "lost"
    made.begin(serving=True)
    assert {(now, name) for now, name, _ in made.asks} == {(100.0, name) for name in "abcd"}
    made.wait(200.0)
    asked = {name: [now for now, who, _ in made.asks if who == name] for name in "cd"}
    assert all(later - earlier < 34.0 for times in asked.values() for earlier, later in pairwise(times))
    assert all(len(times) >= 6 for times in asked.values())


def test_busy_workers_are_asked_too() -> None:
    """A worker with work waiting is asked as often as an idle one, and what it answers wrongly is found."""
    made = HealthRig({name: name for name in "abc"})
    made.workers["a"].occupancy = 3.0
    made.begin(serving=True)
    made.wait(300.0)
    counts = {name: sum(who == name for _, who, _ in made.asks) for name in "abc"}
    assert counts["a"] == counts["b"] == counts["c"]
    made.workers["a"].shift = 7
    made.wait(40.0)
    assert made.quarantined() == {"a"}


# -- the schedule


def test_a_fresh_load_is_asked_at_once_whatever_was_out() -> None:
    """Once for each load."""
    one = asker()
    one.until_due()
    assert kinds(one.tell(CanaryPresent(2))) == [SendTry]
    assert one.tell(CanaryPresent(2)) == ()


def test_checks_take_their_share_of_a_workers_time_and_no_more() -> None:
    """At least the interval apart, and so far that they take their share at most; by chance longer, never shorter."""
    quick, long, late = asker(), asker(), asker(draw=0.999)
    long.tries(5.0)
    quick.tries(0.001)
    assert quick.canary.next_deadline_s == pytest.approx(quick.now + 30.0)
    assert long.canary.next_deadline_s == pytest.approx(long.now + (0.01 + 5.0) / 2 / CanaryLimits().share)
    late.tries(0.001)
    assert late.canary.next_deadline_s is not None
    assert 30.0 < late.canary.next_deadline_s - late.now <= 30.0 * (1 + JITTER_MAX)


@pytest.mark.parametrize("took_s", [0.03, 0.23, 1.0, 2.0])
def test_by_default_a_worker_that_turns_wrong_is_quarantined_within_a_minute(took_s: float) -> None:
    """However unlucky the moment (just after a check) and the draw, on an engine that takes its time for an answer."""
    made = HealthRig({"a": "a", "b": "b"}, draw=0.999)
    made.begin()
    for worker in made.workers.values():
        worker.took_s = took_s
    made.wait(300.0)
    asked = len(made.asks_of("a"))
    for _ in range(1000):  # until it was asked once more
        made.wait(0.1)
        if len(made.asks_of("a")) > asked:
            break
    made.wait(took_s)
    made.workers["a"].shift = 1
    made.wait(60.0)
    assert made.quarantined() == {"a"}


def test_a_busy_batchs_time_is_not_a_canarys_cost() -> None:
    """Once it is known what a canary takes alone, a long answer beside others does not make checks rarer."""
    made = asker()
    made.learn(0.01)
    made.tries(2.0, occupancy=0.9)
    assert made.canary.next_deadline_s == pytest.approx(made.now + 30.0)


def test_a_breakers_canary_is_answered_once_and_by_a_try_of_its_own() -> None:
    """It does not wait for the interval, and what was out before it came says nothing to it."""
    made = asker()
    made.until_due()
    assert made.tell(CheckRequested("half open", number=7)) == ()
    assert kinds(made.answer()) == [CanaryPassed, SendTry]
    assert made.answer() == (CanaryPassed(1, made.now), CanaryAnswered(7, True))
    assert kinds(made.tell(CheckRequested("half open", number=8))) == [SendTry]
    for _ in range(TRIES - 1):
        made.tell(TryUnanswered(made.number, "nothing"))
        made.until_due()
    failed = made.tell(TryUnanswered(made.number, "nothing"))
    assert failed == (CanaryFailed(1, made.now, CanaryFailing.NO_ANSWER, "nothing"), CanaryAnswered(8, False))


def test_a_breakers_canary_goes_before_what_is_to_be_learnt() -> None:
    """It has a time of its own; questions have not."""
    made = asker()
    made.until_due()
    made.tell(CheckRequested("to learn", question=0))
    made.tell(CheckRequested("half open", number=1))
    made.answer()
    assert CanaryAnswered(1, True) in made.answer()


def test_all_tries_of_a_check_are_over_before_a_breaker_gives_up() -> None:
    """Or a breaker would open again because its canary is retried."""
    assert TRIES * TRY_S + sum(PAUSES_S) < CANARY_S
    assert len(PAUSES_S) == TRIES - 1


def test_a_late_or_lost_answer_never_blocks_the_next() -> None:
    """What comes late, twice or from before changes nothing; what never comes ends its check without a verdict."""
    made = asker()
    made.until_due()
    lost = made.number
    assert made.canary.next_deadline_s == made.now + TRY_S + LOST_S
    assert kinds(made.until_due()) == [HealthNote]
    assert made.tell(TryAnswered(lost, 0, 0.01, 8, 0.0)) == ()
    assert kinds(made.until_due()) == [SendTry]
    assert made.tell(TryUnanswered(lost, "nothing")) == ()
    assert kinds(made.answer()) == [CanaryPassed]
    assert made.tell(TryAnswered(made.number, 0, 0.01, 8, 0.0, "wrong")) == ()


def test_wishes_are_bounded_and_not_doubled() -> None:
    """However often others ask, at most one try is out and few wait."""
    made = asker()
    made.until_due()
    for question in range(100):
        made.tell(CheckRequested("why", question=question))
        made.tell(CheckRequested("why", question=0))
        made.tell(CheckRequested("why"))
    sends = 0
    while made.canary.state is CanaryState.ASKING:
        made.answer()
        sends += 1
    assert sends <= 17


def test_an_asleep_worker_is_asked_when_it_wakes() -> None:
    """While it is away nothing is due; when it is back it is asked at once, with the same load."""
    made = asker()
    made.tell(CanaryGone())
    assert made.canary.next_deadline_s is None
    assert made.tell(CheckRequested("why", number=3)) == ()
    made.tell(CanaryPresent(1))
    assert kinds(made.tell(DeadlineReached())) == [SendTry]


@pytest.mark.parametrize("load", [1, 2], ids=["same load", "another's load"])
def test_who_takes_over_is_asked_once_its_streams_run_again(load: int) -> None:
    """Not beside the first steps, which streams wait for; at once if somebody wants to know."""
    made = asker()
    made.tell(CanaryGone())
    assert made.tell(CanaryPresent(load, took_over=True)) == ()
    assert made.tell(DeadlineReached()) == ()
    due_s = made.canary.next_deadline_s
    assert due_s == made.now + TOOK_OVER_S
    made.now = due_s
    assert kinds(made.tell(DeadlineReached())) == [SendTry]
    made.tell(CanaryGone())
    made.now += 1.0
    made.tell(CanaryPresent(load, took_over=True))
    assert kinds(made.tell(CheckRequested("a doubt"))) == [SendTry]


# -- the check of answers


def test_two_retries_come_before_a_verdict() -> None:
    """Any sound answer of three ends the check well."""
    made = asker()
    made.until_due()
    assert made.tell(TryUnanswered(made.number, "nothing")) == ()
    made.until_due()
    assert made.answer(wrong="another token") == ()
    made.until_due()
    assert kinds(made.answer()) == [HealthNote, CanaryPassed]


def test_wrong_answers_that_come_and_go_are_not_forgotten() -> None:
    """Three of them accuse although each was right when asked again; after enough clean checks they count no more."""
    made = asker()
    for _ in range(WRONGS_MAX - 1):
        made.until_due()
        made.answer(wrong="another token")
        made.until_due()
        assert CanaryPassed in kinds(made.answer())
    patient = Asker()
    patient.canary.restore(made.canary.record())
    patient.now = made.now
    patient.tell(CanaryPresent(1))
    made.until_due()
    assert kinds(made.answer(wrong="another token")) == [Accuse]
    patient.learn(checks=CLEAN)
    patient.until_due()
    assert patient.answer(wrong="another token") == ()


def test_wrong_answers_of_an_earlier_load_are_not_held_against_the_next() -> None:
    """The weights are others."""
    made = asker()
    for _ in range(WRONGS_MAX - 1):
        made.until_due()
        made.answer(wrong="another token")
    made.tell(CanaryPresent(2))
    assert made.answer(wrong="another token") == ()


def test_a_wrong_answer_accuses_and_convicts_nobody_by_itself() -> None:
    """Its standing hears of it only from what compares all sets of weights; its breaker hears that it did not pass."""
    made = asker()
    made.tell(CheckRequested("half open", number=1))
    effects: tuple[CanaryEffect, ...] = ()
    for _ in range(TRIES):
        effects = made.answer(wrong="another token")
        if made.canary.state is CanaryState.PAUSING:
            made.until_due()
    assert kinds(effects) == [Accuse, CanaryAnswered]


def test_late_is_three_times_what_is_usual_and_the_others_are_not() -> None:
    """At three times it passes; above, after its retries, it is slow, if the others of its set are in time."""
    made = asker()
    made.learn(0.01)
    assert kinds(made.tries(0.029)) == [CanaryPassed]
    made.learn(0.01, checks=30)
    effects = made.tries(0.05, 0.05, 0.05, peers=1.1)
    assert isinstance(effects[0], CanaryFailed)
    assert effects[0].failing is CanaryFailing.SLOW


@pytest.mark.parametrize("peers", [None, 2.0, 5.0])
def test_a_set_that_is_late_as_a_whole_accuses_nobody(peers: float | None) -> None:
    """Five times its usual time passes, with a word, if the others are late or there is no other."""
    made = asker()
    made.learn(0.01)
    assert kinds(made.tries(0.05, 0.05, 0.05, peers=peers)) == [HealthNote, CanaryPassed]


def test_a_set_that_was_late_as_a_whole_and_is_well_again_accuses_nobody() -> None:
    """Others were asked while all were slow, and once more when they no longer were: who had its last try before that
    was as slow as they."""
    others = [asker(), asker()]
    for other in others:
        other.learn()
        began_s = other.now
        other.tries(0.05, 0.05)
        other.tries(0.01)
    assert pace_of([other.canary for other in others], began_s) == pytest.approx(5.0)
    assert pace_of([other.canary for other in others], others[0].now) == pytest.approx(1.0)
    assert pace_of([other.canary for other in others], others[0].now + 1.0) is None


def test_peers_are_asked_once_and_not_by_peers() -> None:
    """A late worker has the others asked, unless they were just now; those it asked do not ask in turn."""
    made = asker()
    made.learn(0.01)
    assert kinds(made.tries(0.05)) == [AskPeers]
    assert made.tries(0.05) == ()
    other = asker()
    other.learn(0.01)
    other.tell(CheckRequested("another is late", peer=True))
    assert other.answer(0.05) == ()


def test_load_explains_a_late_answer() -> None:
    """Each measure of load has its own usual time; one never seen is learnt; with work waiting none is late."""
    made = asker()
    made.learn(0.01)
    made.learn(0.08, occupancy=0.9)
    assert kinds(made.tries(0.2, occupancy=0.9, peers=1.0)) == [CanaryPassed]
    assert kinds(made.tries(9.0, occupancy=1.5, peers=1.0)) == [CanaryPassed]
    assert kinds(made.tries(0.08, 0.08, 0.08, peers=1.0)) == [CanaryFailed]


def test_failures_and_late_answers_move_no_baseline() -> None:
    """However many there are, what is usual stays as it was."""
    made = asker()
    made.learn(0.01)
    before = made.canary.record().baselines
    for _ in range(20):
        made.tries(0.05, 0.05, 0.05, peers=1.0)
        made.until_due()
        made.answer(wrong="another token")
        made.until_due()
        made.tell(TryUnanswered(made.number, "nothing"))
    assert made.canary.record().baselines == before


def test_a_cold_start_is_soon_forgotten() -> None:
    """The first answers count in full: ten after one of a second, what is usual is near what they took."""
    made = Asker()
    made.tell(CanaryPresent(1))
    made.answer(1.0)
    made.learn(0.01, checks=SAMPLES_MIN + 6)
    assert made.canary.record().baselines[0].mean_s * 8 < 0.12


# -- what is written down


def test_a_restart_forgets_what_was_out_and_nothing_else() -> None:
    """The record goes through JSON; nobody is asked sooner for it, and the old process's tries are not waited for."""
    made = asker()
    made.learn()
    record = msgspec.json.decode(msgspec.json.encode(made.canary.record()), type=CanaryRecord)
    assert record == made.canary.record()
    other = Asker()
    other.now = made.now + 1.0
    other.canary.restore(record)
    assert other.tell(CanaryPresent(1)) == ()
    assert other.canary.next_deadline_s == made.canary.next_deadline_s
    assert other.until_due() == (SendTry(made.number + 1, record.turn + 1),)
    ahead = Asker()
    ahead.canary.restore(replace(record, due_s=1e12))
    ahead.tell(CanaryPresent(1))
    assert ahead.canary.next_deadline_s is not None
    assert ahead.canary.next_deadline_s <= ahead.now + 30.0 * (1 + JITTER_MAX)


# -- any order of events, beside a model that remembers everything


class Keeper(Asker):
    """Feeds one worker's machine, and says by itself what must come of it."""

    def __init__(self) -> None:
        super().__init__(draw=0.5)
        self.load = 0
        self.tries_made = 0  # of the check under way
        self.wrongs = 0  # since its load or the last accusation
        self.breaker_out: set[int] = set()
        self.rested_s: float | None = None  # since when the interval runs
        self.last = 0

    def feed(self, event: CanaryEvent) -> None:
        before = self.canary.state
        wanted = before is CanaryState.ASKING and getattr(event, "number", None) == self.number
        if isinstance(event, TryAnswered) and wanted and event.wrong:
            self.wrongs += 1
        if isinstance(event, CheckRequested) and event.number is not None and before is not CanaryState.ABSENT:
            self.breaker_out.add(event.number)
        effects = self.tell(event)
        self.check_states(before, event, effects)
        outcomes = [e for e in effects if isinstance(e, CanaryPassed | CanaryFailed | Accuse)]
        assert len(outcomes) <= 1
        assert not outcomes or (wanted and not isinstance(event, TryRefused | CheckRequested))
        for outcome in outcomes:
            self.check_outcome(outcome)
        for effect in effects:
            if isinstance(effect, CanaryAnswered):
                assert outcomes
                assert effect.passed == (
                    isinstance(outcomes[0], CanaryPassed)
                    or (isinstance(outcomes[0], CanaryFailed) and outcomes[0].failing is CanaryFailing.SLOW)
                )
                self.breaker_out.remove(effect.number)
            if isinstance(effect, SendTry):
                assert effect.number > self.last
                self.last = effect.number
        over = wanted and self.canary.state is not CanaryState.PAUSING
        if (
            over
            or isinstance(event, CanaryPresent | CanaryGone)
            or (isinstance(event, DeadlineReached) and HealthNote in kinds(effects))
        ):
            self.tries_made = 0
        self.tries_made += any(isinstance(effect, SendTry) for effect in effects)
        assert self.tries_made <= TRIES

    def check_states(self, before: CanaryState, event: CanaryEvent, effects: tuple[CanaryEffect, ...]) -> None:
        after = self.canary.state
        assert (after is CanaryState.ABSENT) == (self.canary.next_deadline_s is None)
        assert (after is CanaryState.ASKING) >= (SendTry in kinds(effects))
        if isinstance(event, DeadlineReached) and before is CanaryState.IDLE and SendTry in kinds(effects):
            assert self.rested_s is None or self.now - self.rested_s >= 30.0
        if after is CanaryState.IDLE and before in (CanaryState.ASKING, CanaryState.PAUSING):
            self.rested_s = None if isinstance(event, TryRefused | CanaryPresent) else self.now
        if isinstance(event, CanaryPresent | CanaryGone):
            self.rested_s = None

    def check_outcome(self, outcome: CanaryPassed | CanaryFailed | Accuse) -> None:
        if isinstance(outcome, CanaryFailed):
            assert outcome.failing is not CanaryFailing.WRONG
            assert self.tries_made == TRIES
        if isinstance(outcome, Accuse):
            assert self.wrongs >= WRONGS_MAX
            self.wrongs = 0
        if not isinstance(outcome, Accuse):
            assert outcome.load == self.load

    def restart(self) -> None:
        record = msgspec.json.decode(msgspec.json.encode(self.canary.record()), type=CanaryRecord)
        self.canary = WorkerCanary("w", lambda: 0.5)
        self.canary.restore(record)
        self.breaker_out.clear()
        self.tries_made, self.rested_s = 0, None
        if self.load:
            self.feed(CanaryPresent(self.load))


steps = st.one_of(
    st.tuples(st.just("answer"), st.tuples(st.integers(-1, 1), st.sampled_from(["", "", "another token"]))),
    st.tuples(st.just("answer"), st.tuples(st.just(0), st.sampled_from(["", "another token"]))),
    st.tuples(st.just("silence"), st.tuples(st.integers(-1, 0), st.booleans())),
    st.tuples(st.just("ask"), st.tuples(st.integers(0, 2), st.booleans())),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.5, 3.0, 16.0, 40.0])),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0, 40.0])),
    st.tuples(st.sampled_from(["load", "gone", "refuse", "restart"]), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=80), st.lists(st.sampled_from([0.01, 0.02, 0.2, 2.0]), min_size=1, max_size=5))
def test_no_order_of_events_breaks_its_promises(story: list[tuple[str, object]], times: list[float]) -> None:
    """One try out, three to a check, one outcome; nothing comes of strange answers; and when all is well it passes."""
    keeper = Keeper()
    breakers = 0
    for place, (kind, value) in enumerate(story):
        if kind == "answer":
            back, wrong = value  # type: ignore[misc]
            took_s = times[place % len(times)]
            keeper.feed(TryAnswered(keeper.number + back, 0, took_s, 8, (place % 6) / 4, wrong, [None, 1.0][place % 2]))
        elif kind == "silence":
            back, sound = value  # type: ignore[misc]
            keeper.feed(TryUnanswered(keeper.number + back, "nothing", sound=sound))
        elif kind == "ask":
            question, breaker = value  # type: ignore[misc]
            breakers += 1
            keeper.feed(CheckRequested("why", question or None, breakers if breaker else None))
        elif kind == "wait":
            assert isinstance(value, float)
            keeper.now += value
            keeper.feed(DeadlineReached())
        elif kind == "load":
            keeper.load += 1
            keeper.wrongs = 0
            keeper.feed(CanaryPresent(keeper.load))
        elif kind == "refuse":
            keeper.feed(TryRefused(keeper.number))
        elif kind == "gone":
            keeper.feed(CanaryGone())
        else:
            keeper.restart()
    # The healed phase: it is there, and answers.
    keeper.load += 1
    keeper.wrongs = 0
    keeper.feed(CanaryPresent(keeper.load))
    for _ in range(40):
        if keeper.canary.state is not CanaryState.ASKING:
            break
        keeper.feed(TryAnswered(keeper.number, 0, 0.01, 8, 0.0))
    assert keeper.canary.state is CanaryState.IDLE
    assert keeper.canary.record().clean >= 1
