"""Defines a checkpoint, from files or random: its configuration, its text, and its tensors under Hugging Face names.

Always true: a checkpoint that was opened has every tensor its configuration asks for, in the right shape; a missing or
misshapen one was named when it was opened, not in the middle of a load. A random weight depends on the seed, its
tensor's name and its place alone: not on the machine, on how many rows are read at once, or on other readers. They are
integers from a counter-based generator, scaled in fp32, so no library's normal distribution is involved. Every core
makes rows, some 180 million weights a second each: a model of 8 billion is read in less time than from most disks.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator, Philox

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.config import ModelConfig
from holdfast.engines.torch.files.stored import Stored

if TYPE_CHECKING:  # a model is looked at before torch is loaded
    import torch

# Takes what is going on ("fetch", "hash", "load"), the bytes done, and all there are to do, or None if unknown.
OnProgress = Callable[[str, int, int | None], None]

NAMES_SHOWN_MAX = 4  # missing tensors in one message: enough to see the pattern

# Rows that have a counter of their own; a power of two, because it is part of what the weights are.
ROWS = 256
DRAW = 16  # weights of one tick of the counter: four words of 64 bits, 16 bits each
# Weights one thread makes at a stretch: 1 MiB of fp32, which a core's cache holds while it is scaled.
PIECE = 2**18
THREADS_MAX = 16  # past these the memory is the bound, not the cores

# Logits of about this spread: sampling has favourites, and the likeliest word is rarely a near tie.
HEAD_SPREAD = 3.0


@dataclass(frozen=True, slots=True)
class FileCheckpoint:
    """A checkpoint with tensors in files."""

    config: ModelConfig
    # Of the weights' content and the configuration: equal for equal weights, wherever they lie. Empty: not known yet,
    # the files were only looked at (`identity.identified`).
    identity: str
    tokenizer_json: bytes = field(repr=False)
    chat_template: str | None = field(repr=False)
    source: str  # where it came from, for people
    tensors: Mapping[str, Stored] = field(repr=False)
    bos_token: str = ""  # the text of its begin-of-text token, for chat templates; empty without one
    # What its makers want a silent request to get, by the names of a model card.
    generation_defaults: Mapping[str, float] = field(default_factory=dict)

    def read(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Return rows of a tensor, in stored precision, or fp32 where that is block-quantised."""
        return self.tensors[name].read(first, last)


_Rows = np.ndarray[tuple[int, int], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """A checkpoint of any shape with random weights: norms are one; everything else keeps its input's size."""

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
        """Fill some rows of one block into `rows`, which begins with row `first`, with uniform numbers."""
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
        if name != "model.embed_tokens.weight":
            out *= np.float32((HEAD_SPREAD if name == "lm_head.weight" else 1.0) / math.sqrt(width))


def _pieces(first: int, last: int, width: int) -> list[tuple[int, int]]:
    """Return the rows from `first` to `last`, cut for threads; none reaches over the end of a block."""
    step = max(1, PIECE // width)
    found = []
    while first < last:
        end = min(first + step, last, (first // ROWS + 1) * ROWS)
        found.append((first, end))
        first = end
    return found


Checkpoint = FileCheckpoint | RandomCheckpoint


@lru_cache(maxsize=8)  # asked for with every tensor that is read; a process has one model, or a few in a test
def tensor_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Return every tensor a model of this shape has, under its Hugging Face name."""
    hidden, inner = config.hidden, config.intermediate
    q, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    projections = {
        "self_attn.q_proj": ((q, hidden), config.qkv_bias),
        "self_attn.k_proj": ((kv, hidden), config.qkv_bias),
        "self_attn.v_proj": ((kv, hidden), config.qkv_bias),
        "self_attn.o_proj": ((hidden, q), config.o_bias),
        "mlp.gate_proj": ((inner, hidden), config.mlp_bias),
        "mlp.up_proj": ((inner, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, inner), config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_size, "self_attn.k_norm": config.head_size}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary, hidden)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for name, (shape, biased) in projections.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if biased:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocabulary, hidden)
    return shapes


def checked_tensors(tensors: Mapping[str, Stored], config: ModelConfig, where: Path) -> dict[str, Stored]:
    """Return those of `tensors` that the model is made of, checked; UserError names what is missing or misshapen."""
    shapes = tensor_shapes(config)
    missing = [name for name in shapes if name not in tensors]
    if missing:
        more = f" and {len(missing) - NAMES_SHOWN_MAX} more" if len(missing) > NAMES_SHOWN_MAX else ""
        raise UserError(f"{where} lacks the tensors {', '.join(missing[:NAMES_SHOWN_MAX])}{more}")
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"{where}: the tensor {name} has the shape {list(tensors[name].shape)}; "
                f"by the model's configuration it should be {list(shape)}"
            )
    return {name: tensors[name] for name in shapes}
