"""Which tokens a draw may choose from: min_p, then top_k, then top_p, as masks on logits that are already divided by
the temperature.

Rules. min_p keeps what is at least `min_p` times as likely as the likeliest. top_k keeps the k likeliest and whatever
ties with the last of them (as vLLM). top_p is over what those two left, renormalised: it keeps a token while the mass
of all likelier ones is below `top_p`, so the token that crosses the line stays, and at least one always does (as
vLLM); a tie on the line is kept whole, where vLLM keeps those that its sort happened to put first.

Always true: a row's mask depends on that row alone. Sums of floats depend on their order, and a device may choose
another order for another batch; so masses are whole numbers, whose sums do not. For the same reason the short way on
CPU (the likeliest few are mostly enough) masks exactly what the long way (sort all) would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.core.requests import Sampling
from holdfast.engines.sampling.settings import truncates

# A mass of 1 as a whole number. 2**17 tokens of it stay below 2**53, so a sum is exact as a double too.
MASS_ONE = float(2**36)

# How many of the likeliest are tried before all are sorted: on CPU, finding them takes a tenth of the sort, and they
# hold 95% of a trained model's mass in nearly every step.
SHORT = 1024


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
        """The smallest logit that stays, per row."""
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
        """The smallest logit that stays as far as the `count` likeliest tell, and whether they tell all of it."""
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
    """From the settings of the rows that are drawn. None: no row is truncated."""
    rows = [row for row, each in enumerate(settings) if truncates(each, vocabulary)]
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
