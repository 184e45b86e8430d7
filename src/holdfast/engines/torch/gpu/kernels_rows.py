"""The row operations of a layer between its products, in Triton: one kernel where plain torch launches three to ten.

Always true: each row is computed from itself alone, in fp32, and rounded once when it is stored. Results equal those of
the plain torch path up to rounding. The same compiled kernel runs for any number of rows and any addresses of positions
and blocks.
"""

# mypy: disable-error-code="untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

GATED_TILE = 1024  # at one row, 14 programs of an 8B model's 14,336 columns; two 16-byte loads a thread


def add_norm(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to `hidden` [rows, width] in place, and return the RMS norm of what is stored."""
    rows, width = hidden.shape
    assert hidden.is_contiguous()
    assert delta is None or delta.is_contiguous()
    out = torch.empty_like(hidden)
    padded = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        out,
        eps,
        WIDTH=width,
        PADDED=padded,
        ADDED=delta is not None,
        num_warps=min(16, max(1, padded // 512)),  # two 16-byte loads a thread: a lone row waits for memory once
    )
    return out


def turn_and_write(
    qkv: torch.Tensor,
    heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    kv: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Norm (where the family has one) and rotate queries and keys of `qkv` [rows, (heads + 2 * kv_heads) *
    head_size]; keys and values go to their places in one layer's `kv` [blocks, 2, block_tokens, kv_heads, head_size].
    Returns the queries, [rows, heads, head_size]: turned in place. The keys in `qkv` stay as they were. `cos` and
    `sin` are whole tables, as `Rope` has them."""
    rows, (kv_heads, size) = qkv.shape[0], kv.shape[3:]
    assert qkv.stride(1) == kv.stride(4) == positions.stride(0) == blocks.stride(0) == offsets.stride(0) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    _turn_and_write[(heads + 2 * kv_heads, rows)](
        qkv,
        cos,
        sin,
        positions,
        kv,
        blocks,
        offsets,
        cos if q_norm is None else q_norm,
        cos if k_norm is None else k_norm,
        eps,
        qkv.stride(0),
        *kv.stride()[:4],
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=size // 2,
        PADDED=triton.next_power_of_2(size // 2),
        NORMED=q_norm is not None,
        num_warps=1,
    )
    return qkv.view(rows, heads + 2 * kv_heads, size)[:, :heads]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of [rows, 2 * width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(triton.cdiv(width, GATED_TILE), rows)](gate_up, out, WIDTH=width, TILE=GATED_TILE, num_warps=4)
    return out


@triton.jit
def _add_norm(
    hidden: tl.tensor, delta: tl.tensor, weight: tl.tensor, out: tl.tensor, eps: tl.tensor,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDED: tl.constexpr,
) -> None:
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    row = tl.load(hidden + at, mask=inside, other=0.0)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        added = row.to(tl.float32) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        row = added.to(row.dtype)
        tl.store(hidden + at, row, mask=inside)
    wide = row.to(tl.float32)
    mean = tl.sum(wide * wide, 0) / WIDTH
    tl.store(out + at, wide * tl.rsqrt(mean + eps) * scale, mask=inside)


@triton.jit(do_not_specialize=["positions", "blocks", "offsets"])
def _turn_and_write(
    qkv: tl.tensor, cos: tl.tensor, sin: tl.tensor, positions: tl.tensor, kv: tl.tensor, blocks: tl.tensor,
    offsets: tl.tensor, q_norm: tl.tensor, k_norm: tl.tensor, eps: tl.tensor, qkv_row: tl.tensor, kv_block: tl.tensor,
    kv_side: tl.tensor, kv_token: tl.tensor, kv_head: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, NORMED: tl.constexpr,
) -> None:
    """Rotate one head of one row and write its key or value to its block."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < HALF
    mine = qkv + row * qkv_row + head * (2 * HALF) + column
    left = tl.load(mine, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(mine + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMED:
            scale = tl.rsqrt((tl.sum(left * left, 0) + tl.sum(right * right, 0)) / (2 * HALF) + eps)
            norm = q_norm if head < HEADS else k_norm
            left *= scale * tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
            right *= scale * tl.load(norm + HALF + column, mask=inside, other=0.0).to(tl.float32)
        turn = tl.load(positions + row) * (2 * HALF) + column
        turned = left * tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
        turned += right * tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
        right *= tl.load(cos + turn + HALF, mask=inside, other=0.0).to(tl.float32)
        right += left * tl.load(sin + turn + HALF, mask=inside, other=0.0).to(tl.float32)
        left = turned
    if head < HEADS:
        tl.store(mine, left, mask=inside)
        tl.store(mine + HALF, right, mask=inside)
    else:
        side, number = (head - HEADS) // KV_HEADS, (head - HEADS) % KV_HEADS
        to = kv + tl.load(blocks + row).to(tl.int64) * kv_block + tl.load(offsets + row).to(tl.int64) * kv_token
        to += side * kv_side + number * kv_head + column
        tl.store(to, left, mask=inside)
        tl.store(to + HALF, right, mask=inside)


@triton.jit
def _silu_mul(gate_up: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, TILE: tl.constexpr) -> None:
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    at = gate_up + row * (2 * WIDTH) + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)
