"""The results of a step: its tokens, on the device for the next step, and on the host together with a health check.

The check is the sum of every row's logits. One number that is not finite (a NaN, an overflow) makes the sum not finite.
The same copy brings tokens and sums to the host, so there is no extra wait.

Always true: no token and no KV of a step with a failed check is used, because `result` raises before the step retires.
The sum is over the model's own logits, before bias, penalties or temperature, so no request's settings can make it
fail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core.requests import TokenLogprobs
from holdfast.engines.torch.model.batch import on_host
from holdfast.engines.torch.sampling import Drawn, SamplingRows, logprobs_by_stream

Tokens = dict[int, int]  # by stream number
Logprobs = dict[int, TokenLogprobs]


class NotFiniteError(Exception):
    """The model computed numbers that are not finite: the device, its memory or the weights are broken."""


class LatestTokens:
    """The tokens that the latest step drew, by row, on the device; one buffer, so that one copy brings all."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._both = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.tokens = self._both[0]
        self.sums = self._both[1].view(torch.float64)

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    def store(self, tokens: torch.Tensor, sums: torch.Tensor) -> None:
        """Store the tokens and sums of the first rows; the other rows keep theirs."""
        self.tokens[: tokens.shape[0]].copy_(tokens)
        self.sums[: sums.shape[0]].copy_(sums)

    def copy_to_host(self) -> torch.Tensor:
        """Return a copy for the host; on a GPU the copy is only queued."""
        return on_host(self._both) if self._both.is_cuda else self._both.clone()


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """Return each row's sum, which is finite if the whole row is (unless logits exceed 1e30)."""
    return values.sum(-1, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step queued on the device, and the buffers for its results."""

    numbers: list[int]  # streams that draw: the first rows
    checked: int  # rows with sums that must be finite
    outcome: torch.Tensor  # `LatestTokens.copy_to_host`, on the host once `ready`
    ready: torch.cuda.Event | None = None
    drawn: Drawn | None = None  # with logprobs, on the host once `ready`
    rows: SamplingRows | None = None

    def result(self) -> tuple[Tokens, Logprobs]:
        """Wait for the device; return the tokens by stream, and the requested logprobs. Raise NotFiniteError."""
        if self.ready is not None:
            self.ready.synchronize()
        sums = self.outcome[1, : self.checked].view(torch.float64)
        if not sums.isfinite().all():
            bad = [row for row, finite in enumerate(sums.isfinite().tolist()) if not finite]
            owners = [str(self.numbers[row]) if row < len(self.numbers) else "a prompt" for row in bad]
            raise NotFiniteError(f"logits are not finite, of {', '.join(owners[:8])}: the device cannot be trusted")
        logprobs = logprobs_by_stream(self.drawn, self.rows) if self.drawn is not None and self.rows is not None else {}
        return dict(zip(self.numbers, self.outcome[0, : len(self.numbers)].tolist(), strict=True)), logprobs
