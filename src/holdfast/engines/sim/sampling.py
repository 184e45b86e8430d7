"""From candidate tokens and their logits to one drawn token: pure arithmetic, in the order vLLM does it.

Bias and bans first, then penalties, then temperature, then min_p, top_k, top_p, then the draw by inverse CDF. Always
true: with settings that change nothing the draw is `pick(cumulative(logits, temperature), u)`, which is what the
fast path of `language` computes ahead, so both give the same token.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping
from itertools import accumulate

from holdfast.core.requests import Sampling, TokenLogprobs

# A token that the language did not propose has this logit; proposals lie between 0.5 and 16.
FLOOR = -20.0

# Below this a temperature means "the likeliest" (vLLM's bound); dividing by less only overflows.
TEMPERATURE_MIN = 1e-5


def weights(logits: list[float], temperature: float) -> list[float]:
    """Unnormalised probabilities; the largest is 1."""
    top = max(logits)
    return [math.exp((logit - top) / temperature) for logit in logits]


def cumulative(logits: list[float], temperature: float) -> list[float]:
    return list(accumulate(weights(logits, temperature)))


def pick(sums: list[float], u: float) -> int:
    """The index that `u` of [0, 1) falls on. The upper bound matters: u * total may round up to the total."""
    return bisect_right(sums, u * sums[-1], 0, len(sums) - 1)


def is_plain(sampling: Sampling) -> bool:
    """Whether nothing but the temperature shapes the draw, and nothing but the token is asked for."""
    return (
        sampling.top_logprobs is None
        and not sampling.logit_bias
        and sampling.top_p >= 1.0
        and sampling.top_k <= 0
        and sampling.min_p <= 0.0
        and not has_penalties(sampling)
    )


def has_penalties(sampling: Sampling) -> bool:
    return sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0 or sampling.repetition_penalty != 1.0


def penalised(
    logits: Mapping[int, float], sampling: Sampling, counts: Mapping[int, int], seen: Collection[int]
) -> dict[int, float]:
    """Logits after the penalties: `counts` is of generated tokens, `seen` is prompt and generated ones."""
    result = {}
    for token, value in logits.items():
        logit = value
        if token in seen:
            factor = sampling.repetition_penalty
            logit = logit / factor if logit > 0 else logit * factor
        count = counts.get(token, 0)
        if count:
            logit -= sampling.presence_penalty + sampling.frequency_penalty * count
        result[token] = logit
    return result


def draw(logits: Mapping[int, float], sampling: Sampling, u: float) -> int:
    """One token of `logits`; equal logits keep the order they are given in."""
    ranked = sorted(logits.items(), key=lambda item: -item[1])
    if sampling.temperature < TEMPERATURE_MIN:
        return ranked[0][0]
    mass = weights([logit for _, logit in ranked], sampling.temperature)
    return ranked[pick(list(accumulate(mass[: _kept(mass, sampling)])), u)][0]


def _kept(mass: list[float], sampling: Sampling) -> int:
    """How many of the likeliest survive min_p, top_k and top_p; at least one."""
    kept = len(mass)
    if sampling.min_p > 0.0:
        kept = max(1, sum(weight >= sampling.min_p * mass[0] for weight in mass))
    if 0 < sampling.top_k < kept:
        kept = sampling.top_k
    if sampling.top_p < 1.0:
        sums = list(accumulate(mass[:kept]))
        kept = min(kept, 1 + sum(total < sampling.top_p * sums[-1] for total in sums))
    return kept


def logprobs(logits: Mapping[int, float], token: int, top: int, drift: float) -> TokenLogprobs:
    """Of the language itself, before bias, penalties and temperature (vLLM's `raw_logprobs`).

    `drift` is a fault: every logprob comes out lower by it, as from decayed weights, while the tokens stay right.
    """
    peak = max(logits.values())
    norm = peak + math.log(sum(math.exp(logit - peak) for logit in logits.values()))
    ranked = sorted(logits.items(), key=lambda item: -item[1])[: max(0, top)]
    listed = [(each, logit - norm - drift) for each, logit in ranked]
    return TokenLogprobs(logits.get(token, FLOOR) - norm - drift, listed)
