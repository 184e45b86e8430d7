"""Requests to an engine and its outputs, in token ids only.

These types are sent between processes, so they are msgspec structs laid out as arrays. A request is complete: any
engine can replay it to get the stream's next tokens, because sampling depends only on (seed, position) and the tokens
so far, never on an engine's state.
"""

from __future__ import annotations

import msgspec

from holdfast.core.tiers import TIER_DEFAULT

SEED_MAX = 2**63 - 1
# Below this a temperature means greedy sampling (vLLM's bound); dividing by less would overflow.
TEMPERATURE_MIN = 1e-5
# The tier of canaries: served before all others, even if all places are taken. One at a time.
CANARY_TIER = -1


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is drawn. `max_tokens` and `min_tokens` count from the prompt's end."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    top_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only
    min_tokens: int = 0
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        """Return whether the likeliest token is always chosen."""
        return not self.temperature >= TEMPERATURE_MIN

    @property
    def has_penalties(self) -> bool:
        """Return whether tokens already in the text become less or more likely."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def has_token_rules(self) -> bool:
        """Return whether single tokens are biased or banned."""
        return bool(self.logit_bias) or self.min_tokens > 0

    def truncates(self, vocabulary: int) -> bool:
        """Return True if some tokens cannot be drawn: top_k, top_p or min_p leaves them out."""
        return 0 < self.top_k < vocabulary or self.top_p < 1.0 or self.min_p > 0.0


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True):
    """`tokens[:prompt_len]` is the prompt; the rest was generated before and has been shown to the client."""

    request_id: str
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    stop_token_ids: list[int] = []
    tier: int = TIER_DEFAULT  # a `core.tiers.Tier`: a queue serves smaller ones first


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token's logprob, and the most likely alternatives, best first, as (token id, logprob)."""

    logprob: float
    top: list[tuple[int, float]] = []


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The reason why a stream has failed: a name from `core.errors.Code` and a sentence."""

    code: str
    message: str


class Output(msgspec.Struct, array_like=True):
    """The output of one step for one stream. With `finish` or `failure` set it is the stream's last."""

    stream: int
    tokens: list[int]
    finish: str | None = None  # "stop" or "length"
    logprobs: list[TokenLogprobs] | None = None  # one per token
    failure: Failure | None = None
    cached: int = 0  # in a request's first output: number of its tokens whose KV was found
