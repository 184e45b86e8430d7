"""What a request must be for a paged engine to take it: whatever is wrong is named before anything changes. Pure."""

from __future__ import annotations

from array import array
from typing import Protocol

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import GenerateRequest
from holdfast.engines.paged.blocks import blocks_for
from holdfast.engines.paged.settings import SchedulerSettings


class Room(Protocol):
    """How much KV a stream alone can have."""

    @property
    def count(self) -> int:
        """Blocks."""

    @property
    def block_tokens(self) -> int: ...


def check(request: GenerateRequest, settings: SchedulerSettings, blocks: Room) -> None:
    """HoldfastError for a request that no engine of these sizes can answer."""
    tokens, prompt_len = request.tokens, request.prompt_len
    if not tokens:
        raise invalid("tokens must not be empty")
    if not 1 <= prompt_len <= len(tokens):
        raise invalid(f"prompt_len must be 1 to the {len(tokens)} tokens given, got {prompt_len}")
    if prompt_len > settings.context_tokens_max:
        raise invalid(f"tokens: a prompt of {prompt_len} is over {settings.context_tokens_max}")
    if not request.sampling.repetition_penalty > 0:
        raise invalid(f"repetition_penalty must be over 0, got {request.sampling.repetition_penalty}")
    size = settings.vocabulary
    if any(not 0 <= token < size for token in request.sampling.logit_bias or ()):
        raise invalid(f"logit_bias has token ids outside 0 to {size - 1}")
    count, block_tokens = blocks.count, blocks.block_tokens
    if blocks_for(prompt_len + 1, block_tokens) > count:
        raise invalid(f"tokens: a prompt of {prompt_len} can never fit into {count} KV blocks of {block_tokens}")
    try:
        array("I", tokens)
        known = max(tokens) < size
    except OverflowError:  # a negative id, found while packing them: cheaper than a min() over a long prompt
        known = False
    if not known:
        raise invalid(f"tokens has ids outside 0 to {size - 1}")


def end_of(request: GenerateRequest, settings: SchedulerSettings, blocks: Room) -> int:
    """The length at which its text ends with "length"; one that has it already has nothing left to make."""
    end = min(request.prompt_len + request.sampling.max_tokens, settings.context_tokens_max)
    return min(end, blocks.count * blocks.block_tokens)


def invalid(message: str) -> HoldfastError:
    return HoldfastError(Code.INVALID_REQUEST, message)
