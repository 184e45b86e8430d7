"""A model out of thin air: random weights from a seed, always at hand, the same everywhere.

Always true: a weight depends on the seed, its tensor's name and its place alone: not on the machine, on how many rows
are read at once, or on who else reads. They are integers from a counter-based generator, scaled in fp32: no library's
idea of a normal distribution comes in.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.random import Philox

from holdfast.engines.sim.vocabulary import EOS_TOKEN_ID, asset
from holdfast.engines.torch.checkpoint import tensor_shapes
from holdfast.engines.torch.config import ModelConfig

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

# Rows generated at a time; a power of two, because it is part of what the weights are.
ROWS = 256

# Logits of about this spread: sampling has favourites, and the likeliest word is rarely a near tie.
HEAD_SPREAD = 3.0


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """Any shape, random weights. Norms are one; everything else keeps its input's size."""

    config: ModelConfig
    seed: int
    tokenizer_json: bytes = field(repr=False)
    chat_template: str | None = field(repr=False)

    @property
    def identity(self) -> str:
        return f"sha256:{hashlib.sha256(f'random {self.seed} {self.config!r}'.encode()).hexdigest()}"

    @property
    def source(self) -> str:
        return f"random weights from the seed {self.seed}"

    def read(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        shape = tensor_shapes(self.config)[name]
        last = shape[0] if last is None else last
        if name.endswith("norm.weight"):
            return torch.ones(last - first)
        row = math.prod(shape[1:])
        start = first // ROWS
        blocks = [self._block(name, block, row) for block in range(start, -(-last // ROWS))]
        rows = np.concatenate([np.empty((0, row), np.float32), *blocks])[first - start * ROWS : last - start * ROWS]
        return torch.from_numpy(rows * np.float32(self._spread(name, row))).reshape(last - first, *shape[1:])

    def _block(self, name: str, block: int, row: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """Rows of uniform numbers with a standard deviation of one."""
        own = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        draws = Philox(key=[self.seed, own], counter=[0, block, 0, 0])
        sixteen = draws.random_raw(ROWS * row // 4).astype("<u8", copy=False).view("<u2")
        return ((sixteen.astype(np.float32) - 32767.5) * np.float32(math.sqrt(12) / 65536)).reshape(ROWS, row)

    def _spread(self, name: str, row: int) -> float:
        if name == "model.embed_tokens.weight":
            return 1.0
        return (HEAD_SPREAD if name == "lm_head.weight" else 1.0) / math.sqrt(row)


def tiny(seed: int = TINY_SEED) -> RandomCheckpoint:
    """The smallest model that chats."""
    return random_checkpoint(TINY, seed)


def random_checkpoint(config: ModelConfig, seed: int = TINY_SEED) -> RandomCheckpoint:
    """Any shape with the sim's words; ids beyond them are never in a prompt, and mean nothing in an answer."""
    return RandomCheckpoint(config, seed, asset("tokenizer.json"), asset("chat_template.jinja").decode())
