"""What one step computes: segments of several texts, laid out as tensors once for all layers.

Always true: rows are the segments' tokens, in the order given; leading segments of one token are decodes, all others
are chunks. Decodes are attended either each alone (`alone`) or all at once over block tables padded to one width
(`tables`): padding changes a result's last bits, so `exact` never pads. Kernels take decodes by their tables and all
chunks at once (`tiles`). With tables only, nothing here or in the forward pass asks the device for a value: such a step
can be captured in a graph, and run again on the same tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch

# Decodes of unlike length are attended one by one on a CPU: padding past this share costs more than the calls it saves.
PADDED_SHARE_MAX = 1.5


class SegmentRows(Protocol):
    """Tokens of one text to compute, at positions from `start` on; its block table reaches at least their end."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def blocks(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One segment: it has `count` rows of the batch from `first` on, at positions from `start` on."""

    first: int
    count: int
    start: int
    blocks: torch.Tensor  # ids of those that hold positions 0 to start + count
    bias: torch.Tensor | None = None  # [count, start + count], where a plain causal mask will not do

    @property
    def length(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """The queries of all chunks, cut into tiles of at most so many tokens of one text: for a kernel."""

    places: torch.Tensor  # [4, tiles]: first query's row, number of queries, first one's position, row of `tables`
    tables: torch.Tensor  # [chunks, blocks]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    blocks: torch.Tensor  # [rows]: where each row's KV goes
    offsets: torch.Tensor  # [rows]: and at which of the block's tokens
    last: torch.Tensor | None = None  # [segments]: the row of each segment's last position; None: every row
    tables: torch.Tensor | None = None  # [decodes, blocks]: the first rows'; what is beyond a text is not read
    bias: torch.Tensor | None = None  # [decodes, 1, 1, tokens]: 0 where a table's token is in the text, else -inf
    alone: tuple[Chunk, ...] = ()
    begun: torch.Tensor | None = None  # [blocks]: begun in this step and not filled by it: to be cleared first
    tiles: Tiles | None = None  # instead of `alone`, `bias` and `begun`, for kernels


def on_device(values: object, device: torch.device) -> torch.Tensor:
    """Return whole numbers, or rows of them, as a tensor. They go to a GPU through pinned memory: a plain copy waits
    for all that is queued."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int64)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def on_host(values: torch.Tensor) -> torch.Tensor:
    """Start a copy from a GPU, which is complete once what is queued now is over. Return a CPU's tensor itself."""
    if not values.is_cuda:
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def step_batch(
    segments: Sequence[SegmentRows], block_tokens: int, dtype: torch.dtype, device: torch.device, *, exact: bool = False
) -> Batch:
    """Return a step's batch from what the host knows. `dtype` is the model's."""
    decodes = _decodes(segments)
    padded = not exact and decodes > 0 and (device.type != "cpu" or _even(segments[:decodes], block_tokens))
    laid = _laid(segments, block_tokens, device)
    alone: list[Chunk] = []
    begun: list[int] = []
    first = 0
    for number, segment in enumerate(segments):
        length = segment.start + len(segment.tokens)
        if not padded or number >= decodes:
            alone.append(_chunk(segment, first, block_tokens, dtype, device, exact=exact))
        if length % block_tokens and length // block_tokens * block_tokens >= segment.start:
            begun.append(segment.blocks[length // block_tokens])
        first += len(segment.tokens)
    tables = bias = None
    if padded:
        tables = _tables(segments[:decodes], block_tokens, device)
        beyond = torch.arange(tables.shape[1] * block_tokens, device=device) > laid.positions[:decodes].unsqueeze(1)
        # An additive mask: torch would make one from a mask of bools in every layer.
        bias = torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, -torch.inf)[:, None, None, :]
    waiting = torch.tensor(begun, device=device) if begun else None
    return replace(laid, tables=tables, bias=bias, alone=tuple(alone), begun=waiting)


def kernel_batch(segments: Sequence[SegmentRows], block_tokens: int, device: torch.device, tile_tokens: int) -> Batch:
    """Return a step's batch for the kernels of a GPU, which take tiles of `tile_tokens` queries."""
    decodes, first = _decodes(segments), 0
    places: list[tuple[int, int, int, int]] = []
    for number, segment in enumerate(segments):
        count = len(segment.tokens)
        if number >= decodes:
            for at in range(0, count, tile_tokens):
                places.append((first + at, min(tile_tokens, count - at), segment.start + at, number - decodes))
        first += count
    tables = _tables(segments[:decodes], block_tokens, device) if decodes else None
    tiles = None
    if places:
        places.sort(key=lambda place: -place[2])  # those that see the most first: they end last
        chunks = _tables(segments[decodes:], block_tokens, device)
        tiles = Tiles(on_device(list(zip(*places, strict=True)), device), chunks)
    return replace(_laid(segments, block_tokens, device), tables=tables, tiles=tiles)


def _laid(segments: Sequence[SegmentRows], block_tokens: int, device: torch.device) -> Batch:
    """Return the rows, and which of them are a segment's last."""
    tokens = [token for segment in segments for token in segment.tokens]
    places = [(segment, at) for segment in segments for at in range(segment.start, segment.start + len(segment.tokens))]
    ids = [segment.blocks[at // block_tokens] for segment, at in places]
    rows = on_device([tokens, [at for _, at in places], ids], device)
    last = [end - 1 for end in accumulate(len(segment.tokens) for segment in segments)]
    return Batch(
        tokens=rows[0],
        positions=rows[1],
        blocks=rows[2],
        offsets=rows[1] % block_tokens,
        last=None if _decodes(segments) == len(segments) else on_device(last, device),
    )


def decode_batch(tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, block_tokens: int) -> Batch:
    """Return a batch of one token each, for graphs, from what is on the device already, without reading it."""
    return Batch(
        tokens=tokens,
        positions=positions,
        blocks=tables.gather(1, (positions // block_tokens).unsqueeze(1)).squeeze(1),
        offsets=positions % block_tokens,
        tables=tables,
    )


def _decodes(segments: Sequence[SegmentRows]) -> int:
    return next((number for number, segment in enumerate(segments) if len(segment.tokens) > 1), len(segments))


def _chunk(
    segment: SegmentRows, first: int, block_tokens: int, dtype: torch.dtype, device: torch.device, *, exact: bool
) -> Chunk:
    count, length = len(segment.tokens), segment.start + len(segment.tokens)
    blocks = torch.tensor(segment.blocks[: -(-length // block_tokens)], device=device)
    bias = None
    if count > 1 and segment.start and not exact:
        bias = torch.full((count, length), -torch.inf, dtype=dtype, device=device).triu_(segment.start + 1)
    return Chunk(first, count, segment.start, blocks, bias)


def _blocks_used(segment: SegmentRows, block_tokens: int) -> int:
    return -(-(segment.start + len(segment.tokens)) // block_tokens)


def _even(decodes: Sequence[SegmentRows], block_tokens: int) -> bool:
    used = [_blocks_used(segment, block_tokens) for segment in decodes]
    return len(used) > 1 and max(used) * len(used) <= PADDED_SHARE_MAX * sum(used)


def _tables(segments: Sequence[SegmentRows], block_tokens: int, device: torch.device) -> torch.Tensor:
    width = max(_blocks_used(segment, block_tokens) for segment in segments)
    tables = [list(segment.blocks[: _blocks_used(segment, block_tokens)]) for segment in segments]
    # A text's own first block fills its row up: masked, but finite numbers of its own, never another's garbage.
    return on_device([table + table[:1] * (width - len(table)) for table in tables], device)
