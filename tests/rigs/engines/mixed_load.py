"""Mixed load for a real model: one request per client, always the same, so that every answer can be compared.

Greedy and drawn at temperature 0.8, chat and raw, short prompts and long ones. The pool is just large enough: with
every stream at its end it would be as full as asked, so most of what is cached is evicted again, and a stream that is
resumed finds its blocks only if no stream before it takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.testing.clients import chat_body

# One sentence of what is asked, in tokens of the tiny model's words, with room to spare for the numbers in it.
SENTENCE = "Tell me more of the sea and the wind, of day {} and night {}."
SENTENCE_TOKENS = 22
BLOCK_TOKENS = 16  # of every engine's KV by default
TEMPLATE_TOKENS = 16  # what a chat's template adds, at most
LONG_TOKENS, SHORT_TOKENS = 1000, 40  # of prompts
FIRST_ID, IDS = 1000, 4000  # plain words in every model's vocabulary
FULL_SHARE = 0.95  # of the pool, with every stream at its end


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One request per client. Every fifth prompt is long; of the others each fourth in turn is of one kind."""

    streams: int = 12
    tokens: int = 150
    seed: int = 1

    def body(self, number: int) -> tuple[str, dict[str, Any]]:
        length = self.prompt_tokens(number)
        more: dict[str, Any] = {
            "model": "tiny",
            "seed": self.seed * 1000 + number,
            "temperature": 0.8 if number % 2 else 0,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        if number // 2 % 2:
            body = chat_body("", self.tokens, **more)
            del body["messages"]
            return "/v1/completions", body | {"prompt": self.ids(number, length)}
        count = max(1, (length - TEMPLATE_TOKENS) // SENTENCE_TOKENS)
        words = " ".join(SENTENCE.format(number, place) for place in range(count))
        return "/v1/chat/completions", chat_body(words, self.tokens, **more)

    def prompt_tokens(self, number: int) -> int:
        """Return about how many, and at most that."""
        return LONG_TOKENS if number % 5 == 4 else SHORT_TOKENS

    def ids(self, number: int, length: int) -> list[int]:
        """No two numbers or seeds share a first block."""
        start = self.seed * 7919 + number * 613
        return [FIRST_ID + (start + place * (place + 97)) % IDS for place in range(length)]

    def blocks(self) -> int:
        """What all streams hold just before their ends."""
        lengths = [self.prompt_tokens(number) + self.tokens for number in range(self.streams)]
        return sum(-(-length // BLOCK_TOKENS) for length in lengths)

    def pool_blocks(self, full_share: float = FULL_SHARE) -> int:
        return round(self.blocks() / full_share)
