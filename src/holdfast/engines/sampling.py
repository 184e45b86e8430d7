"""Draws tokens from logits: the code that the engines with torch share.

The order is vLLM's: bans and bias of single tokens, penalties, temperature, truncation (min_p, top_k, top_p), then
Gumbel-max. Its noise is a pure function of (seed, position, token id). The largest sum of logit and noise is a draw
from the softmax, and rounding errors in the logits change few draws that way (fact 4e).

Always true:
- A row's result depends only on its own logits, settings and text, bit for bit: not on the batch, the row's index or
  the number of threads.
- A row's state is the same whether it was carried over with the stream or rebuilt from a resumed request.
- Nothing waits for the device (except truncation's short way on a CPU), so all of it can be captured in a graph.
- Rows cost only what their settings ask for (`Sampling.is_greedy` and the like).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.core.requests import Sampling

WORD = 1 << 64

# The finaliser of splitmix64, and the step of its counter (the golden ratio, odd).
GOLDEN = 0x9E3779B97F4A7C15
MIX_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

# Multipliers of 32-bit mixes with a low bias, found by search (Wellons' lowbias32 and triple32).
MIX_32 = (0x7FEB352D, 0x846CA68B)
LAST_32 = (0xED5AD4BB, 0xAC4C1B51)

UNIFORM_BITS = 31
UNIFORM_MAX = 1.0 - 2.0**-24  # the largest float32 under 1

# A mass of 1 as a whole number. 2**17 tokens of it stay below 2**53, so a sum is exact as a double too.
MASS_ONE = float(2**36)

# How many of the likeliest are tried before all are sorted: on CPU, finding them takes a tenth of the sort, and they
# hold 95% of a trained model's mass in nearly every step.
SHORT = 1024


# -- noise
#
# A counter-based generator in integer tensor operations that wrap around: a 64-bit key from (seed, position), and under
# it two rounds of a 32-bit mix of the token's id. The uniform value has 31 bits and is fine near 0, where the largest
# noise comes from: no token of a probability over about 2**-31 is out of reach, and no noise is infinite, so a masked
# token (-inf) never wins.


def signed(value: int, bits: int = 64) -> int:
    """Return the same bits as a signed number, which is what tensors hold."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def seed_key(seed: int) -> int:
    """Return where a seed's counter starts: any whole number will do."""
    mixed = (seed + GOLDEN) % WORD
    mixed = (mixed ^ mixed >> 30) * MIX_64[0] % WORD
    mixed = (mixed ^ mixed >> 27) * MIX_64[1] % WORD
    return signed(mixed ^ mixed >> 31)


def token_hashes(vocabulary: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a mixed 32-bit word per token id: computed once, so that a step spends no round on telling ids apart."""
    ids = torch.arange(vocabulary, dtype=torch.int32, device=device)
    return _mix_32_(ids.mul_(signed(GOLDEN >> 32, 32)).add_(signed(GOLDEN, 32)), MIX_32)


def row_keys(seed_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit key per row from its seed's key and the place in the text that is drawn for."""
    mixed = seed_keys + positions * signed(GOLDEN)
    mixed = (mixed ^ _shift_64(mixed, 30)) * signed(MIX_64[0])
    mixed = (mixed ^ _shift_64(mixed, 27)) * signed(MIX_64[1])
    return mixed ^ _shift_64(mixed, 31)


def uniform(keys: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return one number inside (0, 1) for each key and token, float32 [rows, vocabulary]."""
    low = keys.to(torch.int32).unsqueeze(1)  # the low half: a conversion wraps around
    high = (keys >> 32).to(torch.int32).unsqueeze(1)
    mixed = _mix_32_(words ^ low, MIX_32)
    mixed = _mix_32_(mixed.add_(high), LAST_32)
    counts = mixed.bitwise_and_((1 << UNIFORM_BITS) - 1).float()
    return counts.add_(0.5).mul_(2.0**-UNIFORM_BITS).clamp_(max=UNIFORM_MAX)


def gumbel(keys: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32 [rows, vocabulary], all of it finite."""
    # -log(1 - u) and not -log(u): it is small where u is small, and u has most of its precision there.
    return uniform(keys, words).neg_().log1p_().neg_().log_().neg_()


def _shift_64(values: torch.Tensor, by: int) -> torch.Tensor:
    """Shift zeros in: tensors shift their sign in, with which a mix would lose bits."""
    return (values >> by) & ((1 << (64 - by)) - 1)


def _mix_32_(values: torch.Tensor, multipliers: tuple[int, int]) -> torch.Tensor:
    """Mix 32-bit words by a bijection, in place."""
    for by, multiplier in zip((16, 15), multipliers, strict=True):
        values.bitwise_xor_((values >> by).bitwise_and_((1 << (32 - by)) - 1))
        values.mul_(signed(multiplier, 32))
    return values.bitwise_xor_((values >> 16).bitwise_and_(0xFFFF))


# -- bias, bans and penalties, each for only the rows that have them
#
# As in vLLM: bans and bias come first; the repetition penalty is over prompt and generated tokens, the frequency and
# presence penalties over the generated ones; a positive logit is divided by the repetition penalty, any other
# multiplied. The tokens of a step are counted where they were drawn. Only the first `prompt_len` tokens are prompt.


class SampledText(Protocol):
    """A text to continue, as far as it changes logits."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def prompt_len(self) -> int: ...

    @property
    def tokens(self) -> Sequence[int]:
        """Return the prompt, and what has been generated."""

    @property
    def stops(self) -> frozenset[int]:
        """Return the ids that end it."""

    @property
    def stop_from(self) -> int:
        """Return the first position at which one of them may be drawn."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Single logits to change: one entry per (row, token id), no pair twice."""

    rows: torch.Tensor
    ids: torch.Tensor
    bias: torch.Tensor
    banned_until: torch.Tensor  # the first position at which the token may be drawn

    def apply_(self, logits: torch.Tensor, positions: torch.Tensor) -> None:
        at = (self.rows, self.ids)
        banned = positions.index_select(0, self.rows) < self.banned_until
        logits.index_put_(at, (logits[at] + self.bias).masked_fill(banned, -math.inf))


def token_rules(texts: Sequence[SampledText], vocabulary: int, device: torch.device) -> TokenRules | None:
    """Return the rows' bias and bans; None: no row has any."""
    entries: dict[tuple[int, int], tuple[float, int]] = {}
    for row, text in enumerate(texts):
        sampling = text.sampling
        for token, bias in (sampling.logit_bias or {}).items():
            entries[row, token] = (bias, 0)
        if sampling.min_tokens > 0:
            for token in text.stops:
                if 0 <= token < vocabulary:  # a stop id that no token has is harmless
                    entries[row, token] = (entries.get((row, token), (0.0, 0))[0], text.stop_from)
    if not entries:
        return None
    places, values = list(entries), list(entries.values())
    return TokenRules(
        rows=torch.tensor([row for row, _ in places], device=device),
        ids=torch.tensor([token for _, token in places], device=device),
        bias=torch.tensor([bias for bias, _ in values], dtype=torch.float32, device=device),
        banned_until=torch.tensor([until for _, until in values], device=device),
    )


@dataclass(frozen=True, slots=True)
class Penalties:
    """Counts and settings of the rows that have penalties; `rows` are their places in the batch, ascending."""

    rows: torch.Tensor
    prompt: torch.Tensor  # bool [penalised, vocabulary]: in the prompt
    counts: torch.Tensor  # float32 [penalised, vocabulary]: how often generated
    repetition: torch.Tensor  # [penalised, 1], as the two below
    frequency: torch.Tensor
    presence: torch.Tensor

    def apply_(self, logits: torch.Tensor) -> None:
        part = logits.index_select(0, self.rows)
        made = self.counts > 0
        scaled = torch.where(part > 0, part / self.repetition, part * self.repetition)
        part = torch.where(self.prompt | made, scaled, part)
        part -= self.frequency * self.counts
        part -= self.presence * made
        logits.index_copy_(0, self.rows, part)

    def count_(self, tokens: torch.Tensor) -> None:
        """Count the tokens that the batch has drawn."""
        drawn = tokens.index_select(0, self.rows).unsqueeze(1)
        self.counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float32))


@dataclass(frozen=True, slots=True)
class CarriedCounts:
    """A stream's state in an earlier batch: where, and whether it has counted all tokens there are."""

    penalties: Penalties
    at: int  # its place among the penalised rows


def penalties(
    texts: Sequence[SampledText], kept: dict[int, CarriedCounts], vocabulary: int, device: torch.device
) -> Penalties | None:
    """Return the penalties of the rows that have some. `kept` has, by place in `texts`, the state carried over from the
    batch before: it has also counted tokens that are drawn but not yet known here. All others are counted from their
    text."""
    rows = [row for row, text in enumerate(texts) if text.sampling.has_penalties]
    if not rows:
        return None
    prompt = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=device)
    counts = torch.zeros(len(rows), vocabulary, dtype=torch.float32, device=device)
    for at, row in enumerate(rows):
        old = kept.get(row)
        if old is not None:
            prompt[at].copy_(old.penalties.prompt[old.at])
            counts[at].copy_(old.penalties.counts[old.at])
            continue
        tokens, prompt_len = texts[row].tokens, texts[row].prompt_len
        prompt[at].index_fill_(0, torch.tensor(tokens[:prompt_len], device=device), True)
        made = torch.tensor(tokens[prompt_len:], dtype=torch.int64, device=device)
        counts[at].scatter_add_(0, made, torch.ones_like(made, dtype=torch.float32))

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

    settings = [texts[row].sampling for row in rows]
    return Penalties(
        rows=torch.tensor(rows, device=device),
        prompt=prompt,
        counts=counts,
        repetition=column([each.repetition_penalty for each in settings]),
        frequency=column([each.frequency_penalty for each in settings]),
        presence=column([each.presence_penalty for each in settings]),
    )


# -- truncation: masks on logits that are already divided by the temperature
#
# min_p keeps what is at least `min_p` times as likely as the likeliest. top_k keeps the k likeliest and whatever ties
# with the last of them (as vLLM). top_p is over what those two left, renormalised: it keeps a token while the mass of
# all likelier ones is below `top_p`, so the token that crosses the line stays, and at least one always does (as vLLM);
# a tie on the line is kept whole, where vLLM keeps those that its sort happened to put first.
#
# Sums of floats depend on their order, and a device may choose another order for another batch; so masses are whole
# numbers: their sums do not. For the same reason the short way on CPU (the likeliest few are mostly enough) masks
# exactly what the long way (sort all) would.


@dataclass(frozen=True, slots=True)
class Truncation:
    """Settings of the rows that have any; `rows` are their places in the batch, ascending."""

    rows: torch.Tensor
    gap: torch.Tensor  # [rows, 1]: -log(min_p), how far below the largest a logit may lie; inf: no matter
    top_k: torch.Tensor  # [rows, 1], the whole vocabulary where it is off
    top_p: torch.Tensor  # float64 [rows, 1]
    ranked: bool  # some row has top_k or top_p
    nucleus: bool  # some row has top_p
    longest: int  # the largest top_k, if every row has one; else 0

    def apply_(self, logits: torch.Tensor) -> None:
        part = logits.index_select(0, self.rows)
        largest = part.amax(-1, keepdim=True)
        part.masked_fill_(part < largest - self.gap, -math.inf)
        if self.ranked:
            part.masked_fill_(part < self._floor(part, largest), -math.inf)
        logits.index_copy_(0, self.rows, part)

    def _floor(self, part: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """Return the smallest logit that stays, per row."""
        vocabulary = part.shape[1]
        if self.longest and not self.nucleus:
            return part.topk(self.longest).values.gather(1, self.top_k - 1)
        if self.longest:
            return self._floor_in(part, largest, self.longest)[0]
        if part.device.type == "cpu" and vocabulary > SHORT:  # elsewhere, to look at the outcome waits for the device
            floor, settled = self._floor_in(part, largest, SHORT)
            if bool(settled.all()):
                return floor
        return self._floor_in(part, largest, vocabulary)[0]

    def _floor_in(self, part: torch.Tensor, largest: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the smallest logit that stays as far as the `count` likeliest tell, and whether they tell all of
        it."""
        whole = count == part.shape[1]
        ranked = part.sort(-1, descending=True).values if whole else part.topk(count).values
        in_view = self.top_k <= count
        last = ranked.gather(1, (self.top_k - 1).clamp(max=count - 1)).masked_fill_(~in_view, -math.inf)
        total = _mass(part, largest).masked_fill_(part < last, 0).sum(-1, keepdim=True)
        mass = _mass(ranked, largest).masked_fill_(ranked < last, 0)
        likelier = mass.cumsum(-1) - mass
        kept = (likelier.double() < self.top_p * total.double()).sum(-1, keepdim=True).clamp_(min=1)
        floor = torch.where(self.top_p > 1.0, last, torch.maximum(ranked.gather(1, kept - 1), last))
        # Without a top_k, the line of top_p must be crossed in view.
        unlimited = self.top_k >= part.shape[1]
        return floor, in_view | (unlimited & ((kept < count) | (self.top_p > 1.0)))


def _mass(logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    return (logits - largest).exp_().mul_(MASS_ONE).to(torch.int64)


def truncation(settings: Sequence[Sampling], vocabulary: int, device: torch.device) -> Truncation | None:
    """Return the truncation of the rows that are drawn; None if no row is truncated."""
    rows = [row for row, each in enumerate(settings) if each.truncates(vocabulary)]
    if not rows:
        return None
    chosen = [settings[row] for row in rows]
    top_k = [each.top_k if 0 < each.top_k < vocabulary else vocabulary for each in chosen]
    gap = [max(0.0, -math.log(each.min_p)) if each.min_p > 0 else math.inf for each in chosen]
    top_p = [each.top_p if each.top_p < 1.0 else 2.0 for each in chosen]  # 2: over any rounding
    return Truncation(
        rows=torch.tensor(rows, device=device),
        gap=torch.tensor(gap, dtype=torch.float32, device=device).unsqueeze(1),
        top_k=torch.tensor(top_k, device=device).unsqueeze(1),
        top_p=torch.tensor(top_p, dtype=torch.float64, device=device).unsqueeze(1),
        ranked=any(each < vocabulary for each in top_k) or any(each <= 1.0 for each in top_p),
        nucleus=any(each <= 1.0 for each in top_p),
        longest=max(top_k) if max(top_k) < vocabulary else 0,
    )
