"""Chooses vLLM's canary: a question whose answer is clear.

vLLM batches a canary with other requests, which changes the order of sums: if two tokens are almost equally likely, the
answer may be either. So the question is a few repeated tokens (facts 23: after some rounds a model is sure of the next
one). The first question is chosen whose answer's tokens all lead by `TOLERANCE_NATS`. If there is none, as with random
weights, the clearest one is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec import structs

from holdfast.core.requests import CANARY_TIER, GenerateRequest, TokenLogprobs
from holdfast.engines.host.proving import TOLERANCE_NATS
from holdfast.engines.paged.blocks import blocks_for
from holdfast.engines.paged.canary import PROMPT_TOKENS, TOKENS, canary_request

ROUNDS = (1, 8, 6, 4, 3, 12, 2)  # how often the tokens of each question are repeated
TOP = 4  # likeliest tokens to report: if an answer rounds differently, the known token is among them


def private_blocks(block_tokens: int) -> int:
    """Return the number of private blocks of one standby, enough for one question at a time."""
    return blocks_for(PROMPT_TOKENS + TOKENS + 1, block_tokens)


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    number: int  # of the question
    request: GenerateRequest
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]

    @property
    def margin(self) -> float:
        """Return the smallest difference between the likeliest token's logprob and the next one's."""
        return min((each.top[0][1] - each.top[1][1] for each in self.logprobs if len(each.top) > 1), default=0.0)


def questions(vocabulary: int) -> Iterator[tuple[int, GenerateRequest]]:
    """Yield the candidate questions, all of one length, which ask for the likeliest tokens."""
    first = canary_request(vocabulary)
    sampling = structs.replace(first.sampling, top_logprobs=TOP)
    for number, rounds in enumerate(ROUNDS):
        repeated = [(token + 31 * number) % vocabulary for token in first.tokens[: PROMPT_TOKENS // rounds]]
        yield number, structs.replace(first, tokens=repeated * rounds, sampling=sampling, tier=CANARY_TIER)


def clearest(vocabulary: int, answer: Callable[[int, GenerateRequest], AnsweredQuestion]) -> AnsweredQuestion:
    """Ask questions until an answer is clear; return the clearest."""
    best: AnsweredQuestion | None = None
    for number, request in questions(vocabulary):
        found = answer(number, request)
        if best is None or found.margin > best.margin:
            best = found
        if found.margin >= TOLERANCE_NATS:
            break
    assert best is not None, "there are questions"
    return best
