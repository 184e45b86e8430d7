"""vLLM's canary: which question an engine is asked, and how far its answer is from being another.

vLLM batches a canary with others, and sums in another order with them: where two tokens are almost as likely, the
answer may be either. So a question is looked for whose answer is clear: a few tokens that are repeated (facts 23: a
model that has read some rounds of them is sure of the next). The first whose tokens all lead by `TOLERANCE_NATS` is
taken; where there is none, as in a model of random weights, the clearest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec import structs

from holdfast.core.requests import CANARY_TIER, GenerateRequest, TokenLogprobs
from holdfast.engines.paged.blocks import blocks_for
from holdfast.engines.paged.canary import PROMPT_TOKENS, TOKENS, canary_request
from holdfast.engines.shadow.proving import TOLERANCE_NATS

ROUNDS = (1, 8, 6, 4, 3, 12, 2)  # how often the tokens of each question are repeated
TOP = 4  # likeliest tokens that are told: among them is the known one, where an answer rounds


def private_blocks(block_tokens: int) -> int:
    """Of one engine that stands by, for one question at a time."""
    return blocks_for(PROMPT_TOKENS + TOKENS + 1, block_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    number: int  # of the question
    request: GenerateRequest
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]

    @property
    def margin(self) -> float:
        """The least difference between the likeliest token's logprob and the next one's."""
        return min((each.top[0][1] - each.top[1][1] for each in self.logprobs if len(each.top) > 1), default=0.0)


def questions(vocabulary: int) -> Iterator[tuple[int, GenerateRequest]]:
    """Yield the candidates, all of one length, with the likeliest tokens asked for."""
    first = canary_request(vocabulary)
    sampling = structs.replace(first.sampling, top_logprobs=TOP)
    for number, rounds in enumerate(ROUNDS):
        repeated = [(token + 31 * number) % vocabulary for token in first.tokens[: PROMPT_TOKENS // rounds]]
        yield number, structs.replace(first, tokens=repeated * rounds, sampling=sampling, tier=CANARY_TIER)


def clearest(vocabulary: int, answer: Callable[[int, GenerateRequest], Answer]) -> Answer:
    """Ask until an answer is clear, and return the clearest."""
    best: Answer | None = None
    for number, request in questions(vocabulary):
        found = answer(number, request)
        if best is None or found.margin > best.margin:
            best = found
        if found.margin >= TOLERANCE_NATS:
            break
    assert best is not None, "there are questions"
    return best
