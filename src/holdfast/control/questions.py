"""Generates the canary questions of a model: prompts of token ids that any engine of the model can answer.

Theory (facts 23). A question is good if a sound model is sure of every token of its answer, and if the answer needs all
of the model. A few random tokens, repeated, can have both properties: a model that read some rounds continues them, and
every layer takes part in finding the position. The number of tokens, the number of rounds and the part of the
vocabulary that work differ between models (for a model of 135 million weights a third of the questions are usable). So
there are many candidates of several shapes. `health.expectations` finds which lead by enough, and keeps a few.

Always true: the same card and vocabulary give the same questions in every process, because the expected answers are
stored; every id is below the vocabulary and not among its first or last, where an engine's special tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from holdfast.control.worker_health import WorkerFacts
from holdfast.discovery.card import ModelCard
from holdfast.health.expectations import CanaryAnswer, CanaryQuestion, Expectations, Key

COUNT = 32
# (tokens in a round, rounds)
SHAPES = ((3, 12), (8, 6), (4, 10), (2, 12))
# The ranges of ids, in shares of the vocabulary: small ids, which most vocabularies give to frequent tokens; and the
# middle half.
RANGES = ((1 / 48, 5 / 48), (1 / 4, 3 / 4))
TOKENS = 8
# For an engine that does not report its vocabulary size: none is smaller than the number of byte values.
VOCABULARY_MIN = 256


def questions_of(card: str, vocabulary: int) -> tuple[CanaryQuestion, ...]:
    """Return the questions for a model with this card's checksum and so many token ids; neighbours differ in kind."""
    return tuple(_question(card, place, max(vocabulary, VOCABULARY_MIN)) for place in range(COUNT))


def name_of_key(key: Key) -> str:
    """Return the name under which this key's expected answers are stored."""
    parts = (key.card, key.build, key.dtype, key.device, *((key.questions,) if key.questions else ()))
    return blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def known_of(card: ModelCard, checksum: str, vocabulary: int) -> tuple[tuple[CanaryQuestion, CanaryAnswer | None], ...]:
    """Return the card's questions with their expected answers, and after them the generated ones; an empty tuple if
    the card has none."""
    brought = [
        (
            CanaryQuestion(one.prompt, len(one.expected_tokens)),
            CanaryAnswer(one.expected_tokens, within=one.logprob_range),
        )
        for one in card.canary_prompts
    ]
    return (*brought, *((question, None) for question in questions_of(checksum, vocabulary))) if brought else ()


def expectations_of(key: Key, facts: Sequence[WorkerFacts]) -> Expectations:
    """Return the expectations of this key: over the card's questions if it has any, else over generated ones."""
    known = next((each.known for each in facts if each.known), ())
    given = {place: answer for place, (_, answer) in enumerate(known) if answer is not None}
    questions = [question for question, _ in known] or questions_of(key.card, max(each.vocabulary for each in facts))
    return Expectations(key, questions, given)


def _question(card: str, place: int, vocabulary: int) -> CanaryQuestion:
    length, rounds = SHAPES[place // len(RANGES) % len(SHAPES)]
    low, high = (int(share * vocabulary) for share in RANGES[place % len(RANGES)])
    sequence = [low + _draw(card, place, at) % (high - low) for at in range(length)]
    return CanaryQuestion(tuple(sequence * rounds), TOKENS)


def _draw(card: str, place: int, at: int) -> int:
    return int.from_bytes(blake2b(f"{card} {place} {at}".encode(), digest_size=8).digest())
