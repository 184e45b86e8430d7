"""The known questions of a model: token ids that any engine of it can be asked, and that no person must choose.

Theory (facts 23). A question is good if a sound model is sure of its answer, token after token, and if the answer needs
all of the model. A few random tokens, repeated, can have both: whoever read some rounds continues them, and every layer
takes part in finding the place. How many tokens, how many rounds and which part of a vocabulary a model is sure of
differs from one to the next (of a model of 135 million weights a third are good for something), so there are many
candidates of several shapes; which of them lead by enough is found when they are learnt, and a few are kept
(`health.expectations`).

Always true: the same card and vocabulary give the same questions, in every process, because what is expected of them is
written down; every id is below the vocabulary, and not among the first or last of it, where the tokens are that mean
something to an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from holdfast.control.ward import WorkerFacts
from holdfast.discovery.card import ModelCard
from holdfast.health.expectations import Answer, Expectations, Key, Question

COUNT = 32
# Tokens that are repeated, and how often.
SHAPES = ((3, 12), (8, 6), (4, 10), (2, 12))
# Where they are from, in shares of the vocabulary: frequent tokens have small ids in most; and its middle half.
RANGES = ((1 / 48, 5 / 48), (1 / 4, 3 / 4))
TOKENS = 8
# Of an engine that does not say: no vocabulary is smaller than the bytes.
VOCABULARY_MIN = 256


def questions_of(card: str, vocabulary: int) -> tuple[Question, ...]:
    """The questions for a model of this card's checksum, with so many token ids; neighbours are of different kinds."""
    return tuple(_question(card, place, max(vocabulary, VOCABULARY_MIN)) for place in range(COUNT))


def name_of_key(key: Key) -> str:
    """What answers are expected of this key is written down under that name."""
    parts = (key.card, key.build, key.dtype, key.device, *((key.questions,) if key.questions else ()))
    return blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def known_of(card: ModelCard, checksum: str, vocabulary: int) -> tuple[tuple[Question, Answer | None], ...]:
    """Return the questions that a card brings, with what it expects, and after them the made-up ones; none where the
    card brings none."""
    brought = [
        (Question(one.prompt, len(one.expected_tokens)), Answer(one.expected_tokens, within=one.logprob_range))
        for one in card.canary_prompts
    ]
    return (*brought, *((question, None) for question in questions_of(checksum, vocabulary))) if brought else ()


def expectations_of(key: Key, facts: Sequence[WorkerFacts]) -> Expectations:
    """What the card brings is asked, before what is made up for its vocabulary."""
    known = next((each.known for each in facts if each.known), ())
    given = {place: answer for place, (_, answer) in enumerate(known) if answer is not None}
    questions = [question for question, _ in known] or questions_of(key.card, max(each.vocabulary for each in facts))
    return Expectations(key, questions, given)


def _question(card: str, place: int, vocabulary: int) -> Question:
    length, rounds = SHAPES[place // len(RANGES) % len(SHAPES)]
    low, high = (int(share * vocabulary) for share in RANGES[place % len(RANGES)])
    sequence = [low + _draw(card, place, at) % (high - low) for at in range(length)]
    return Question(tuple(sequence * rounds), TOKENS)


def _draw(card: str, place: int, at: int) -> int:
    return int.from_bytes(blake2b(f"{card} {place} {at}".encode(), digest_size=8).digest())
