"""What one step computes: segments of several texts, laid out as tensors once for all layers.

Always true: rows are the segments' tokens, in the order given; leading segments of one token are decodes, all others
are chunks. Decodes are attended either each alone (`alone`) or all at once over block tables padded to one width
(`tables`): padding changes a result's last bits, so `exact` never pads. With tables only, nothing here or in the
forward pass asks the device for a value: such a step can be captured in a graph, and run again on the same tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

# Decodes of unlike length are attended one by one on a CPU: padding past this share costs more than the calls it saves.
PADDED_SHARE_MAX = 1.25


class Segment(Protocol):
    """Tokens of one text to compute, at positions from `start` on; its block table reaches at least their end."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def blocks(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One segment: rows of the batch from `first` on, at positions from `start` on."""

    first: int
    count: int
    start: int
    blocks: torch.Tensor  # ids of those that hold positions 0 to start + count
    bias: torch.Tensor | None = None  # [count, start + count], where a plain causal mask will not do

    @property
    def length(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    blocks: torch.Tensor  # [rows]: where each row's KV goes
    offsets: torch.Tensor  # [rows]: and at which of the block's tokens
    last: torch.Tensor | None  # [segments]: the row of each segment's last position; None: every row
    tables: torch.Tensor | None  # [decodes, blocks]: the first rows' block tables; what is beyond a text is not read
    bias: torch.Tensor | None  # [decodes, 1, 1, tokens]: 0 where a table's token is in the text, else -inf
    alone: tuple[Chunk, ...]
    begun: torch.Tensor | None  # [blocks]: begun in this step and not filled by it: to be cleared first


def step_batch(
    segments: Sequence[Segment], block_tokens: int, dtype: torch.dtype, device: torch.device, *, exact: bool = False
) -> Batch:
    """A step from the host's knowledge. `dtype` is the model's."""
    decodes = 0
    while decodes < len(segments) and len(segments[decodes].tokens) == 1:
        decodes += 1
    padded = not exact and decodes > 0 and (device.type != "cpu" or _even(segments[:decodes], block_tokens))
    positions = [at for segment in segments for at in range(segment.start, segment.start + len(segment.tokens))]
    alone: list[Chunk] = []
    last: list[int] = []
    ids: list[int] = []
    begun: list[int] = []
    first = 0
    for number, segment in enumerate(segments):
        count, length = len(segment.tokens), segment.start + len(segment.tokens)
        ids += [segment.blocks[at // block_tokens] for at in range(segment.start, length)]
        if not padded or number >= decodes:
            alone.append(_chunk(segment, first, block_tokens, dtype, device, exact))
        if length % block_tokens and length // block_tokens * block_tokens >= segment.start:
            begun.append(ids[-1])
        first += count
        last.append(first - 1)
    rows = torch.tensor([[token for segment in segments for token in segment.tokens], positions, ids], device=device)
    tables = bias = None
    if padded:
        tables = _tables(segments[:decodes], block_tokens, device)
        bias = _bias(rows[1, :decodes], tables.shape[1] * block_tokens, dtype)
    return Batch(
        tokens=rows[0],
        positions=rows[1],
        blocks=rows[2],
        offsets=rows[1] % block_tokens,
        last=None if decodes == len(segments) else torch.tensor(last, device=device),
        tables=tables,
        bias=bias,
        alone=tuple(alone),
        begun=torch.tensor(begun, device=device) if begun else None,
    )


def decode_batch(
    tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, block_tokens: int, dtype: torch.dtype
) -> Batch:
    """One token each, from what is on the device already, with no look at it: for graphs and for steps whose tokens
    the host does not know yet. Rows that only fill up have a table of private blocks and position 0. Whoever gives a
    text a new block clears it (paged.py)."""
    return Batch(
        tokens=tokens,
        positions=positions,
        blocks=tables.gather(1, (positions // block_tokens).unsqueeze(1)).squeeze(1),
        offsets=positions % block_tokens,
        last=None,
        tables=tables,
        bias=_bias(positions, tables.shape[1] * block_tokens, dtype),
        alone=(),
        begun=None,
    )


def _chunk(
    segment: Segment, first: int, block_tokens: int, dtype: torch.dtype, device: torch.device, exact: bool
) -> Chunk:
    count, length = len(segment.tokens), segment.start + len(segment.tokens)
    blocks = torch.tensor(segment.blocks[: -(-length // block_tokens)], device=device)
    bias = None
    if count > 1 and segment.start and not exact:
        bias = torch.full((count, length), -torch.inf, dtype=dtype, device=device).triu_(segment.start + 1)
    return Chunk(first, count, segment.start, blocks, bias)


def _blocks_used(segment: Segment, block_tokens: int) -> int:
    return -(-(segment.start + len(segment.tokens)) // block_tokens)


def _even(decodes: Sequence[Segment], block_tokens: int) -> bool:
    used = [_blocks_used(segment, block_tokens) for segment in decodes]
    return len(used) > 1 and max(used) * len(used) <= PADDED_SHARE_MAX * sum(used)


def _tables(decodes: Sequence[Segment], block_tokens: int, device: torch.device) -> torch.Tensor:
    width = max(_blocks_used(segment, block_tokens) for segment in decodes)
    tables = [list(segment.blocks[: _blocks_used(segment, block_tokens)]) for segment in decodes]
    # A text's own first block fills its row up: masked, but finite numbers of its own, never another's garbage.
    return torch.tensor([table + table[:1] * (width - len(table)) for table in tables], device=device)


def _bias(positions: torch.Tensor, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive, because torch would make it so from a mask of bools in every layer."""
    beyond = torch.arange(tokens, device=positions.device) > positions.unsqueeze(1)
    zeros = torch.zeros(beyond.shape, dtype=dtype, device=positions.device)
    return zeros.masked_fill_(beyond, -torch.inf)[:, None, None, :]
