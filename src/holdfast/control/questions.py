"""The known questions of a model: token ids that any engine of it can be asked, and that no person must choose.

Theory (facts 23). A question is good if a sound model is sure of its answer, token after token, and if the answer needs
all of the model. A sequence of random tokens, repeated, has both: whoever reads the third round continues it from the
first two, with a large lead, and every layer takes part in finding the place. Those whose lead is too small are found
out when they are learnt, and asked no more (`health.expectations`).

Always true: the same card and vocabulary give the same questions, in every process, because what is expected of them is
written down; every id is below the vocabulary, and not among the first or last of it, where the tokens
are that mean something to an engine.
"""

from __future__ import annotations

from hashlib import blake2b

from holdfast.health.expectations import Question

COUNT = 4  # each sees other rows of the weights; all are learnt of every set within the first minute
SEQUENCE = 12  # tokens that are repeated
ROUNDS = 3  # two to learn from; in the third its answer begins
TOKENS = 8
# Of an engine that does not say: no vocabulary is smaller than the bytes.
VOCABULARY_MIN = 256


def questions_of(card: str, vocabulary: int) -> tuple[Question, ...]:
    """The questions for a model of this card's checksum, with so many token ids."""
    return tuple(_question(card, place, max(vocabulary, VOCABULARY_MIN)) for place in range(COUNT))


def _question(card: str, place: int, vocabulary: int) -> Question:
    # The middle half: special tokens stand at either end.
    first, span = vocabulary // 4, vocabulary // 2
    sequence = [first + _draw(card, place, at) % span for at in range(SEQUENCE)]
    prompt = sequence * (ROUNDS - 1) + sequence[: SEQUENCE - TOKENS]
    return Question(tuple(prompt), TOKENS)


def _draw(card: str, place: int, at: int) -> int:
    return int.from_bytes(blake2b(f"{card} {place} {at}".encode(), digest_size=8).digest())
