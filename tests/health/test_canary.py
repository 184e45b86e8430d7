"""One worker's canaries: the schedule and the judge, for any order of events, and the defects they must not have
(facts 14)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.control.words import What
from holdfast.health.breaker import CANARY_S, CanaryAnswered
from holdfast.health.canary import (
    CLEAN,
    JITTER_MAX,
    LOST_S,
    PAUSES_S,
    REFUSED_S,
    SAMPLES_MIN,
    TABLE,
    TOOK_OVER_S,
    TRIES,
    TRY_S,
    WRONGS_MAX,
    Accuse,
    Answered,
    Asked,
    AskPeers,
    Canary,
    Cause,
    Effect,
    Event,
    Gone,
    Limits,
    Note,
    Present,
    Record,
    Refused,
    Send,
    State,
    Tick,
    Unanswered,
    pace_of,
)
from holdfast.health.standing import CanaryFailed, CanaryPassed, Failing, Status
from ward_rig import WardSet


class Asker:
    """Steps one worker's machine, and remembers the last try."""

    def __init__(self, draw: float = 0.0) -> None:
        self.canary = Canary("w", lambda: draw)
        self.now = 1000.0
        self.number = 0

    def tell(self, event: Event) -> tuple[Effect, ...]:
        effects = self.canary.step(event, self.now)
        sent = [effect for effect in effects if isinstance(effect, Send)]
        assert len(sent) <= 1
        if sent:
            self.number = sent[0].number
        return effects

    def until_due(self) -> tuple[Effect, ...]:
        """Wait for what is next."""
        assert self.canary.next_deadline_s is not None
        self.now = max(self.now, self.canary.next_deadline_s)
        return self.tell(Tick())

    def answer(
        self, took_s: float = 0.01, *, occupancy: float = 0.0, wrong: str = "", peers: float | None = None
    ) -> tuple[Effect, ...]:
        return self.tell(Answered(self.number, 0, took_s, 8, occupancy, wrong, peers))

    def tries(self, *took_s: float, occupancy: float = 0.0, peers: float | None = None) -> tuple[Effect, ...]:
        """One check whose tries take so long; what came of the last."""
        effects: tuple[Effect, ...] = ()
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
    assert made.tell(Present(1)) == (Send(1, 1),)
    assert made.answer() == (CanaryPassed(1, 1000.0),)
    return made


def test_an_asker_that_was_stopped_does_not_make_a_canary_dear() -> None:
    """What was read an hour late took as long as a try may: the next check comes in hours, not in months, and what is
    written down can be read."""
    made = Asker()
    made.tell(Present(1))
    made.answer(3600.0)
    record = msgspec.json.decode(msgspec.json.encode(made.canary.record()), type=Record)
    assert record.cost_s == TRY_S
    assert record.baselines[0].mean_s == TRY_S / 8


def kinds(effects: tuple[Effect, ...]) -> list[type]:
    return [type(effect) for effect in effects]


# -- the defects of facts 14, each by name


def test_canaries_run_side_by_side() -> None:
    """All workers are asked at the same moment, and those that never answer delay nobody's next."""
    made = WardSet({name: name for name in "abcd"})
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
    made = WardSet({name: name for name in "abc"})
    made.workers["a"].occupancy = 3.0
    made.begin(serving=True)
    made.wait(300.0)
    counts = {name: sum(who == name for _, who, _ in made.asks) for name in "abc"}
    assert counts["a"] == counts["b"] == counts["c"]
    made.workers["a"].shift = 7
    made.wait(40.0)
    assert made.quarantined() == {"a"}


def test_one_failed_canary_moves_nothing() -> None:
    """A try without an answer is asked again; a whole check without one costs half the traffic, and no stream."""
    made = WardSet({"a": "a", "b": "b"})
    made.begin(serving=True)
    made.wait(1.0)
    made.workers["a"].how = "silent"
    while not made.told(What.FAILED):
        assert made.standings["a"].status is Status.HEALTHY
        made.wait(1.0)
    made.workers["a"].how = "answers"
    assert made.standings["a"].status is Status.SUSPICIOUS
    made.wait(40.0)
    assert made.standings["a"].status is Status.HEALTHY
    assert not made.told(What.MOVED)


# -- the schedule


def test_the_first_check_comes_before_traffic_and_one_after_every_load() -> None:
    """A fresh worker has weight 0 until it answered; a fresh load is asked at once, whatever was out."""
    made = WardSet({"a": "a"})
    made.begin()
    assert made.standings["a"].weight == 0.0
    made.wait(1.0)
    assert made.standings["a"].weight == 1.0
    one = asker()
    one.until_due()
    assert kinds(one.tell(Present(2))) == [Send]
    assert one.tell(Present(2)) == ()


def test_checks_take_their_share_of_a_workers_time_and_no_more() -> None:
    """At least the interval apart, and so far that they take their share at most; by chance longer, never shorter."""
    quick, long, late = asker(), asker(), asker(draw=0.999)
    long.tries(5.0)
    quick.tries(0.001)
    assert quick.canary.next_deadline_s == pytest.approx(quick.now + 30.0)
    assert long.canary.next_deadline_s == pytest.approx(long.now + (0.01 + 5.0) / 2 / Limits().share)
    late.tries(0.001)
    assert late.canary.next_deadline_s is not None
    assert 30.0 < late.canary.next_deadline_s - late.now <= 30.0 * (1 + JITTER_MAX)


@pytest.mark.parametrize("took_s", [0.03, 0.23, 1.0, 2.0])
def test_by_default_a_worker_that_turns_wrong_is_quarantined_within_a_minute(took_s: float) -> None:
    """However unlucky the moment (just after a check) and the draw, on an engine that takes its time for an answer."""
    made = WardSet({"a": "a", "b": "b"}, draw=0.999)
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
    assert made.tell(Asked("half open", number=7)) == ()
    assert kinds(made.answer()) == [CanaryPassed, Send]
    assert made.answer() == (CanaryPassed(1, made.now), CanaryAnswered(7, True))
    assert kinds(made.tell(Asked("half open", number=8))) == [Send]
    for _ in range(TRIES - 1):
        made.tell(Unanswered(made.number, "nothing"))
        made.until_due()
    failed = made.tell(Unanswered(made.number, "nothing"))
    assert failed == (CanaryFailed(1, made.now, Failing.NO_ANSWER, "nothing"), CanaryAnswered(8, False))


def test_a_breakers_canary_goes_before_what_is_to_be_learnt() -> None:
    """It has a time of its own; questions have not."""
    made = asker()
    made.until_due()
    made.tell(Asked("to learn", question=0))
    made.tell(Asked("half open", number=1))
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
    assert kinds(made.until_due()) == [Note]
    assert made.tell(Answered(lost, 0, 0.01, 8, 0.0)) == ()
    assert kinds(made.until_due()) == [Send]
    assert made.tell(Unanswered(lost, "nothing")) == ()
    assert kinds(made.answer()) == [CanaryPassed]
    assert made.tell(Answered(made.number, 0, 0.01, 8, 0.0, "wrong")) == ()


def test_a_worker_without_a_place_is_asked_again_soon() -> None:
    """A refusal for want of room is no failure, and leaves nobody unchecked for long."""
    made = Asker()
    made.tell(Present(1))
    assert made.tell(Refused(made.number)) == ()
    assert made.canary.next_deadline_s == made.now + REFUSED_S


def test_wishes_are_bounded_and_not_doubled() -> None:
    """However often others ask, at most one try is out and few wait."""
    made = asker()
    made.until_due()
    for question in range(100):
        made.tell(Asked("why", question=question))
        made.tell(Asked("why", question=0))
        made.tell(Asked("why"))
    sends = 0
    while made.canary.state is State.ASKING:
        made.answer()
        sends += 1
    assert sends <= 17


def test_an_asleep_worker_is_asked_when_it_wakes() -> None:
    """While it is away nothing is due; when it is back it is asked at once, with the same load."""
    made = asker()
    made.tell(Gone())
    assert made.canary.next_deadline_s is None
    assert made.tell(Asked("why", number=3)) == ()
    made.tell(Present(1))
    assert kinds(made.tell(Tick())) == [Send]


@pytest.mark.parametrize("load", [1, 2], ids=["same load", "another's load"])
def test_who_takes_over_is_asked_once_its_streams_run_again(load: int) -> None:
    """Not beside the first steps, which streams wait for; at once if somebody wants to know."""
    made = asker()
    made.tell(Gone())
    assert made.tell(Present(load, took_over=True)) == ()
    assert made.tell(Tick()) == ()
    due_s = made.canary.next_deadline_s
    assert due_s == made.now + TOOK_OVER_S
    made.now = due_s
    assert kinds(made.tell(Tick())) == [Send]
    made.tell(Gone())
    made.now += 1.0
    made.tell(Present(load, took_over=True))
    assert kinds(made.tell(Asked("a doubt"))) == [Send]


# -- the judge


def test_two_retries_come_before_a_verdict() -> None:
    """Any sound answer of three ends the check well."""
    made = asker()
    made.until_due()
    assert made.tell(Unanswered(made.number, "nothing")) == ()
    made.until_due()
    assert made.answer(wrong="another token") == ()
    made.until_due()
    assert kinds(made.answer()) == [Note, CanaryPassed]


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
    patient.tell(Present(1))
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
    made.tell(Present(2))
    assert made.answer(wrong="another token") == ()


def test_a_wrong_answer_accuses_and_convicts_nobody_by_itself() -> None:
    """Its standing hears of it only from what compares all sets of weights; its breaker hears that it did not pass."""
    made = asker()
    made.tell(Asked("half open", number=1))
    effects: tuple[Effect, ...] = ()
    for _ in range(TRIES):
        effects = made.answer(wrong="another token")
        if made.canary.state is State.PAUSING:
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
    assert effects[0].failing is Failing.SLOW


@pytest.mark.parametrize("peers", [None, 2.0, 5.0])
def test_a_set_that_is_late_as_a_whole_accuses_nobody(peers: float | None) -> None:
    """Five times its usual time passes, with a word, if the others are late or there is no other."""
    made = asker()
    made.learn(0.01)
    assert kinds(made.tries(0.05, 0.05, 0.05, peers=peers)) == [Note, CanaryPassed]


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
    other.tell(Asked("another is late", peer=True))
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
        made.tell(Unanswered(made.number, "nothing"))
    assert made.canary.record().baselines == before


def test_a_cold_start_is_soon_forgotten() -> None:
    """The first answers count in full: ten after one of a second, what is usual is near what they took."""
    made = Asker()
    made.tell(Present(1))
    made.answer(1.0)
    made.learn(0.01, checks=SAMPLES_MIN + 6)
    assert made.canary.record().baselines[0].mean_s * 8 < 0.12


def test_a_busy_worker_is_not_a_silent_one() -> None:
    """Its standing is told that tokens came meanwhile; an asker that reached nobody gives no verdict at all."""
    made = asker()
    for moving, sound in ((True, True), (False, False)):
        effects: tuple[Effect, ...] = ()
        for _ in range(TRIES):
            made.until_due()
            effects = made.tell(Unanswered(made.number, "nothing", moving, sound))
        assert kinds(effects) == ([CanaryFailed] if sound else [Note])
        if isinstance(effects[0], CanaryFailed):
            assert effects[0].moving


# -- what is written down


def test_a_restart_forgets_what_was_out_and_nothing_else() -> None:
    """The record goes through JSON; nobody is asked sooner for it, and the old process's tries are not waited for."""
    made = asker()
    made.learn()
    record = msgspec.json.decode(msgspec.json.encode(made.canary.record()), type=Record)
    assert record == made.canary.record()
    other = Asker()
    other.now = made.now + 1.0
    other.canary.restore(record)
    assert other.tell(Present(1)) == ()
    assert other.canary.next_deadline_s == made.canary.next_deadline_s
    assert other.until_due() == (Send(made.number + 1, record.turn + 1),)
    ahead = Asker()
    ahead.canary.restore(replace(record, due_s=1e12))
    ahead.tell(Present(1))
    assert ahead.canary.next_deadline_s is not None
    assert ahead.canary.next_deadline_s <= ahead.now + 30.0 * (1 + JITTER_MAX)


def test_every_state_can_be_left() -> None:
    """There is a way from each to RESTING, and from each but ABSENT out."""
    assert all(State.RESTING in row.values() for state, row in TABLE.items() if state is not State.RESTING)
    assert all(Cause.LEFT in row for state, row in TABLE.items() if state is not State.ABSENT)


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

    def feed(self, event: Event) -> None:
        before = self.canary.state
        wanted = before is State.ASKING and getattr(event, "number", None) == self.number
        if isinstance(event, Answered) and wanted and event.wrong:
            self.wrongs += 1
        if isinstance(event, Asked) and event.number is not None and before is not State.ABSENT:
            self.breaker_out.add(event.number)
        effects = self.tell(event)
        self.check_states(before, event, effects)
        outcomes = [e for e in effects if isinstance(e, CanaryPassed | CanaryFailed | Accuse)]
        assert len(outcomes) <= 1
        assert not outcomes or (wanted and not isinstance(event, Refused | Asked))
        for outcome in outcomes:
            self.check_outcome(outcome)
        for effect in effects:
            if isinstance(effect, CanaryAnswered):
                assert outcomes
                assert effect.passed == (
                    isinstance(outcomes[0], CanaryPassed)
                    or (isinstance(outcomes[0], CanaryFailed) and outcomes[0].failing is Failing.SLOW)
                )
                self.breaker_out.remove(effect.number)
            if isinstance(effect, Send):
                assert effect.number > self.last
                self.last = effect.number
        over = wanted and self.canary.state is not State.PAUSING
        if over or isinstance(event, Present | Gone) or (isinstance(event, Tick) and Note in kinds(effects)):
            self.tries_made = 0
        self.tries_made += any(isinstance(effect, Send) for effect in effects)
        assert self.tries_made <= TRIES

    def check_states(self, before: State, event: Event, effects: tuple[Effect, ...]) -> None:
        after = self.canary.state
        assert (after is State.ABSENT) == (self.canary.next_deadline_s is None)
        assert (after is State.ASKING) >= (Send in kinds(effects))
        if isinstance(event, Tick) and before is State.RESTING and Send in kinds(effects):
            assert self.rested_s is None or self.now - self.rested_s >= 30.0
        if after is State.RESTING and before in (State.ASKING, State.PAUSING):
            self.rested_s = None if isinstance(event, Refused | Present) else self.now
        if isinstance(event, Present | Gone):
            self.rested_s = None

    def check_outcome(self, outcome: CanaryPassed | CanaryFailed | Accuse) -> None:
        if isinstance(outcome, CanaryFailed):
            assert outcome.failing is not Failing.WRONG
            assert self.tries_made == TRIES
        if isinstance(outcome, Accuse):
            assert self.wrongs >= WRONGS_MAX
            self.wrongs = 0
        if not isinstance(outcome, Accuse):
            assert outcome.load == self.load

    def restart(self) -> None:
        record = msgspec.json.decode(msgspec.json.encode(self.canary.record()), type=Record)
        self.canary = Canary("w", lambda: 0.5)
        self.canary.restore(record)
        self.breaker_out.clear()
        self.tries_made, self.rested_s = 0, None
        if self.load:
            self.feed(Present(self.load))


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
            keeper.feed(Answered(keeper.number + back, 0, took_s, 8, (place % 6) / 4, wrong, [None, 1.0][place % 2]))
        elif kind == "silence":
            back, sound = value  # type: ignore[misc]
            keeper.feed(Unanswered(keeper.number + back, "nothing", sound=sound))
        elif kind == "ask":
            question, breaker = value  # type: ignore[misc]
            breakers += 1
            keeper.feed(Asked("why", question or None, breakers if breaker else None))
        elif kind == "wait":
            assert isinstance(value, float)
            keeper.now += value
            keeper.feed(Tick())
        elif kind == "load":
            keeper.load += 1
            keeper.wrongs = 0
            keeper.feed(Present(keeper.load))
        elif kind == "refuse":
            keeper.feed(Refused(keeper.number))
        elif kind == "gone":
            keeper.feed(Gone())
        else:
            keeper.restart()
    # The healed phase: it is there, and answers.
    keeper.load += 1
    keeper.wrongs = 0
    keeper.feed(Present(keeper.load))
    for _ in range(40):
        if keeper.canary.state is not State.ASKING:
            break
        keeper.feed(Answered(keeper.number, 0, 0.01, 8, 0.0))
    assert keeper.canary.state is State.RESTING
    assert keeper.canary.record().clean >= 1
