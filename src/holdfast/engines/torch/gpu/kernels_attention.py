"""Computes attention over KV pages in Triton: all decodes of a step at once, and chunks of a prompt with a history.

Always true: keys and values are read where they lie, up to a row's own position and no further, so what a block holds
beyond a text's end never matters and needs no clearing. Results are those of attention.py up to rounding (`exact` never
comes here). Grids and shapes follow from the tensors' shapes alone and lengths are read on the device: a decode can be
captured in a graph. Nothing is compiled for a new length, table width, chunk size or place: only `Tuning`, head shapes,
dtypes and `splits` are part of a kernel, and a decode of each captured size and one chunk meet them all.

A decode's text is cut into `splits`, each a program of its own, because one program per KV head leaves most of a GPU
idle (flash-decoding). Heads that share a KV head are rows of one tile, so that each key is read once.
"""

# mypy: disable-error-code="untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from holdfast.engines.torch.model.batch import Batch, Tiles

DOT_MIN = 16  # the least side of a tile the tensor cores multiply
SPLITS_MAX = 64  # at one tile each this is 4,096 tokens; longer texts loop: more partial results would cost more
# Eight small programs for each of an H200's 132 processors: enough bytes under way, and unlike texts even out.
PROGRAMS_WANTED = 1056


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a kernel is cut: tokens of a tile, and what Triton is told."""

    tile: int
    warps: int
    stages: int


# The quickest of those tried on an H200 with texts of 2,048 tokens.
DECODE = Tuning(tile=32, warps=2, stages=4)
CHUNK = Tuning(tile=64, warps=4, stages=3)
CHUNK_ROWS = 128  # queries times heads of a tile: two warp groups of 64


def splits_for(rows: int, kv_heads: int) -> int:
    """Return a power of two, never more for more rows: sizes 1, 2, 4, ... up to the largest batch meet all of them."""
    wanted = PROGRAMS_WANTED / (rows * kv_heads)
    return min(SPLITS_MAX, max(2, int(triton.next_power_of_2(math.ceil(wanted)))))


def attend(queries: torch.Tensor, kv: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Compute `attention.attend` for batches made for kernels."""
    out = _room(queries)
    if batch.tables is not None:
        decodes = batch.tables.shape[0]
        decode_attention(queries[:decodes], kv, batch.tables, batch.positions[:decodes], out=out[:decodes])
    if batch.tiles is not None:
        chunk_attention(queries, kv, batch.tiles, out)
    return out


def decode_attention(
    queries: torch.Tensor,
    kv: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    *,
    splits: int | None = None,
    tuning: Tuning = DECODE,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with `queries` [rows, heads, head_size], one per text, over one layer's `kv` [blocks, 2, block_tokens,
    kv_heads, head_size]: each sees positions 0 up to its own of the blocks its row of `tables` names."""
    rows, heads, size = queries.shape
    kv_heads = kv.shape[3]
    assert queries.stride(2) == kv.stride(4) == tables.stride(1) == positions.stride(0) == 1
    splits = splits_for(rows, kv_heads) if splits is None else splits
    assert splits & (splits - 1) == 0, f"{splits} splits are not a power of two"
    out = _room(queries) if out is None else out
    parts, weights = out, out  # not used when there is one split
    if splits > 1:
        parts = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=queries.device)
        weights = torch.empty(rows, heads, splits, dtype=torch.float32, device=queries.device)
    _decode[(kv_heads, splits, rows)](
        queries,
        kv,
        tables,
        positions,
        out,
        parts,
        weights,
        _scale(size),
        *queries.stride()[:2],
        *kv.stride()[:4],
        tables.stride(0),
        HEADS=heads,
        SHARE=heads // kv_heads,
        ROWS=max(DOT_MIN, triton.next_power_of_2(heads // kv_heads)),
        SIZE=size,
        PADDED=_padded(size),
        BLOCK_TOKENS=kv.shape[2],
        TILE=tuning.tile,
        WHOLE=splits == 1,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    if splits > 1:
        # 64 x 128 numbers are 64 a thread with 4 warps; few splits need no more than one.
        _combine[(heads, rows)](
            parts, weights, out, SIZE=size, PADDED=_padded(size), SPLITS=splits, num_warps=4 if splits > 8 else 1
        )
    return out


def tile_tokens(heads: int, kv_heads: int) -> int:
    """Return how many queries of one text are in a tile of `chunk_attention`."""
    return max(1, CHUNK_ROWS // int(triton.next_power_of_2(heads // kv_heads)))


def chunk_attention(
    queries: torch.Tensor, kv: torch.Tensor, tiles: Tiles, out: torch.Tensor, tuning: Tuning = CHUNK
) -> None:
    """Attend with those of `queries` [rows, heads, head_size] that are in `tiles`, each over its text up to itself."""
    _rows, heads, size = queries.shape
    kv_heads = kv.shape[3]
    assert queries.stride(2) == kv.stride(4) == tiles.tables.stride(1) == tiles.places.stride(1) == 1
    _chunk[(kv_heads, tiles.places.shape[1])](
        queries,
        kv,
        tiles.places,
        tiles.tables,
        out,
        _scale(size),
        *queries.stride()[:2],
        *kv.stride()[:4],
        tiles.tables.stride(0),
        HEADS=heads,
        SHARE=heads // kv_heads,
        SHARE_PADDED=triton.next_power_of_2(heads // kv_heads),
        TOKENS=tile_tokens(heads, kv_heads),
        SIZE=size,
        PADDED=_padded(size),
        BLOCK_TOKENS=kv.shape[2],
        TILE=tuning.tile,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


def _room(queries: torch.Tensor) -> torch.Tensor:
    rows, heads, size = queries.shape
    return torch.empty(rows, heads * size, dtype=queries.dtype, device=queries.device)


def _scale(size: int) -> float:
    """Return the factor of the scores. The hardware computes powers of two: exp(x) is exp2(x * log2(e))."""
    return math.log2(math.e) / math.sqrt(size)


def _padded(size: int) -> int:
    return max(DOT_MIN, int(triton.next_power_of_2(size)))


@triton.jit
def _fold(
    query: tl.tensor, seen: tl.tensor, state: tl.tensor, kv: tl.tensor, table: tl.tensor, first: tl.tensor,
    end: tl.tensor, scale: tl.tensor, kv_block: tl.tensor, kv_side: tl.tensor, kv_token: tl.tensor,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:
    """Take positions `first` up to `end` into `state`: the sum of values, the largest score, the sum of weights. A
    row sees its first `seen` positions; without MASKED it sees all of these, and they are whole tiles."""
    out, top, total = state
    size = tl.arange(0, PADDED)
    for begin in tl.range(first, end, TILE):
        tokens = begin + tl.arange(0, TILE)
        inside = (tokens < end) | (not MASKED)
        block = tl.load(table + tokens // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
        place = block * kv_block + (tokens % BLOCK_TOKENS) * kv_token
        read = inside[:, None] & (size < SIZE)[None, :]
        at = kv + place[:, None] + size[None, :]
        keys = tl.load(at, mask=read, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(tokens[None, :] < seen[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        values = tl.load(at + kv_side, mask=read, other=0.0)
        out = out * shrink[:, None]
        out = tl.dot(weights.to(values.dtype), values, out, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    return out, top, total


# Table widths and addresses of small tensors change from step to step, and must not make new kernels.
@triton.jit(do_not_specialize=["tables", "positions", "table_row"])
def _decode(
    queries: tl.tensor, kv: tl.tensor, tables: tl.tensor, positions: tl.tensor, out: tl.tensor, parts: tl.tensor,
    weights: tl.tensor, scale: tl.tensor, query_row: tl.tensor, query_head: tl.tensor, kv_block: tl.tensor,
    kv_side: tl.tensor, kv_token: tl.tensor, kv_head: tl.tensor, table_row: tl.tensor,
    HEADS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
) -> None:
    group, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    splits = tl.num_programs(1)
    length = tl.load(positions + row).to(tl.int32) + 1
    span = tl.cdiv(tl.cdiv(length, TILE), splits) * TILE
    first = split * span
    end = tl.minimum(first + span, length)
    member, size = tl.arange(0, ROWS), tl.arange(0, PADDED)
    head = group * SHARE + member
    real = (member < SHARE)[:, None] & (size < SIZE)[None, :]
    query = tl.load(queries + row * query_row + head[:, None] * query_head + size[None, :], mask=real, other=0.0)
    zeros = tl.zeros([ROWS], tl.float32)
    none = tl.zeros([ROWS, PADDED], tl.float32), zeros - float("inf"), zeros
    summed, top, total = _fold(
        query, tl.zeros([ROWS], tl.int32) + length, none, kv + group * kv_head, tables + row * table_row, first, end,
        scale, kv_block, kv_side, kv_token, SIZE, PADDED, BLOCK_TOKENS, TILE, True,
    )
    if WHOLE:
        tl.store(out + row * HEADS * SIZE + head[:, None] * SIZE + size[None, :], summed / total[:, None], mask=real)
    elif first < length:
        part = (row * HEADS + head) * splits + split
        tl.store(parts + part[:, None] * SIZE + size[None, :], summed / total[:, None], mask=real)
        tl.store(weights + part, top + tl.log2(total), mask=member < SHARE)
    else:  # nothing fell to this split
        tl.store(weights + (row * HEADS + head) * splits + split, float("-inf"), mask=member < SHARE)


@triton.jit
def _combine(
    parts: tl.tensor, weights: tl.tensor, out: tl.tensor,
    SIZE: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
) -> None:
    at = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    split, size = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    logs = tl.load(weights + at * SPLITS + split)
    used = logs != float("-inf")  # the parts of the others were never written
    shares = tl.exp2(logs - tl.max(logs, 0))
    read = used[:, None] & (size < SIZE)[None, :]
    found = tl.load(parts + (at * SPLITS + split)[:, None] * SIZE + size[None, :], mask=read, other=0.0)
    summed = tl.sum(found * shares[:, None], 0) / tl.sum(shares, 0)
    tl.store(out + at * SIZE + size, summed, mask=size < SIZE)


@triton.jit(do_not_specialize=["places", "tables", "table_row"])
def _chunk(
    queries: tl.tensor, kv: tl.tensor, places: tl.tensor, tables: tl.tensor, out: tl.tensor, scale: tl.tensor,
    query_row: tl.tensor, query_head: tl.tensor, kv_block: tl.tensor, kv_side: tl.tensor, kv_token: tl.tensor,
    kv_head: tl.tensor, table_row: tl.tensor,
    HEADS: tl.constexpr, SHARE: tl.constexpr, SHARE_PADDED: tl.constexpr, TOKENS: tl.constexpr, SIZE: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr,
) -> None:
    group, tiles = tl.program_id(0), tl.num_programs(1)
    at = places + tl.program_id(1)
    first, count = tl.load(at), tl.load(at + tiles).to(tl.int32)
    start, table = tl.load(at + 2 * tiles).to(tl.int32), tables + tl.load(at + 3 * tiles) * table_row
    row, size = tl.arange(0, TOKENS * SHARE_PADDED), tl.arange(0, PADDED)
    token, member = row // SHARE_PADDED, row % SHARE_PADDED
    head = group * SHARE + member
    real = ((token < count) & (member < SHARE))[:, None] & (size < SIZE)[None, :]
    place = (first + token)[:, None] * query_row + head[:, None] * query_head + size[None, :]
    query = tl.load(queries + place, mask=real, other=0.0)
    tall: tl.constexpr = TOKENS * SHARE_PADDED
    zeros = tl.zeros([tall], tl.float32)
    none = tl.zeros([tall, PADDED], tl.float32), zeros - float("inf"), zeros
    seen, pages = start + token + 1, kv + group * kv_head
    common = (start + 1) // TILE * TILE  # whole tiles that every row sees
    state = _fold(
        query, seen, none, pages, table, 0, common, scale, kv_block, kv_side, kv_token, SIZE, PADDED, BLOCK_TOKENS,
        TILE, False,
    )
    summed, _top, total = _fold(
        query, seen, state, pages, table, common, start + count, scale, kv_block, kv_side, kv_token, SIZE, PADDED,
        BLOCK_TOKENS, TILE, True,
    )
    to = out + (first + token)[:, None] * (HEADS * SIZE) + head[:, None] * SIZE + size[None, :]
    tl.store(to, summed / total[:, None], mask=real)
