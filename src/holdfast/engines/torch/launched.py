"""What a step leaves: tokens for the next one to begin with, and for the host the same tokens with a proof of health.

The proof is a sum: every row's logits added up. One number that is not finite (a NaN, an overflow) makes the sum so,
and the sum comes to the host in the copy that brings the tokens: nothing more is waited for. Always true: no token and
no KV of a step whose proof failed is believed, because `result` raises before anything of it is retired; only what the
model itself computed is summed, before bias, penalties or temperature, so no request's settings can fail it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core.requests import TokenLogprobs
from holdfast.engines.torch.model.batch import on_host
from holdfast.engines.torch.sampling import Drawn, SamplingRows, told_logprobs

Tokens = dict[int, int]  # by stream number
Logprobs = dict[int, TokenLogprobs]


class NotFiniteError(Exception):
    """The model computed numbers that are not finite: the device, its memory or the weights are broken."""


class Latest:
    """What the latest step drew, by row, on the device; one piece of memory, so that one copy tells all."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._both = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.tokens = self._both[0]
        self.sums = self._both[1].view(torch.float64)

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    def take(self, tokens: torch.Tensor, sums: torch.Tensor) -> None:
        """Of the first rows; the others keep what they had."""
        self.tokens[: tokens.shape[0]].copy_(tokens)
        self.sums[: sums.shape[0]].copy_(sums)

    def told(self) -> torch.Tensor:
        """A copy for the host; on a GPU it is on its way."""
        return on_host(self._both) if self._both.is_cuda else self._both.clone()


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """Each row's sum; finite where all of the row is, short of logits beyond 1e30."""
    return values.sum(-1, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way."""

    numbers: list[int]  # streams that draw: the first rows
    checked: int  # rows whose sums must be finite
    told: torch.Tensor  # `Latest.told`, on the host once `ready`
    ready: torch.cuda.Event | None = None
    drawn: Drawn | None = None  # with logprobs, on the host once `ready`
    rows: SamplingRows | None = None

    def result(self) -> tuple[Tokens, Logprobs]:
        """Waits for the device. The tokens drawn, by stream, and logprobs for those who asked. NotFiniteError."""
        if self.ready is not None:
            self.ready.synchronize()
        sums = self.told[1, : self.checked].view(torch.float64)
        if not sums.isfinite().all():
            bad = [row for row, finite in enumerate(sums.isfinite().tolist()) if not finite]
            whose = [str(self.numbers[row]) if row < len(self.numbers) else "a prompt" for row in bad]
            raise NotFiniteError(f"logits are not finite, of {', '.join(whose[:8])}: the device cannot be trusted")
        logprobs = told_logprobs(self.drawn, self.rows) if self.drawn is not None and self.rows is not None else {}
        return dict(zip(self.numbers, self.told[0, : len(self.numbers)].tolist(), strict=True)), logprobs
