"""The Triton kernels on a real GPU, against the plain torch path: at real shapes, in graphs, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
checks = pytest.importorskip("tests.rigs.engines.kernel_checks", reason="triton is not installed here")
attention, between, sampling = checks.attention_fast, checks.rows_fast, checks.sampling_fast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU here"),
]

GPU = "cuda"
LLAMA_8B = (32, 8, 128, 16)  # heads, kv_heads, head_size, block_tokens
QWEN_7B = (28, 4, 128, 16)
DTYPES = [torch.bfloat16, torch.float32]


def shapes(dtype: torch.dtype) -> list[tuple[int, int, int, int]]:
    """fp32 is for small models: large heads would not fit into a processor's shared memory."""
    large = [LLAMA_8B, QWEN_7B, (14, 2, 64, 16)] if dtype is torch.bfloat16 else []
    return [*large, *checks.SHAPES]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes(dtype: torch.dtype) -> None:
    """Any lengths, splits, tiles and table dtypes give plain attention's answer; garbage behind a text is not read."""
    checks.decodes(GPU, dtype, shapes(dtype), 2000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks(dtype: torch.dtype) -> None:
    """A chunk with a history before it gives plain attention's answer."""
    checks.chunks(GPU, dtype, shapes(dtype), 500)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mixed_step(dtype: torch.dtype) -> None:
    """Decodes and chunks of one step keep their order and their texts."""
    checks.mixed(GPU, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(dtype: torch.dtype) -> None:
    """Norm, rotation, KV write and gate are the plain path's, at a model's widths and at odd ones."""
    for width in (52, 4096, 8192):
        checks.norms(GPU, dtype, width, 256)
    checks.turns(GPU, dtype, False)
    checks.turns(GPU, dtype, True)
    for width in (1100, 14336):
        checks.gates(GPU, dtype, width)


def test_noise_has_the_same_bits() -> None:
    """On one GPU the kernel's noise is torch's, bit for bit: who draws may change between steps of one text."""
    checks.noises(GPU, torch.float32, True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws(dtype: torch.dtype) -> None:
    """Greedy and drawn rows get the plain path's tokens."""
    for vocabulary in (1024, 2500, 128_256):
        checks.draws(GPU, dtype, vocabulary)


def test_a_graph_reads_lengths_when_it_runs() -> None:
    """A captured decode, run again after positions and tables changed in place, attends to the new texts."""
    pages = checks.Pages(GPU, torch.bfloat16, [700, 90, 1, 333], (16, 8, 128))
    queries = checks.random_queries(2, 32, 128, GPU, torch.bfloat16)
    tables, positions = pages.tables[:2].clone(), torch.tensor([699, 89], device=GPU)
    attention.decode_attention(queries, pages.layer, tables, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.decode_attention(queries, pages.layer, tables, positions)
    for first in (0, 2):
        tables.copy_(pages.tables[first : first + 2])
        positions.copy_(torch.tensor(pages.lengths[first : first + 2]) - 1)
        graph.replay()
        expected = [pages.alone(first + row, 1, queries[row : row + 1]) for row in range(2)]
        checks.near(out, torch.cat(expected), torch.bfloat16, first)


KERNELS = [
    attention._decode,
    attention._combine,
    attention._chunk,
    between._add_norm,
    between._turn_and_write,
    between._silu_mul,
    sampling._best_of_tile,
    sampling._best_of_row,
]


def compiled() -> int:
    return sum(len(cache[0]) for kernel in KERNELS for cache in kernel.device_caches.values())


def step(rows: int, length: int, width: int) -> None:
    """Every kernel once, as a step of so many decodes and a chunk does. Index tensors lie at odd addresses."""
    kv = torch.zeros(70, 2, 2, 16, 8, 128, dtype=torch.bfloat16, device=GPU)[:, 1]
    numbers = torch.zeros(4, rows + 1, dtype=torch.int64, device=GPU)
    positions, blocks, offsets = numbers[0, :rows] + length - 1, numbers[1, 1:], numbers[2, 1:]
    hidden = torch.zeros(rows, 4096, dtype=torch.bfloat16, device=GPU)
    weight = torch.ones(4096, dtype=torch.bfloat16, device=GPU)
    between.add_norm(hidden, None, weight, 1e-5)
    between.add_norm(hidden, hidden.clone(), weight, 1e-5)
    between.silu_mul(torch.zeros(rows, 2 * 14336, dtype=torch.bfloat16, device=GPU))
    turn = torch.ones(1024, 1, 128, dtype=torch.bfloat16, device=GPU)
    qkv = torch.zeros(rows, 48 * 128, dtype=torch.bfloat16, device=GPU)
    queries = between.turn_and_write(qkv, 32, turn, turn, positions, kv, blocks, offsets)
    tables = torch.zeros(rows, width, dtype=torch.int64, device=GPU)
    attention.decode_attention(queries, kv, tables, positions)
    piece = checks.SharePiece([0] * (rows + 1), length, [0] * 70)
    tiles = checks.kernel_batch([piece, piece], 16, torch.device(GPU), attention.tile_tokens(32, 8)).tiles
    attention.chunk_attention(queries.repeat(4, 1, 1), kv, tiles, queries.new_empty(4 * rows, 4096))
    words, ones = checks.noise.token_hashes(1000, GPU), torch.ones(rows, 1, device=GPU)
    logits = torch.zeros(rows, 1000, dtype=torch.bfloat16, device=GPU)
    sampling.sample(logits, blocks, positions, ones, words, ones.bool())
    torch.cuda.synchronize()


def test_sizes_seen_once_compile_nothing_more() -> None:
    """After one step at each power of two, no number of rows, length or table width makes a new kernel."""
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        step(rows, 100, 64)
    before = compiled()
    assert before > 0
    for rows, length, width in ((3, 1, 64), (1, 2, 61), (37, 999, 63), (200, 16, 64), (16, 17, 62), (255, 640, 64)):
        step(rows, length, width)
    assert compiled() == before
