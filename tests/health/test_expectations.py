"""What canaries must be answered: the margin and the band, where it comes from, and that no expectation, however wrong,
takes everybody out of traffic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.control.health_controller import NoticeKind
from holdfast.core.ports import DeadlineReached
from holdfast.core.requests import Sampling, TokenLogprobs
from holdfast.engines.sim import vocabulary
from holdfast.engines.sim.language import Sequence
from holdfast.health import expectations as module
from holdfast.health.expectations import (
    ASKED_AT_ONCE,
    ASKED_AT_ONCE_MAX,
    BANDS,
    JURY_S,
    PINNED_ENOUGH,
    TABLE,
    TOP,
    WIDE,
    WITHDRAWALS_MAX,
    AnswerHeard,
    AskSet,
    CanaryAnswer,
    CanaryQuestion,
    Convict,
    Expectations,
    ExpectationsEffect,
    ExpectationsEvent,
    ExpectationsNote,
    ExpectationsRecord,
    QuestionState,
    SetsPresent,
    WeightsAccused,
    answer_of,
    difference,
    is_fit,
)
from tests.rigs.worlds.health import KEY, QUESTIONS, HealthRig, Worker, answer

BAND = WIDE


def expectations(*sets: str, verified: bool = False, given_shift: int | None = None) -> Expectations:
    given_answers = {} if given_shift is None else {q: answer(q, shift=given_shift) for q in range(len(QUESTIONS))}
    made = Expectations(KEY, QUESTIONS, given_answers)
    made.step(SetsPresent(dict.fromkeys(sets, verified)), 0.0)
    return made


def hear(made: Expectations, now_s: float = 0.0, **shifts: int) -> list[ExpectationsEffect]:
    """Each set's answer to the first question."""
    return [e for name, shift in shifts.items() for e in made.step(AnswerHeard(name, 0, answer(0, shift=shift)), now_s)]


def state_of(made: Expectations, question: int = 0) -> QuestionState:
    return QuestionState(made.record().entries[question].state)


def convicted(effects: list[ExpectationsEffect]) -> list[str]:
    return [effect.weights for effect in effects if isinstance(effect, Convict)]


def asked(effects: list[ExpectationsEffect]) -> list[str]:
    return [effect.weights for effect in effects if isinstance(effect, AskSet) and effect.question == 0]


def accuse(made: Expectations, name: str, now_s: float = 1.0) -> list[ExpectationsEffect]:
    return list(made.step(WeightsAccused(name, 0, now_s, "another token"), now_s))


def moved(place: int, rank: int, by: float) -> CanaryAnswer:
    """The right answer with one logprob moved."""
    right = answer(0)
    top = [[list(pair) for pair in each] for each in right.top]
    top[place][rank][1] += by
    return CanaryAnswer(right.tokens, tuple(tuple((int(t), lp) for t, lp in each) for each in top))


# -- the margin and the band


@pytest.mark.parametrize(("margin", "fit"), [(0.3, False), (0.99, False), (1.0, True), (5.0, True)])
def test_questions_are_chosen_with_a_margin_of_a_nat_at_every_position(margin: float, fit: bool) -> None:
    """One place with less makes a question unfit; so does a token that was not the likeliest, or no logprobs at all."""
    wide = answer(0, margin=5.0)
    narrow = answer(0, margin=margin)
    mixed = CanaryAnswer(wide.tokens, (*wide.top[:2], narrow.top[2], wide.top[3]))
    assert is_fit(mixed, BAND) == fit
    assert not is_fit(CanaryAnswer(wide.tokens), BAND)
    assert not is_fit(CanaryAnswer((7, *wide.tokens[1:]), wide.top), BAND)
    assert not is_fit(CanaryAnswer(()), BAND)


def test_a_question_that_a_batch_could_flip_is_given_up_by_a_majority_only() -> None:
    """One set that is unsure of everything does not take the questions away from all."""
    made = expectations("a", "b", "c")
    made.step(AnswerHeard("a", 0, answer(0, margin=0.3)), 0.0)
    assert state_of(made) is QuestionState.LEARNING
    hear(made, b=0, c=0)
    assert state_of(made) is QuestionState.PINNED
    other = expectations("a", "b", "c")
    for name in "ab":
        other.step(AnswerHeard(name, 0, answer(0, margin=0.3)), 0.0)
    assert state_of(other) is QuestionState.UNFIT
    assert {other.question_at(turn) for turn in range(4)} == {1}


@pytest.mark.parametrize(
    ("given_answer", "differs"),
    [
        (answer(0), False),
        (answer(0, drift=0.05), False),  # a busy batch in 16 bits
        (answer(0, drift=-0.05), False),
        (answer(0, drift=0.15), True),  # all of them, by little
        (answer(0, drift=-0.15), True),
        (moved(2, 3, 0.4), False),  # three steps of bfloat16, once
        (moved(2, 3, 0.6), True),
        (moved(0, 0, -0.6), True),
        (moved(3, 1, math.nan), True),
        (answer(0, shift=1), True),
        (answer(0, tokens=3), True),
        (CanaryAnswer(answer(0).tokens), False),  # an engine without logprobs: its tokens are all there is
    ],
)
def test_tokens_and_logprobs_are_judged(given_answer: CanaryAnswer, differs: bool) -> None:
    """Another token, one logprob off by more than half a nat, or all by more than a tenth on average."""
    assert bool(difference(answer(0), given_answer, BAND)) == differs


def test_what_is_not_listed_any_more_has_moved_at_least_to_the_end_of_the_list() -> None:
    """A likely token that fell out of the list is found; the last one, that another took the place of, is not."""
    right = answer(0)
    first = right.top[0]
    fell = (first[0], (1, -0.2), *first[2:])
    swapped = (*first[:-1], (1, first[-1][1] + 0.1))
    assert difference(right, CanaryAnswer(right.tokens, (fell, *right.top[1:])), BAND)
    assert not difference(right, CanaryAnswer(right.tokens, (swapped, *right.top[1:])), BAND)


def test_no_band_lets_two_tokens_change_places() -> None:
    """Whatever moves by the band, the margin is left; finer arithmetic has a finer band."""
    for band in (WIDE, *BANDS.values()):
        assert band.margin >= 2 * band.one
        assert band.mean < band.one
    assert difference(answer(0), answer(0, drift=0.02), BANDS["float32"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5])
def test_what_no_sound_engine_answers_is_wrong_whatever_is_expected(value: float) -> None:
    """NaN, infinities, and probabilities above 1."""
    made = expectations("a")
    top = ((1, value), (2, -3.0))
    assert made.find_error(0, CanaryAnswer((1,), (top,)))


def test_an_answer_is_read_as_workers_give_it() -> None:
    """Tokens, and at each place the alternatives, best first."""
    entry = TokenLogprobs(-0.1, [(5, -0.1), (6, -2.5)])
    assert answer_of([5], [entry]) == CanaryAnswer((5,), (((5, -0.1), (6, -2.5)),))
    assert answer_of([5], None) == CanaryAnswer((5,))


def test_the_sims_language_has_questions_that_are_fit() -> None:
    """Its candidates are half a nat apart and no batch moves them: as "exact" it can be judged, as bfloat16 it could
    not."""
    words = vocabulary.load()
    fit = 0
    for first in range(20):
        prompt = [words.words[(7919 * (24 * first + place)) % len(words.words)] for place in range(24)]
        text = Sequence(words, prompt, 24, Sampling(8, 0, temperature=0.0, top_logprobs=TOP, ignore_eos=True))
        said = [(text.advance(), text.logprobs) for _ in range(8)]
        given_answer = answer_of([token for token, _ in said], [each for _, each in said if each is not None])
        fit += is_fit(given_answer, BANDS["exact"])
        assert not is_fit(given_answer, WIDE)
    assert fit >= 10


# -- where it comes from


def test_agreement_of_more_than_half_is_pinned() -> None:
    """Two of three are; one alone and two of four are not."""
    made = expectations("a", "b", "c")
    hear(made, a=0)
    assert state_of(made) is QuestionState.LEARNING
    hear(made, b=0)
    assert state_of(made) is QuestionState.PINNED
    four = expectations("a", "b", "c", "d")
    hear(four, a=0, b=0, c=7)
    assert state_of(four) is QuestionState.LEARNING
    hear(four, d=0)
    assert state_of(four) is QuestionState.PINNED


def test_votes_count_per_set_of_weights() -> None:
    """An active and its standby that rotted together do not outvote another worker."""
    made = HealthRig({"a": "w1", "a2": "w1", "b": "w2"})
    made.workers["a"].shift = made.workers["a2"].shift = 7
    made.begin(serving=True)
    made.wait(300.0)
    assert made.quarantined() == set()
    assert all(entry.state == QuestionState.LEARNING for entry in made.expectations.entries)


@pytest.mark.parametrize("verified", [True, False])
def test_a_worker_alone_is_believed_if_its_load_was_verified(verified: bool) -> None:
    """Then its first answers are expected of it; otherwise nothing is, and it passes by answering."""
    made = HealthRig({"a": "w1"}, verified=verified)
    made.begin()
    made.wait(1.0)
    assert made.standings["a"].weight == 1.0
    made.workers["a"].shift = 7
    made.wait(100.0)
    assert made.quarantined() == ({"a"} if verified else set())


def test_a_card_that_says_what_is_expected_needs_no_agreement() -> None:
    """The first worker is judged by it; a card's answer without the margin is not used."""
    made = expectations("a", given_shift=0)
    assert state_of(made) is QuestionState.PINNED
    assert made.find_error(0, answer(0)) == ""
    assert made.find_error(0, answer(0, shift=7))
    close = Expectations(KEY, QUESTIONS, {0: answer(0, margin=0.5), 1: answer(1, tokens=3)})
    assert state_of(close, 0) is QuestionState.UNFIT
    assert state_of(close, 1) is QuestionState.UNFIT


def test_everything_is_learnt_right_after_the_load() -> None:
    """A set that answered is asked the next question that is to be learnt, not at the next interval."""
    made = expectations("a", "b")
    effects = list(made.step(AnswerHeard("a", 0, answer(0)), 0.0))
    assert [(e.weights, e.question) for e in effects if isinstance(e, AskSet)] == [("a", 1)]
    made.step(AnswerHeard("a", 1, answer(1)), 0.0)
    assert made.step(AnswerHeard("a", 0, answer(0)), 0.0) == ()


def test_many_candidates_cost_little_and_a_few_are_kept() -> None:
    """Some are asked at once after a load, more if none was good for anything, then one after each check; with enough
    of them known the others are never asked."""
    many = [CanaryQuestion((place,), 4) for place in range(32)]

    def asked_at_once(unfit: int) -> tuple[Expectations, int]:
        made = Expectations(KEY, many)
        made.step(SetsPresent({"a": True}), 0.0)
        question, count = 0, 0
        while True:
            count += 1
            said = answer(question, margin=0.2 if question < unfit else 2.0)
            more = [e.question for e in made.step(AnswerHeard("a", question, said), 0.0) if isinstance(e, AskSet)]
            if not more:
                return made, count
            question = more[0]

    made, count = asked_at_once(0)
    assert count == PINNED_ENOUGH
    assert {made.question_at(turn) for turn in range(100)} == set(range(PINNED_ENOUGH))
    assert asked_at_once(32)[1] == ASKED_AT_ONCE_MAX
    made, count = asked_at_once(3)
    assert count == ASKED_AT_ONCE
    effects = made.step(AnswerHeard("a", 3, answer(3)), 0.0)
    assert [e.question for e in effects if isinstance(e, AskSet)] == [4]


# -- who is convicted


def test_others_that_do_not_answer_are_waited_for_and_not_for_ever() -> None:
    """One right answer convicts when the time is over; none convicts nobody and withdraws nothing."""
    made = expectations("a", "b", "c")
    hear(made, a=0, b=0, c=0)
    hear(made, a=7)
    accuse(made, "a", 10.0)
    assert made.next_deadline_s == 10.0 + JURY_S
    assert made.step(DeadlineReached(), 10.0 + JURY_S - 1) == ()
    effects = list(made.step(DeadlineReached(), 10.0 + JURY_S))
    assert [type(effect) for effect in effects] == [ExpectationsNote]
    assert state_of(made) is QuestionState.PINNED
    accuse(made, "a", 100.0)
    hear(made, 101.0, b=0)
    assert convicted(list(made.step(DeadlineReached(), 100.0 + JURY_S))) == ["a"]


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("source", ["card", "agreement"])
def test_all_wrong_at_once_quarantines_nobody(count: int, source: str) -> None:
    """A bad card, or a build that changed for all under its old name: the expectation is withdrawn, and told."""
    names = "abcdefgh"[:count]
    bad = {q: answer(q, shift=5) for q in range(len(QUESTIONS))}
    made = HealthRig({name: name for name in names}, given=bad if source == "card" else None)
    made.begin(serving=True)
    made.wait(100.0)
    for worker in made.workers.values():
        worker.shift = 7
    made.wait(200.0)
    assert made.quarantined() == set()
    assert all(standing.weight == 1.0 for standing in made.standings.values())
    assert any("withdrawn" in note for note in made.told(NoticeKind.NOTE))
    # What they agree on now is expected, and who differs from that is found.
    made.workers["a"].shift = 9
    made.wait(100.0)
    assert made.quarantined() == {"a"}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_a_build_that_changed_under_its_name_costs_at_most_half(count: int) -> None:
    """Rolled out one by one, the first are convicted by those that are not yet; then the expectation gives way."""
    names = "abcdefgh"[:count]
    made = HealthRig({name: name for name in names})
    made.begin(serving=True)
    made.wait(100.0)
    for name in names:
        made.workers[name].shift = 7
        made.reload(name)
        made.wait(60.0)
    made.wait(300.0)
    assert len(made.quarantined()) <= count // 2
    for name in made.quarantined():
        made.reload(name)
    made.wait(100.0)
    assert all(standing.weight == 1.0 for standing in made.standings.values())


def test_all_wrong_in_different_ways_quarantines_nobody() -> None:
    """An engine that answers by chance, or an asker that asks wrongly: nobody can bear witness."""
    made = HealthRig({name: name for name in "abc"})
    made.begin(serving=True)
    made.wait(100.0)
    for shift, worker in enumerate(made.workers.values(), 5):
        worker.shift = shift
    made.wait(300.0)
    assert made.quarantined() == set()


def test_a_fresh_worker_alone_is_not_held_to_what_nobody_there_ever_answered() -> None:
    """A card that is wrong does not keep the only worker out of traffic."""
    made = HealthRig({"a": "w1"}, given={q: answer(q, shift=5) for q in range(len(QUESTIONS))})
    made.begin()
    made.wait(20.0)
    assert made.standings["a"].weight == 1.0


def test_a_load_alone_is_asked_all_that_is_known_while_it_is_fresh() -> None:
    """What was learnt from an earlier load is asked of the next at once, not one question at each check: so its own
    answers are there to convict it when it rots, and nothing that is known is withdrawn for it."""
    learnt = expectations("a", verified=True)
    for question in range(len(QUESTIONS)):
        learnt.step(AnswerHeard("a", question, answer(question)), 0.0)
    made = Expectations(KEY, QUESTIONS)
    assert made.restore(learnt.record())
    made.step(SetsPresent({"b": True}), 1.0)
    to_ask = [len(QUESTIONS) - 1]
    for question in to_ask:
        effects = made.step(AnswerHeard("b", question, answer(question)), 1.0)
        to_ask += [effect.question for effect in effects if isinstance(effect, AskSet)]
    assert sorted(to_ask) == list(range(len(QUESTIONS)))
    assert hear(made, b=0) == []
    hear(made, b=7)
    assert convicted(accuse(made, "b")) == ["b"]


def test_a_convicted_set_is_no_witness() -> None:
    """Of two sets, one convicted, the other cannot be: what is expected is doubted first."""
    made = expectations("a", "b")
    hear(made, a=0, b=0)
    hear(made, a=7)
    accuse(made, "a")
    assert convicted(hear(made, b=0)) == ["a"]
    hear(made, b=9)
    accuse(made, "b")
    effects = hear(made, a=0)
    assert not convicted(effects)
    assert any(isinstance(effect, ExpectationsNote) and "withdrawn" in effect.reason for effect in effects)


def test_a_set_that_left_is_nothing_any_more() -> None:
    """Its vote, its accusation and its conviction go with it; a fresh load has another name."""
    made = expectations("a", "b", "c")
    hear(made, a=0, b=0, c=7)
    accuse(made, "c")
    made.step(SetsPresent({"a": False, "b": False, "c2": False}), 2.0)
    assert made.next_deadline_s is None
    assert made.record().entries[0].given == ["a", "b"]
    assert made.step(AnswerHeard("c", 0, answer(0)), 3.0) == ()


def test_an_expectation_that_is_withdrawn_again_and_again_is_given_up() -> None:
    """The question is not asked for its answer any more, and told."""
    made = expectations("a", "b")
    shift = 0
    hear(made, a=0, b=0)
    for _ in range(WITHDRAWALS_MAX):
        assert state_of(made) is QuestionState.PINNED
        shift += 6
        hear(made, a=shift)
        accuse(made, "a")
        hear(made, b=shift)
    assert state_of(made) is QuestionState.UNFIT


def test_a_short_answer_says_nothing_of_the_weights() -> None:
    """What was cut off is no vote, and no testimony."""
    made = expectations("a", "b")
    assert made.step(AnswerHeard("a", 0, answer(0, tokens=2)), 0.0) == ()
    hear(made, b=0)
    assert state_of(made) is QuestionState.LEARNING


# -- what is written down


def test_what_is_pinned_is_pinned_by_card_build_dtype_and_device() -> None:
    """It goes through JSON and back; with any of them another, or other questions, nothing is taken over."""
    made = expectations("a", "b")
    hear(made, a=0, b=0)
    record = msgspec.json.decode(msgspec.json.encode(made.record()), type=ExpectationsRecord)
    assert record == made.record()
    same = Expectations(KEY, QUESTIONS)
    assert same.restore(record)
    assert same.find_error(0, answer(0, shift=7))
    for key in (replace(KEY, card="x"), replace(KEY, build="x"), replace(KEY, dtype="x"), replace(KEY, device="x")):
        other = Expectations(key, QUESTIONS)
        assert not other.restore(record)
        assert other.find_error(0, answer(0, shift=7)) == ""
    assert not Expectations(KEY, QUESTIONS[:1]).restore(record)


def test_a_record_that_does_not_fit_its_questions_is_not_taken() -> None:
    """Whatever wrote it: no step would succeed with it, and control would find no worker."""
    written = expectations("a", "b")
    hear(written, a=0, b=0)
    record = written.record()
    made = Expectations(KEY, QUESTIONS)
    assert not made.restore(replace(record, entries=record.entries[:-1]))
    made.step(SetsPresent({"a": True}), 0.0)
    assert state_of(made) is QuestionState.LEARNING
    assert made.restore(record)


def test_a_card_is_not_believed_again_after_a_restart() -> None:
    """What was withdrawn stays withdrawn: the record goes before the card."""
    made = expectations("a", "b", given_shift=5)
    hear(made, a=0)
    accuse(made, "a")
    hear(made, b=0)
    again = Expectations(KEY, QUESTIONS, {0: answer(0, shift=5), 1: answer(1, shift=5)})
    assert again.restore(made.record())
    assert again.find_error(0, answer(0)) == ""


def test_every_state_but_the_last_can_be_left() -> None:
    """A question is learnt, pinned, and learnt again; one that is unfit stays so."""
    assert {state for state, row in TABLE.items() if not row} == {QuestionState.UNFIT}


# -- any order of events


class Watched(Expectations):
    """Expectations that are watched: what is always true is checked at every step."""

    def step(self, event: ExpectationsEvent, now_s: float) -> tuple[ExpectationsEffect, ...]:
        before = self.record()
        effects = super().step(event, now_s)
        after = self.record()
        for effect in effects:
            if isinstance(effect, Convict):
                assert effect.weights in self._sets
                assert effect.weights not in before.convicted
                assert len(self._sets) == 1 or set(self._sets) - set(after.convicted)
            if isinstance(effect, AskSet):
                assert effect.weights in self._sets
        for entry in after.entries:
            assert (entry.state == QuestionState.PINNED) == (entry.expected is not None)
            assert entry.expected is None or is_fit(entry.expected, WIDE)
            assert set(entry.given) <= set(self._sets)
        return effects


@pytest.fixture(scope="module")
def watched() -> Iterator[None]:
    """Whatever is kept meanwhile is watched."""
    with patch.object(module, "Expectations", Watched):
        yield


changes = st.one_of(
    st.tuples(st.just("shift"), st.sampled_from([0, 7, 7, 9])),
    st.tuples(st.just("drift"), st.sampled_from([0.0, 0.05, 0.3])),
    st.tuples(st.just("how"), st.sampled_from(["answers", "answers", "silent", "lost", "refuses"])),
    st.tuples(st.just("factor"), st.sampled_from([1.0, 4.0, 1000.0])),
    st.tuples(st.just("occupancy"), st.sampled_from([0.0, 0.6, 2.0])),
    st.tuples(st.sampled_from(["reload", "restart"]), st.none()),
)
stories = st.lists(st.tuples(st.integers(0, 4), changes, st.sampled_from([0.0, 1.0, 20.0, 40.0, 100.0])), max_size=15)


def play(made: HealthRig, name: str, change: tuple[str, object], wait_s: float) -> None:
    kind, value = change
    if kind == "reload":
        made.reload(name)
    elif kind == "restart":
        made.restart()
    else:
        setattr(made.workers[name], kind, value)
    made.wait(wait_s)


@settings(max_examples=60, deadline=None)
@given(stories, st.integers(1, 5), st.booleans())
def test_no_order_of_events_convicts_everybody(
    watched: None, story: list[tuple[int, tuple[str, object], float]], count: int, verified: bool
) -> None:
    """Of several sets of weights one at least is never convicted, nobody twice; and when all are mended and loaded
    afresh they have traffic."""
    names = "abcde"[:count]
    made = HealthRig({name: name for name in names}, verified=verified)
    made.begin(serving=True)
    for place, change, wait_s in story:
        play(made, names[place % count], change, wait_s)
    # Mended at once: a majority that still answers wrongly would hold its answers against the first that is right.
    made.workers = {name: Worker(worker.weights, worker.load) for name, worker in made.workers.items()}
    made.wait(200.0)
    for name in names:
        made.reload(name)
        made.wait(20.0)
    made.wait(600.0)
    assert {name: standing.weight for name, standing in made.standings.items()} == dict.fromkeys(names, 1.0)


@settings(max_examples=60, deadline=None)
@given(stories, st.sampled_from([(3, 1), (4, 1), (5, 2)]), st.booleans())
def test_where_most_are_right_nobody_who_is_right_is_convicted_and_who_is_wrong_is(
    watched: None, story: list[tuple[int, tuple[str, object], float]], sizes: tuple[int, int], verified: bool
) -> None:
    """Whatever a minority does, in any order; in the end one of it answers wrongly, and is quarantined."""
    count, bad = sizes
    names = "abcde"[:count]
    made = HealthRig({name: name for name in names}, verified=verified)
    made.begin(serving=True)
    for place, change, wait_s in story:
        play(made, names[place % bad], change, wait_s)
        assert made.quarantined() <= set(names[:bad])
    made.workers["a"] = replace(made.workers["a"], shift=7, how="answers", factor=1.0)
    made.wait(600.0)
    assert "a" in made.quarantined() <= set(names[:bad])
