"""Questions that a model's card brings: judged by tokens and a range of logprobs, and never believed against most
workers."""

from __future__ import annotations

import pytest

from holdfast.control.health_controller import NoticeKind
from holdfast.control.questions import COUNT, known_of, name_of_key
from holdfast.discovery.card import CardCanary, ModelCard, WeightsIdentity
from holdfast.health import expectations as x
from tests.rigs.worlds.health import KEY, HealthRig, answer

# Without logprobs of its own, as a card has it; the first token of `worlds.health.answer` has a logprob of -0.1.
RIGHT = x.CanaryAnswer(answer(0).tokens, within=(-0.5, 0.0))


def states(made: HealthRig) -> list[tuple[str, str]]:
    return [(entry.state, entry.why) for entry in made.expectations.entries]


def test_a_right_question_is_judged_by_from_the_first_check() -> None:
    """One of three answers another token: it is accused by the card's word, and the others confirm it."""
    made = HealthRig({"a": "a", "b": "b", "c": "c"}, given={0: RIGHT})
    made.workers["a"].shift = 1
    made.begin()
    made.wait(20.0)
    assert made.quarantined() == {"a"}
    assert states(made)[0] == ("pinned", "given with the card")


def test_a_logprob_out_of_the_range_is_wrong() -> None:
    """The same tokens with other probabilities: found where most are within the range, by more than a batch moves."""
    made = HealthRig({"a": "a", "b": "b", "c": "c"}, given={0: RIGHT})
    made.workers["a"].drift = 2.0
    made.workers["a"].only = 0
    made.begin()
    made.wait(20.0)
    assert made.quarantined() == {"a"}
    assert any("expected -0.5 to 0" in error.reason for error in made.record("a").errors)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("wrong", [x.CanaryAnswer((7, 7, 7, 7)), x.CanaryAnswer(answer(0).tokens, within=(-9.0, -8.0))])
def test_an_expectation_that_all_differ_from_is_withdrawn_and_told(workers: int, wrong: x.CanaryAnswer) -> None:
    """By one worker alone too: none is taken away, and it stays withdrawn for the next control."""
    made = HealthRig({name: name for name in "abc"[:workers]}, given={0: wrong})
    made.begin()
    made.wait(60.0)
    assert made.quarantined() == set()
    assert all(standing.weight == 1.0 and not standing.fall for standing in made.standings.values())
    (told,) = made.told(NoticeKind.WITHDRAWN)
    assert "what question 0 expects (given with the card) is withdrawn" in told
    assert made.expectations.entries[0].refuted
    made.restart()
    made.wait(60.0)
    assert len(made.told(NoticeKind.WITHDRAWN)) == 1
    assert made.quarantined() == set()


def test_a_question_that_no_worker_leads_in_is_dropped() -> None:
    """Its answer would hang by a thread in a busy batch: a worker that tips to the other token is not accused."""
    made = HealthRig({"a": "a", "b": "b", "c": "c"}, given={0: RIGHT})
    for worker in made.workers.values():
        worker.margin = 0.3
    made.workers["c"].shift = 1  # the second candidate of the others
    made.begin()
    made.wait(60.0)
    assert made.quarantined() == set()
    assert states(made)[0] == ("unfit", "its margins are too small")
    assert any("which the card brings" in told for told in made.told(NoticeKind.WITHDRAWN))


def test_a_cards_questions_come_before_the_made_up_ones() -> None:
    """And other ones are kept under another name; a card without any is asked what it was asked before."""
    card = ModelCard("m", WeightsIdentity("r"), "t", "c", 4096, 16, [1])
    assert known_of(card, card.checksum(), 1000) == ()
    brings = (CardCanary((1, 2), (3,), (-1.0, 0.0)),)
    known = known_of(ModelCard(**{**_fields(card), "canary_prompts": brings}), card.checksum(), 1000)
    assert known[0] == (x.CanaryQuestion((1, 2), 1), x.CanaryAnswer((3,), within=(-1.0, 0.0)))
    assert len(known) == 1 + COUNT
    assert {expected for _, expected in known[1:]} == {None}
    names = {name_of_key(KEY), name_of_key(x.Key(*_key(), "other"))}
    assert len(names) == 2


def _fields(card: ModelCard) -> dict[str, object]:
    return {name: getattr(card, name) for name in card.__struct_fields__}


def _key() -> tuple[str, str, str, str]:
    return KEY.card, KEY.build, KEY.dtype, KEY.device
