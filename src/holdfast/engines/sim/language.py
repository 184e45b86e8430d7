"""Defines the sim engine's language: the next token is a function of all tokens so far, the seed and the sampling.

A hash runs over the tokens. Its digest at a position names 20 candidates: words at a + i*b modulo a prime (so all
differ), one of which may give way to a punctuation mark or to the first byte of a character; now and then the end of
the turn stands before them. Inside an unfinished character the candidates are the tokens that go on with it, so the
text is always UTF-8. Logits depend on the rank alone, so a plain draw needs only a rank from a table made ahead, and
one candidate. The seed and the position turn the digest's last part into the draw's number. A draw works in vLLM's
order: bias and bans, penalties, temperature, min_p, top_k, top_p, then inverse CDF.

Always true: replaying prompt + emitted tokens gives the continuation of the unbroken run, whatever the sampling; the
fast path gives the token of the general path, because with settings that change nothing the draw is
`pick(cumulative(logits, temperature), u)`, which the fast path computes ahead.
"""

from __future__ import annotations

import math
import struct
from array import array
from bisect import bisect_right
from collections.abc import Collection, Mapping
from hashlib import blake2b
from itertools import accumulate

from holdfast.core.requests import Sampling, TokenLogprobs
from holdfast.engines.sim.vocabulary import EOS_TOKEN_ID, CharacterNode, Vocabulary

# A token that the language did not propose has this logit; proposals lie between 0.5 and 16.
FLOOR = -20.0


def weights(logits: list[float], temperature: float) -> list[float]:
    """Return unnormalised probabilities; the largest is 1."""
    top = max(logits)
    return [math.exp((logit - top) / temperature) for logit in logits]


def cumulative(logits: list[float], temperature: float) -> list[float]:
    return list(accumulate(weights(logits, temperature)))


def pick(sums: list[float], u: float) -> int:
    """Return the index that `u` of [0, 1) falls on. The upper bound matters: u * total may round up to the total."""
    return bisect_right(sums, u * sums[-1], 0, len(sums) - 1)


def is_plain(sampling: Sampling) -> bool:
    """Return True if nothing but the temperature shapes the draw, and nothing but the token is asked for."""
    return (
        sampling.top_logprobs is None
        and not sampling.logit_bias
        and sampling.top_p >= 1.0
        and sampling.top_k <= 0
        and sampling.min_p <= 0.0
        and not sampling.has_penalties
    )


def penalised(
    logits: Mapping[int, float], sampling: Sampling, counts: Mapping[int, int], seen: Collection[int]
) -> dict[int, float]:
    """Return the logits after the penalties: `counts` is of generated tokens, `seen` is prompt and generated ones."""
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
    """Draw one token of `logits`; equal logits keep the order they are given in."""
    ranked = sorted(logits.items(), key=lambda item: -item[1])
    if sampling.is_greedy:
        return ranked[0][0]
    mass = weights([logit for _, logit in ranked], sampling.temperature)
    return ranked[pick(list(accumulate(mass[: _kept(mass, sampling)])), u)][0]


def _kept(mass: list[float], sampling: Sampling) -> int:
    """Return how many of the likeliest survive min_p, top_k and top_p; at least one."""
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
    """Return logprobs of the language itself, before bias, penalties and temperature (vLLM's `raw_logprobs`).

    `drift` is a fault: every logprob comes out lower by it, as from decayed weights, while the tokens stay right.
    """
    peak = max(logits.values())
    norm = peak + math.log(sum(math.exp(logit - peak) for logit in logits.values()))
    ranked = sorted(logits.items(), key=lambda item: -item[1])[: max(0, top)]
    listed = [(each, logit - norm - drift) for each, logit in ranked]
    return TokenLogprobs(logits.get(token, FLOOR) - norm - drift, listed)


CANDIDATES = 20
LOGITS = [10.0 - 0.5 * rank for rank in range(CANDIDATES)]  # the likeliest has 0.39 at temperature 1
EOS_LOGITS = [16.0, *LOGITS[:-1]]  # far enough ahead to be drawn 99 times of 100
EOS_BELOW = 2**32 // 200  # a turn has about 200 tokens
PUNCTUATION_OF_256 = 60
CHARACTER_OF_256 = 16
SPECIAL_RANKS = (0, 0, 1, 2)  # where a mark or character stands among the candidates, evenly
NEVER = 2**62  # a position no text reaches

_parts = struct.Struct("<IIIIQ")
_token_bytes = struct.Struct("<I").pack
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # spreads consecutive positions over 64 bits
_ODD = 0xD6E8FEB86659FD93  # spreads every bit of seed and digest to the top ones, which decide


class Sequence:
    """A text being continued: it keeps a hash and counts, not the tokens."""

    __slots__ = (
        "_banned",
        "_counts",
        "_eos_from",
        "_eos_sums",
        "_hasher",
        "_key",
        "_min_until",
        "_node",
        "_plain",
        "_sampling",
        "_seen",
        "_starts",
        "_sums",
        "_vocabulary",
        "length",
        "logprobs",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        tokens: list[int] | array[int],
        prompt_len: int,
        sampling: Sampling,
        stop_token_ids: list[int] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._starts = vocabulary.root.children
        self._sampling = sampling
        self.length = len(tokens)
        self.logprobs: TokenLogprobs | None = None  # of the last token, where asked for
        # One update for the whole prompt: at 30k tokens a loop would cost milliseconds.
        self._hasher = blake2b(array("I", tokens), digest_size=_parts.size, person=vocabulary.person)
        self._node: CharacterNode | None = vocabulary.tail(tokens)
        self._key = int.from_bytes(blake2b(str(sampling.seed).encode(), digest_size=8).digest(), "little")
        self._min_until = prompt_len + sampling.min_tokens
        self._eos_from = NEVER if sampling.ignore_eos else self._min_until
        self._banned = frozenset(stop_token_ids or ()) if sampling.min_tokens > 0 else frozenset()
        self._plain = is_plain(sampling) and not self._banned
        self._sums: list[float] | None = None  # None: take the likeliest
        self._eos_sums: list[float] | None = None
        if not sampling.is_greedy:
            self._sums = cumulative(LOGITS, sampling.temperature)
            self._eos_sums = cumulative(EOS_LOGITS, sampling.temperature)
        self._counts: dict[int, int] = {}
        self._seen: set[int] = set()
        if sampling.has_penalties:
            self._seen.update(tokens)
            for token in tokens[prompt_len:]:
                self._counts[token] = self._counts.get(token, 0) + 1

    def advance(self, *, wrong: bool = False, drift: float = 0.0) -> int:
        """Draw the next token and take it up. `wrong` and `drift` are faults: another word, moved logprobs."""
        node = self._node
        token = self._draw_plain() if node is None and self._plain else self._draw_general(node, drift)
        if wrong:
            words = self._vocabulary.words
            at = token * 7 + self.length
            other = words[at % len(words)]
            token = other if other != token else words[(at + 1) % len(words)]
        self._hasher.update(_token_bytes(token))
        self.length += 1
        self._node = (node.children.get(token) if node is not None else None) or self._starts.get(token)
        if self._seen:
            self._seen.add(token)
            self._counts[token] = self._counts.get(token, 0) + 1
        return token

    def _draw_plain(self) -> int:
        """Draw when only the temperature matters: a rank from a table, then that one candidate."""
        first, step, ending, special, chance = _parts.unpack(self._hasher.digest())
        sums = self._sums
        ends = ending < EOS_BELOW and self.length >= self._eos_from
        rank = 0
        if sums is not None:
            if ends:
                assert self._eos_sums is not None
                sums = self._eos_sums
            # Written out as in `pick` and `_uniform`: the two calls would be a third of the time.
            u = (((chance ^ self._key) * _ODD + self.length * _GOLDEN & _MASK) >> 11) * 2.0**-53
            rank = bisect_right(sums, u * sums[-1], 0, CANDIDATES - 1)
        if ends:
            if rank == 0:
                return EOS_TOKEN_ID
            rank -= 1
        if special & 0xFF < PUNCTUATION_OF_256 + CHARACTER_OF_256 and rank == SPECIAL_RANKS[special >> 8 & 3]:
            return self._special(special)
        words = self._vocabulary.words
        count = len(words)
        word: int = words[(first + rank * (1 + step % (count - 1))) % count]
        return word

    def _draw_general(self, node: CharacterNode | None, drift: float) -> int:
        """Draw with all settings: from the same candidates, written out with their logits."""
        first, step, ending, special, chance = _parts.unpack(self._hasher.digest())
        sampling = self._sampling
        if node is not None:
            count = len(node.choices)
            raw = {node.choices[(first + rank) % count]: LOGITS[rank] for rank in range(count)}
            logits = self._biased(raw, additions=False)
        else:
            raw = self._candidates(first, step, ending, special)
            allowed = raw
            if self._banned and self.length < self._min_until:
                allowed = {token: logit for token, logit in raw.items() if token not in self._banned} or raw
            logits = self._biased(allowed, additions=True)
        if self._seen:
            logits = penalised(logits, sampling, self._counts, self._seen)
        token = draw(logits, sampling, self._uniform(chance))
        if sampling.top_logprobs is not None:
            self.logprobs = logprobs(raw, token, sampling.top_logprobs, drift)
        return token

    def _candidates(self, first: int, step: int, ending: int, special: int) -> dict[int, float]:
        words = self._vocabulary.words
        count = len(words)
        stride = 1 + step % (count - 1)
        tokens = [words[(first + rank * stride) % count] for rank in range(CANDIDATES)]
        if special & 0xFF < PUNCTUATION_OF_256 + CHARACTER_OF_256:
            tokens[SPECIAL_RANKS[special >> 8 & 3]] = self._special(special)
        if ending < EOS_BELOW and self.length >= self._eos_from:
            return dict(zip([EOS_TOKEN_ID, *tokens[:-1]], EOS_LOGITS, strict=True))
        return dict(zip(tokens, LOGITS, strict=True))

    def _special(self, special: int) -> int:
        if special & 0xFF < PUNCTUATION_OF_256:
            marks = self._vocabulary.punctuation
            return marks[(special >> 10) % len(marks)]
        starts = self._vocabulary.root.choices
        return starts[(special >> 10) % len(starts)]

    def _biased(self, logits: dict[int, float], *, additions: bool) -> dict[int, float]:
        bias = self._sampling.logit_bias
        if not bias:
            return logits
        result = {token: logit + bias.get(token, 0.0) for token, logit in logits.items()}
        if additions:
            for token, value in bias.items():
                if token not in result and not self._is_barred(token):
                    result[token] = FLOOR + value
        return result

    def _is_barred(self, token: int) -> bool:
        if token == EOS_TOKEN_ID and self.length < self._eos_from:
            return True
        return self.length < self._min_until and token in self._banned

    def _uniform(self, chance: int) -> float:
        return (((chance ^ self._key) * _ODD + self.length * _GOLDEN & _MASK) >> 11) * 2.0**-53
