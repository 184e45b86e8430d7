"""One shape for a chat or a completions request, whatever the client's JSON looked like.

Always true: every value has its type and is in its range; a value that the client did not give (or gave as null) is
None, so that the model's defaults can apply; counts and lengths are bounded.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import msgspec


class Usage(Enum):
    """When a stream reports its token counts."""

    NEVER = 0
    LAST = 1  # in a separate chunk at the end
    ALWAYS = 2  # in every chunk too, for its choice so far


# Choices of one request, each of which is a stream on an engine; OpenAI's bound on `n`.
CHOICES_MAX = 128

ID_BYTES = 40
MESSAGE_BYTES = 400


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A normalised request: chat has `messages`, completions have `prompts`; the other is empty."""

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

    @property
    def source(self) -> str:
        """Return the field that its prompt comes from, for refusals."""
        return "messages" if self.kind == "chat" else "prompt"

    def held_bytes(self, body_bytes: int) -> int:
        """Return an upper bound on its memory, parsed from a body of that size: twice the body's bytes for text, a
        pointer and an int for each id, a dict with strings for each message."""
        ids = sum(len(prompt) for prompt in self.prompts if isinstance(prompt, list))
        return 2 * body_bytes + ID_BYTES * ids + MESSAGE_BYTES * len(self.messages)
