"""A model out of thin air: random weights from a seed, always at hand, the same everywhere.

Always true: a weight depends on the seed, its tensor's name and its place alone: not on the machine, on how many rows
are read at once, or on who else reads. They are integers from a counter-based generator, scaled in fp32: no library's
idea of a normal distribution comes in. Rows are made side by side by every core, some 180 million weights a second
each: a model of 8 billion is read in less time than from most disks.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator, Philox

from holdfast.core.errors import UserError
from holdfast.engines.sim.vocabulary import EOS_TOKEN_ID, asset
from holdfast.engines.torch.files.checkpoint import tensor_shapes
from holdfast.engines.torch.files.config import ModelConfig

if TYPE_CHECKING:  # a model is looked at before torch is loaded
    import torch

TINY_SEED = 20_261

# Two ranks can share it evenly; the words are the sim's, so that what it says can at least be read.
TINY = ModelConfig(
    family="llama",
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_size=16,
    intermediate=160,
    vocabulary=6144,
    context_tokens_max=4096,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    tied=False,
    qkv_bias=False,
    qk_norm=False,
    eos_token_ids=(EOS_TOKEN_ID,),
    bos_token_id=None,
)

# Shapes of known models, for trials without their files. Their words are the sim's, so most of what they say means
# nothing; what a step costs, and what memory it needs, is the known model's.
_LLAMA_3 = replace(
    TINY,
    heads=32,
    kv_heads=8,
    vocabulary=128_256,
    context_tokens_max=8192,
    rope_theta=500_000.0,
)
SHAPES = {
    "1b": replace(_LLAMA_3, layers=16, hidden=2048, head_size=64, intermediate=8192, tied=True),
    "8b": replace(_LLAMA_3, layers=32, hidden=4096, head_size=128, intermediate=14_336),
}
RANDOM = "random:"

# Rows that have a counter of their own; a power of two, because it is part of what the weights are.
ROWS = 256
DRAW = 16  # weights of one tick of the counter: four words of 64 bits, 16 bits each
# Weights one thread makes at a stretch: 1 MiB of fp32, which a core's cache holds while it is scaled.
PIECE = 2**18
THREADS_MAX = 16  # past these the memory is the bound, not the cores

# Logits of about this spread: sampling has favourites, and the likeliest word is rarely a near tie.
HEAD_SPREAD = 3.0


_Rows = np.ndarray[tuple[int, int], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """Any shape, random weights. Norms are one; everything else keeps its input's size."""

    config: ModelConfig
    seed: int
    tokenizer_json: bytes = field(repr=False)
    chat_template: str | None = field(repr=False)
    bos_token: str = ""
    generation_defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        return f"sha256:{hashlib.sha256(f'random {self.seed} {self.config!r}'.encode()).hexdigest()}"

    @property
    def source(self) -> str:
        return f"random weights from the seed {self.seed}"

    def read(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        import torch

        shape = tensor_shapes(self.config)[name]
        last = shape[0] if last is None else last
        if name.endswith("norm.weight"):
            return torch.ones(last - first)
        rows = np.empty((last - first, math.prod(shape[1:])), np.float32)
        pieces = _pieces(first, last, rows.shape[1])
        threads = min(len(pieces), THREADS_MAX, os.cpu_count() or 1)
        if threads < 2:
            for piece in pieces:
                self._fill(name, piece, first, rows)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda piece: self._fill(name, piece, first, rows), pieces))
        return torch.from_numpy(rows).reshape(last - first, *shape[1:])

    def _fill(self, name: str, piece: tuple[int, int], first: int, rows: _Rows) -> None:
        """Some rows of one block, into `rows`, which begins with the tensor's row `first`: uniform numbers of the
        tensor's spread."""
        width = rows.shape[1]
        block, row = divmod(piece[0], ROWS)
        tick, skipped = divmod(row * width, DRAW)
        count = (piece[1] - piece[0]) * width
        own = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        draws = Generator(Philox(key=[self.seed, own], counter=[tick, block, 0, 0]))
        # `integers` and not `random_raw`, which has the same words but keeps other threads from running.
        words = draws.integers(0, 2**64 - 1, -(-(skipped + count) // 4), dtype=np.uint64, endpoint=True)
        out = rows[piece[0] - first : piece[1] - first].reshape(-1)
        out[:] = words.astype("<u8", copy=False).view("<u2")[skipped : skipped + count]
        out -= np.float32(32767.5)
        out *= np.float32(math.sqrt(12) / 65536)  # a standard deviation of one
        out *= np.float32(self._spread(name, width))

    def _spread(self, name: str, row: int) -> float:
        if name == "model.embed_tokens.weight":
            return 1.0
        return (HEAD_SPREAD if name == "lm_head.weight" else 1.0) / math.sqrt(row)


def _pieces(first: int, last: int, width: int) -> list[tuple[int, int]]:
    """Rows from `first` to `last`, cut for threads; none reaches over the end of a block."""
    step = max(1, PIECE // width)
    found = []
    while first < last:
        end = min(first + step, last, (first // ROWS + 1) * ROWS)
        found.append((first, end))
        first = end
    return found


def tiny(seed: int = TINY_SEED) -> RandomCheckpoint:
    """The smallest model that chats."""
    return random_checkpoint(TINY, seed)


def random_checkpoint(config: ModelConfig, seed: int = TINY_SEED) -> RandomCheckpoint:
    """Any shape with the sim's words; ids beyond them are never in a prompt, and mean nothing in an answer."""
    return RandomCheckpoint(config, seed, asset("tokenizer.json"), asset("chat_template.jinja").decode())


def shaped(name: str, seed: int = TINY_SEED) -> RandomCheckpoint:
    """The model of `random:SHAPE`; UserError names the shapes there are."""
    shape = name.removeprefix(RANDOM)
    if shape not in SHAPES:
        there = ", ".join(f"{RANDOM}{known}" for known in SHAPES)
        raise UserError(f"--model {name}: there is no shape {shape!r}; there are {there}")
    return random_checkpoint(SHAPES[shape], seed)
