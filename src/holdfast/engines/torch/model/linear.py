"""Multiplies with weights in two arithmetics: `fast` for throughput, `exact` for the same bits however work is cut.

Always true of `exact`: a row's result depends on that row and the weights alone, not on how many rows are computed with
it (facts 4e). Each row is its own matrix-vector product, in decode as in prefill, so the call that computes it has the
same shape always. The same holds across ranks: work is cut into `virtual_ranks` slices whatever the real number of
ranks; each slice is its own call, of the same shape on one rank as on many, and slices are summed as one tree. Bits are
the same for one build of torch and one number of threads; not across machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

# Sums a tensor over the ranks. Under `exact`: `tree_sum` of the ranks' tensors, in the order of ranks.
AllReduce = Callable[[torch.Tensor], torch.Tensor]

# On a CPU up to this many rows are quicker one by one: a product of matrices packs the weights first, each time.
# 960x576, 2 threads: 2 rows 0.13 against 0.25 ms, 3 rows 0.19 against 0.26, 4 rows 0.25 against 0.26, 8 rows 0.50
# against 0.30.
FEW_ROWS = 3


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How products are computed. `virtual_ranks`, for `exact` alone: the number of ranks times a power of two."""

    exact: bool = False
    virtual_ranks: int = 1


FAST = Arithmetic()
EXACT = Arithmetic(exact=True)

# Neighbouring boundaries cut a parameter's shared axis into pieces: (0, 64, 96, 128) has three.
Cuts = tuple[int, ...]


def cuts(sections: Sequence[int], slices: int) -> Cuts:
    """Return the boundaries of each section (q, k and v; gate and up) cut into equal slices."""
    found = [0]
    for section in sections:
        found += [found[-1] + section // slices * number for number in range(1, slices + 1)]
    return tuple(found)


def linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, exact: bool, pieces: Cuts
) -> torch.Tensor:
    """Return rows x weight.T + bias. Under `exact` each row and each of the weight's pieces is a call of its own."""
    if not exact:
        return _fast(rows, weight, bias)
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    for first, end in pairwise(pieces):
        _by_rows(rows, weight[first:end], out[:, first:end])
    return out if bias is None else out.add_(bias)


def linear_summed(
    rows: torch.Tensor, weight: torch.Tensor, exact: bool, pieces: Cuts, all_reduce: AllReduce | None
) -> torch.Tensor:
    """Return rows x weight.T where ranks, and slices under `exact`, share out the columns."""
    if not exact:
        partial = _fast(rows, weight, None)
    else:
        slices = []
        for first, end in pairwise(pieces):
            slices.append(rows.new_empty(rows.shape[0], weight.shape[0]))
            _by_rows(rows[:, first:end], weight[:, first:end], slices[-1])
        partial = tree_sum(slices)
    return partial if all_reduce is None else all_reduce(partial)


def tree_sum(slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum neighbours first, an odd one out at the end: ranks that each sum a share of 1, 2, 4, … slices, then one
    another's sums, end with the same bits."""
    parts = list(slices)
    while len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [parts[at] + parts[at + 1] for at in range(0, len(parts) - 1, 2)] + odd
    return parts[0]


def gated(gate_up: torch.Tensor, exact: bool, slices: int) -> torch.Tensor:
    """Return silu(gate) * up; `gate_up` is overwritten."""
    gate, up = gate_up.chunk(2, -1)
    if not exact:
        return F.silu(gate).mul_(up)
    # exp differs by a bit between a vector and the leftovers at its end; where those are depends on the size.
    pieces = gate.reshape(-1, gate.shape[1] // slices)
    for piece in pieces.unbind():
        F.silu(piece, inplace=True)
    return pieces.view(gate.shape).mul_(up)


def _fast(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not 1 < rows.shape[0] <= FEW_ROWS or rows.device.type != "cpu":
        return F.linear(rows, weight, bias)
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    _by_rows(rows, weight, out)
    return out if bias is None else out.add_(bias)


def _by_rows(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    for row, target in zip(rows.unbind(), out.unbind(), strict=True):
        torch.mv(weight, row, out=target)
