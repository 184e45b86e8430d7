"""One shape for a chat or a completions request, whatever the client's JSON looked like.

Always true: every value is of its type and in its range; what the client did not say (or said as null) is None, so
that the model's own defaults can still apply; counts and lengths are bounded.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import msgspec


class Usage(Enum):
    """When a stream tells how many tokens it took."""

    NEVER = 0
    LAST = 1  # in a chunk of its own at the end
    ALWAYS = 2  # in every chunk too, for its choice so far


# Choices of one request: each is a stream of its own on an engine; OpenAI's own bound on `n`.
CHOICES_MAX = 128

ID_BYTES = 40
MESSAGE_BYTES = 400


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`messages` for chat, `prompts` for completions; the other is empty."""

    kind: Literal["chat", "completion"]
    model: str
    messages: list[dict[str, Any]] = []
    prompts: list[str | list[int]] = []

    n: int = 1
    stream: bool = False
    usage: Usage = Usage.NEVER
    return_token_ids: bool = False

    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False

    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"  # the name the client used, for refusals
    min_tokens: int | None = None
    seed: int | None = None  # folded into 0..2**63-1; None: one is drawn at admission
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0: off
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    top_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only

    def held_bytes(self, body_bytes: int) -> int:
        """What it takes in memory at most, parsed from a body of that size. Text may take twice its bytes, an id a
        pointer and an int, a message a dict with its strings."""
        ids = sum(len(prompt) for prompt in self.prompts if isinstance(prompt, list))
        return 2 * body_bytes + ID_BYTES * ids + MESSAGE_BYTES * len(self.messages)
