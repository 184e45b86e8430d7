"""What the Triton kernels must get right, on whatever device they run: each check compares with the plain torch path.

As a program it runs the checks in Triton's interpreter, on CPU tensors, and prints one JSON object: name to error.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from holdfast.engines import sampling as noise
from holdfast.engines.torch.gpu import kernels_attention as attention_fast
from holdfast.engines.torch.gpu import kernels_rows as rows_fast
from holdfast.engines.torch.gpu import kernels_sampling as sampling_fast
from holdfast.engines.torch.gpu.kernels_sampling import _counts, _gumbel, _row_key
from holdfast.engines.torch.model import attention
from holdfast.engines.torch.model.attention import write
from holdfast.engines.torch.model.batch import Chunk, kernel_batch
from holdfast.engines.torch.model.decoder import rotate
from holdfast.engines.torch.ranks.share import SharePiece
from holdfast.engines.torch.sampling import SamplingRows, draw

LAYERS = 3


class Pages:
    """A pool of KV: numbers at the texts' positions, and nothing that is a number anywhere else."""

    def __init__(self, device: str, dtype: torch.dtype, lengths: list[int], shape: tuple[int, int, int]) -> None:
        self.block_tokens, kv_heads, size = shape
        self.lengths = lengths
        self.width = max(-(-length // self.block_tokens) for length in lengths) + 2
        order = torch.randperm(len(lengths) * self.width, generator=torch.Generator().manual_seed(4))
        self.tables = order.view(len(lengths), self.width).to(device)
        kv = torch.full((order.numel(), LAYERS, 2, self.block_tokens, kv_heads, size), float("nan"))
        for table, length in zip(self.tables.tolist(), lengths, strict=True):
            for at in range(length):
                block, offset = table[at // self.block_tokens], at % self.block_tokens
                kv[block, :, :, offset] = torch.randn(LAYERS, 2, kv_heads, size)
        self.kv = kv.to(device, dtype)
        self.layer = self.kv[:, 1]  # strided, as the model has it

    def alone(self, text: int, count: int, queries: torch.Tensor) -> torch.Tensor:
        """The plain path's answer, in fp32, for the last positions of a text."""
        length, start = self.lengths[text], self.lengths[text] - count
        keys, values = self.layer.float().unbind(1)
        chunk = Chunk(0, count, start, self.tables[text, : -(-length // self.block_tokens)])
        mine = [attention._gathered(pages, [chunk])[0] for pages in (keys, values)]
        return attention._each(queries.float(), mine[0], mine[1], chunk)


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: object = "") -> None:
    most = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    assert found.dtype is dtype, f"{what}: {found.dtype}"
    assert found.shape == expected.shape, f"{what}: {found.shape}, not {expected.shape}"
    off = ((found.float() - expected.float()).abs() / (1 + expected.float().abs())).max().item()
    assert off <= most, f"{what}: off by {off}"


def random_queries(rows: int, heads: int, size: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Return strided queries, as a part of qkv."""
    return torch.randn(rows, heads + 3, size).to(device, dtype)[:, :heads]


SHAPES = [  # heads, kv_heads, head_size, block_tokens
    (4, 2, 16, 8),
    (2, 2, 22, 16),
    (7, 1, 32, 4),
]


def decodes(device: str, dtype: torch.dtype, shapes: list[tuple[int, int, int, int]], longest: int) -> None:
    """Any mix of lengths, splits (more than there are tiles too), tile sizes and table dtypes."""
    for heads, kv_heads, size, block_tokens in shapes:
        lengths = [1, block_tokens, longest, 64, 65]
        pages = Pages(device, dtype, lengths, (block_tokens, kv_heads, size))
        queries = random_queries(len(lengths), heads, size, device, dtype)
        expected = torch.cat([pages.alone(text, 1, queries[text : text + 1]) for text in range(len(lengths))])
        positions = torch.tensor(lengths, device=device) - 1
        for splits, tile, kind in ((1, 64, torch.int64), (2, 32, torch.int32), (8, 64, torch.int64), (None, 16, None)):
            tables = pages.tables if kind is None else pages.tables.to(kind)
            tuning = attention_fast.Tuning(tile, 4, 2)
            found = attention_fast.decode_attention(
                queries, pages.layer, tables, positions, splits=splits, tuning=tuning
            )
            near(found, expected, dtype, (heads, kv_heads, size, splits, tile))


def step(device: str, dtype: torch.dtype, shape: tuple[int, int, int, int], ends: list[tuple[int, int]]) -> None:
    """The last `count` positions of texts of `length` are what the plain path makes of them, row by row."""
    heads, kv_heads, size, block_tokens = shape
    pages = Pages(device, dtype, [length for length, _ in ends], (block_tokens, kv_heads, size))
    rows = zip(ends, pages.tables.tolist(), strict=True)
    pieces = [SharePiece([0] * count, length - count, table) for (length, count), table in rows]
    tokens = attention_fast.tile_tokens(heads, kv_heads)
    batch = kernel_batch(pieces, block_tokens, torch.device(device), tokens)
    queries = random_queries(sum(count for _, count in ends), heads, size, device, dtype)
    expected, first = [], 0
    for text, (_, count) in enumerate(ends):
        expected.append(pages.alone(text, count, queries[first : first + count]))
        first += count
    near(attention_fast.attend(queries, pages.layer, batch), torch.cat(expected), dtype, (shape, ends))


def chunks(device: str, dtype: torch.dtype, shapes: list[tuple[int, int, int, int]], longest: int) -> None:
    """Chunks at any place, of any size, several at once: causal from their own starts on."""
    for shape in shapes:
        for count in (2, 37, 64, longest):
            step(device, dtype, shape, [(longest, count)])
        step(device, dtype, shape, [(20, 20), (longest, 3), (40, 17), (1 + longest // 2, 2)])


def mixed(device: str, dtype: torch.dtype) -> None:
    """A step of decodes and chunks; a lone token behind a chunk is one too."""
    step(device, dtype, (4, 2, 16, 8), [(9, 1), (30, 1), (21, 21), (45, 13), (18, 1)])


def norms(device: str, dtype: torch.dtype, width: int, most: int) -> None:
    """The sum is stored and normed, for any number of rows; without a delta nothing is stored."""
    weight = torch.randn(width).to(device, dtype)
    for count in (1, 3, most):
        hidden, delta = (torch.randn(count, width).to(device, dtype) for _ in range(2))
        summed = hidden + delta
        near(rows_fast.add_norm(hidden.clone(), None, weight, 1e-5), F.rms_norm(hidden, (width,), weight, 1e-5), dtype)
        out = rows_fast.add_norm(hidden, delta, weight, 1e-5)
        near(hidden, summed, dtype, count)  # the interpreter cuts bf16 off where a GPU rounds
        assert device == "cpu" or torch.equal(hidden, summed)
        near(out, F.rms_norm(summed, (width,), weight, 1e-5), dtype, count)


def turns(device: str, dtype: torch.dtype, normed: bool) -> None:
    """Queries are turned, keys and values are where `write` puts them, and nothing else of the pages changes."""
    for heads, kv_heads, size, block_tokens in SHAPES:
        count = 5
        angles = torch.randn(60, size // 2)
        cos = torch.cat((angles.cos(), angles.cos()), -1).to(device, dtype).unsqueeze(1)
        sin = torch.cat((-angles.sin(), angles.sin()), -1).to(device, dtype).unsqueeze(1)
        weights = [torch.randn(size).to(device, dtype) if normed else None for _ in range(2)]
        qkv = torch.randn(count, (heads + 2 * kv_heads) * size).to(device, dtype)
        kv = torch.randn(9, LAYERS, 2, block_tokens, kv_heads, size).to(device, dtype)
        positions = torch.tensor([0, 59, 3, 17, 17], device=device)
        blocks, offsets = torch.tensor([4, 0, 8, 2, 2], device=device), torch.tensor([1, 0, 3, 2, 3], device=device)
        plain = qkv.float().view(count, -1, size).clone()
        for weight, place in zip(weights, (slice(heads), slice(heads, heads + kv_heads)), strict=True):
            if weight is not None:
                plain[:, place] = F.rms_norm(plain[:, place], (size,), weight.float(), 1e-5)
        rotate(plain[:, : heads + kv_heads], cos[positions].float(), sin[positions].float())
        expected = kv.clone()
        write(expected, 1, blocks, offsets, plain[:, heads:].view(count, 2, kv_heads, size).to(dtype))
        found = rows_fast.turn_and_write(
            qkv, heads, cos, sin, positions, kv[:, 1], blocks, offsets, weights[0], weights[1], 1e-5
        )
        near(found, plain[:, :heads], dtype, (heads, size))
        near(kv, expected, dtype, (heads, size))
        untouched = torch.ones(kv.shape[:4], dtype=torch.bool, device=device)
        untouched[blocks, 1, :, offsets] = False
        assert torch.equal(kv[untouched], expected[untouched])


def gates(device: str, dtype: torch.dtype, width: int) -> None:
    """Check silu(gate) * up, for any number of rows and a width that no tile divides."""
    for count in (1, 3, 70):
        gate_up = torch.randn(count, 2 * width).mul(4).to(device, dtype)
        gate, up = gate_up.float().chunk(2, -1)
        near(rows_fast.silu_mul(gate_up), F.silu(gate) * up, dtype, count)


@triton.jit
def _noise(
    seeds: tl.tensor, positions: tl.tensor, words: tl.tensor, counts: tl.tensor, values: tl.tensor, COUNT: tl.constexpr
) -> None:
    row, token = tl.program_id(0), tl.arange(0, COUNT)
    key = _row_key(tl.load(seeds + row), tl.load(positions + row))
    tl.store(counts + row * COUNT + token, _counts(key, tl.load(words + token)))
    tl.store(values + row * COUNT + token, _gumbel(key, tl.load(words + token)))


def noises(device: str, _dtype: torch.dtype, exact: bool) -> None:
    """The whole numbers are engines.sampling's, bit for bit, the noise to within a rounding (`exact`: bit for bit
    too)."""
    vocabulary = 4096
    seeds = torch.tensor([noise.seed_key(seed) for seed in (0, 1, 2**63 - 1, 12345678901234567)], device=device)
    positions, words = torch.tensor([0, 1, 131_071, 77], device=device), noise.token_hashes(vocabulary, device)
    counts = torch.empty(4, vocabulary, dtype=torch.int32, device=device)
    values = torch.empty(4, vocabulary, dtype=torch.float32, device=device)
    _noise[(4,)](seeds, positions, words, counts, values, COUNT=vocabulary, enable_fp_fusion=False)
    keys = noise.row_keys(seeds, positions)
    assert torch.equal(counts.float().add(0.5).mul(2.0**-31).clamp(max=noise.UNIFORM_MAX), noise.uniform(keys, words))
    expected = noise.gumbel(keys, words)
    if exact:
        assert torch.equal(values, expected)
    assert ((values - expected).abs() <= 4e-7 * (1 + expected.abs())).all(), (values - expected).abs().max()


def draws(device: str, dtype: torch.dtype, vocabulary: int) -> None:
    """Greedy and drawn rows get the tokens of `sampling.draw`; equal values: the lowest id."""
    count = 6
    likeliest = torch.tensor([[True], [False], [False], [False], [False], [True]], device=device)
    rows = SamplingRows(
        [],
        seeds=torch.tensor([noise.seed_key(seed) for seed in range(count)], device=device),
        positions=torch.arange(count, device=device) * 1001,
        temperatures=torch.tensor([[1.0], [0.7], [1.3], [2.0], [0.01], [1.0]], device=device),
        words=noise.token_hashes(vocabulary, device),
        likeliest=likeliest,
    )
    logits = torch.randn(count, vocabulary).mul(3).to(device, dtype)
    logits[0, [5, 40, vocabulary - 1]] = 50.0
    logits[5] = -torch.inf
    logits[3, : vocabulary - 2] = -torch.inf
    found = sampling_fast.sample(logits, rows.seeds, rows.positions, rows.temperatures, rows.words, likeliest)
    assert torch.equal(found, draw(logits, rows).tokens), (found, draw(logits, rows).tokens)
    assert found[[0, 5]].tolist() == [5, 0]
    assert found[3] >= vocabulary - 2
    likeliest.fill_(False)
    first = [each[:5] for each in (rows.seeds, rows.positions, rows.temperatures)]
    found = sampling_fast.sample(logits[:5], *first, rows.words)
    assert torch.equal(found, draw(logits, rows).tokens[:5])
    logits[2, 17] = torch.nan
    assert sampling_fast.sample(logits, rows.seeds, rows.positions, rows.temperatures, rows.words)[2] == 17


INTERPRETED: dict[str, Callable[[], None]] = {
    "decodes": lambda: decodes("cpu", torch.float32, SHAPES, 131),
    "decodes in fp16": lambda: decodes("cpu", torch.float16, SHAPES[:1], 70),  # it has no products in bf16
    "chunks": lambda: chunks("cpu", torch.float32, SHAPES, 97),
    "a mixed step": lambda: mixed("cpu", torch.float32),
    "norms": lambda: norms("cpu", torch.float32, 52, 20),
    "norms in bf16": lambda: norms("cpu", torch.bfloat16, 64, 20),
    "turns": lambda: turns("cpu", torch.float32, False),
    "turns of normed heads": lambda: turns("cpu", torch.float32, True),
    "gates": lambda: gates("cpu", torch.float32, 1100),
    "noise": lambda: noises("cpu", torch.float32, False),
    "draws": lambda: draws("cpu", torch.float32, 2500),
    "draws in bf16": lambda: draws("cpu", torch.bfloat16, 1024),
}


def mend_interpreter() -> None:
    """Its loops turn arrays of one number into an int in a way that numpy 2.4 refuses (Triton 3.6)."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended


def main() -> None:
    torch.set_num_threads(1)
    mend_interpreter()
    attention_fast.PROGRAMS_WANTED = 24  # each program is slow here
    found: dict[str, str | None] = {}
    for name, check in INTERPRETED.items():
        torch.manual_seed(1)
        try:
            check()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
