"""Draws tokens in Triton: temperature, noise and the largest, with no copy of the logits.

Always true: a row's token depends on its logits, seed, position and temperature alone, never on its neighbours or the
size of the batch; equal values: the lowest id wins; an id is always inside the vocabulary. The noise is
engines.sampling's: the same whole numbers, and on a GPU the same library's logarithms; the score is rounded as in
sampling.py.
"""

# mypy: disable-error-code="untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from holdfast.engines import sampling as noise

TILE = 1024  # 126 programs for a row of 128,256 tokens: one for each processor

_GOLDEN = tl.constexpr(noise.GOLDEN)
_MIX_64_0 = tl.constexpr(noise.MIX_64[0])
_MIX_64_1 = tl.constexpr(noise.MIX_64[1])
_MIX_32_0 = tl.constexpr(noise.MIX_32[0])
_MIX_32_1 = tl.constexpr(noise.MIX_32[1])
_LAST_32_0 = tl.constexpr(noise.LAST_32[0])
_LAST_32_1 = tl.constexpr(noise.LAST_32[1])
_COUNTS_MAX = tl.constexpr((1 << noise.UNIFORM_BITS) - 1)
_UNIT = tl.constexpr(2.0**-noise.UNIFORM_BITS)
_UNIFORM_MAX = tl.constexpr(noise.UNIFORM_MAX)
# The interpreter has no device library; it is for tests on machines without a GPU.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    words: torch.Tensor,
    likeliest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token per row of `logits` [rows, vocabulary], in the product's own dtype. The others are
    `SamplingRows`'s of the same names; without `likeliest` every row is drawn."""
    rows, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, TILE)
    assert logits.stride(1) == 1
    best = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _best_of_tile[(tiles, rows)](
        logits,
        seeds,
        positions,
        temperatures,
        words,
        words if likeliest is None else likeliest.view(torch.uint8),
        best,
        places,
        logits.stride(0),
        VOCABULARY=vocabulary,
        TILE=TILE,
        CHOOSES=likeliest is not None,
        num_warps=4,
        enable_fp_fusion=False,  # torch rounds after every operation
    )
    _best_of_row[(rows,)](best, places, tokens, TILES=tiles, PADDED=triton.next_power_of_2(tiles), num_warps=4)
    return tokens


@triton.jit
def _mix_32(value: tl.tensor, first: tl.constexpr, second: tl.constexpr) -> tl.tensor:
    value = (value ^ (value >> 16)) * first
    value = (value ^ (value >> 15)) * second
    return value ^ (value >> 16)


@triton.jit
def _row_key(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    key = seed.to(tl.uint64, bitcast=True) + position.to(tl.uint64, bitcast=True) * _GOLDEN
    key = (key ^ (key >> 30)) * _MIX_64_0
    key = (key ^ (key >> 27)) * _MIX_64_1
    return key ^ (key >> 31)


@triton.jit
def _counts(key: tl.tensor, words: tl.tensor) -> tl.tensor:
    """Return the whole numbers that `noise.uniform` is made of."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    mixed = _mix_32(words.to(tl.uint32, bitcast=True) ^ low, _MIX_32_0, _MIX_32_1)
    mixed = _mix_32(mixed + high, _LAST_32_0, _LAST_32_1)
    return (mixed & _COUNTS_MAX).to(tl.int32, bitcast=True)


@triton.jit
def _gumbel(key: tl.tensor, words: tl.tensor) -> tl.tensor:
    uniform = tl.minimum((_counts(key, words).to(tl.float32) + 0.5) * _UNIT, _UNIFORM_MAX)
    if _INTERPRETED:
        # Kahan's: the error of 1 - u cancels. Without it the noise of small u, which is what wins, would be coarse.
        rest = 1.0 - uniform
        lost = tl.where(rest == 1.0, -1.0, rest - 1.0)
        logarithm = tl.where(rest == 1.0, -uniform, tl.log(rest) * tl.div_rn(-uniform, lost))
    else:
        logarithm = libdevice.log1p(-uniform)
    return -tl.log(-logarithm)


@triton.jit(do_not_specialize=["seeds", "positions", "temperatures", "likeliest"])
def _best_of_tile(
    logits: tl.tensor, seeds: tl.tensor, positions: tl.tensor, temperatures: tl.tensor, words: tl.tensor,
    likeliest: tl.tensor, best: tl.tensor, places: tl.tensor, logits_row: tl.tensor,
    VOCABULARY: tl.constexpr, TILE: tl.constexpr, CHOOSES: tl.constexpr,
) -> None:
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < VOCABULARY
    score = tl.load(logits + row * logits_row + token, mask=inside, other=float("-inf")).to(tl.float32)
    drawn = True
    if CHOOSES:
        drawn = tl.load(likeliest + row) == 0
    if drawn:
        key = _row_key(tl.load(seeds + row), tl.load(positions + row))
        added = _gumbel(key, tl.load(words + token, mask=inside, other=0))
        score = tl.div_rn(score, tl.load(temperatures + row)) + added
    # What is not a number is the largest to torch; here it would compare as nothing and let a masked place win.
    score = tl.where(score != score, float("inf"), score)
    value, place = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    at = row * tl.num_programs(0) + tile
    tl.store(best + at, value)
    tl.store(places + at, tile * TILE + place)


@triton.jit
def _best_of_row(
    best: tl.tensor, places: tl.tensor, tokens: tl.tensor, TILES: tl.constexpr, PADDED: tl.constexpr
) -> None:
    row, tile = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    values = tl.load(best + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
    _value, winner = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(tokens + row, tl.load(places + row * TILES + winner).to(tl.int64))
