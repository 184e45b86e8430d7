"""vLLM's canary: which question an engine is asked, and how far its answer is from being another.

vLLM batches a canary with others, and sums in another order with them: where two tokens are almost as likely, the
answer may be either. So of some questions that one is taken whose answer is the clearest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import structs

from holdfast.core.requests import CANARY_TIER, GenerateRequest
from holdfast.engines.paged.blocks import blocks_for
from holdfast.engines.paged.canary import PROMPT_TOKENS, TOKENS, canary_request

QUESTIONS = 4


def private_blocks(block_tokens: int) -> int:
    """Of one engine that stands by, for one question at a time."""
    return blocks_for(PROMPT_TOKENS + TOKENS + 1, block_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    number: int  # of the question
    request: GenerateRequest
    tokens: tuple[int, ...]
    margin: float  # the least difference between the likeliest token's logprob and the next one's


def questions(vocabulary: int) -> Iterator[tuple[int, GenerateRequest]]:
    """With the two likeliest tokens asked for."""
    first = canary_request(vocabulary)
    sampling = structs.replace(first.sampling, top_logprobs=2)
    for number in range(QUESTIONS):
        tokens = [(token + 31 * number) % vocabulary for token in first.tokens]
        yield number, structs.replace(first, tokens=tokens, sampling=sampling, tier=CANARY_TIER)


def clearest(answers: list[Answer]) -> Answer:
    return max(answers, key=lambda answer: answer.margin)
