"""What a request's sampling settings ask for, so that rows pay for nothing else. Pure."""

from __future__ import annotations

from holdfast.core.requests import Sampling

# Below this a temperature means "the likeliest" (vLLM's bound); dividing by less only overflows.
TEMPERATURE_MIN = 1e-5


def is_greedy(sampling: Sampling) -> bool:
    """The likeliest token is taken."""
    return not sampling.temperature >= TEMPERATURE_MIN


def truncates(sampling: Sampling, vocabulary: int) -> bool:
    """Some tokens cannot be drawn (truncation.py)."""
    return 0 < sampling.top_k < vocabulary or sampling.top_p < 1.0 or sampling.min_p > 0.0


def has_nudges(sampling: Sampling) -> bool:
    """Single tokens are biased or banned (penalties.py)."""
    return bool(sampling.logit_bias) or sampling.min_tokens > 0


def has_penalties(sampling: Sampling) -> bool:
    """Tokens that are in the text already are less likely, or more (penalties.py)."""
    return sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0 or sampling.repetition_penalty != 1.0
