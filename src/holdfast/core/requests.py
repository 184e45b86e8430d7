"""What an engine is asked and what it answers, in token ids only.

These types cross process borders, so they are msgspec structs laid out as arrays. A request is complete in
itself: replaying it anywhere gives the stream's next tokens (idea 2), because sampling depends on
(seed, position) and the tokens so far, never on what an engine remembers.
"""

from __future__ import annotations

import msgspec

from holdfast.core.tiers import TIER_DEFAULT

SEED_MAX = 2**63 - 1
# A known question's own tier: it is taken ahead of all others, and when they have every place. One at a time.
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
    """Why a stream ended badly: a name from `core.errors.Code` and a sentence."""

    code: str
    message: str


class Output(msgspec.Struct, array_like=True):
    """What one step made for one stream. With `finish` or `failure` set it is that stream's last."""

    stream: int
    tokens: list[int]
    finish: str | None = None  # "stop" or "length"
    logprobs: list[TokenLogprobs] | None = None  # one per token
    failure: Failure | None = None
    cached: int = 0  # in a request's first output: tokens of its text whose KV was found
