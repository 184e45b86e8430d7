"""From Hugging Face's tensors to the engine's fused parameters, one rank's share of them, into memory that is given.

Always true: `out` is written through and through, and nowhere beyond; besides it no more than one chunk of a tensor is
held. Several tensors that are multiplied by the same input are one parameter, rows below rows: q, k, v; gate, up. A
rank has its share of the heads and of the inner columns: rows of qkv and gate_up, columns of o and down.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.engines.torch.files.checkpoint import Checkpoint, Progress, tensor_shapes
from holdfast.engines.torch.files.config import ModelConfig
from holdfast.engines.torch.model.parameters import Parameter, check_ranks

CHUNK_BYTES = 32 * 2**20  # of fp32 held beside `out`; larger chunks load no faster


@dataclass(frozen=True, slots=True)
class Part:
    """Where some rows of a parameter come from. `columns`: None for all, and for a vector."""

    name: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None


# parameter -> the tensors it is made of, and whether ranks share out its rows, its columns, or nothing
_WHOLE = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_LAYER: dict[str, tuple[tuple[str, ...], str]] = {
    "qkv": (tuple(f"{name}.weight" for name in _QKV), "rows"),
    "qkv_bias": (tuple(f"{name}.bias" for name in _QKV), "rows"),
    "q_norm": (("self_attn.q_norm.weight",), ""),
    "k_norm": (("self_attn.k_norm.weight",), ""),
    "o": (("self_attn.o_proj.weight",), "columns"),
    "o_bias": (("self_attn.o_proj.bias",), ""),
    "gate_up": (tuple(f"{name}.weight" for name in _GATE_UP), "rows"),
    "gate_up_bias": (tuple(f"{name}.bias" for name in _GATE_UP), "rows"),
    "down": (("mlp.down_proj.weight",), "columns"),
    "down_bias": (("mlp.down_proj.bias",), ""),
    "norm_1": (("input_layernorm.weight",), ""),
    "norm_2": (("post_attention_layernorm.weight",), ""),
}


def parts(config: ModelConfig, name: str, rank: int = 0, ranks: int = 1) -> list[Part]:
    """What a canonical parameter is made of, from top to bottom."""
    assert 0 <= rank < ranks
    check_ranks(config, ranks)
    shapes = tensor_shapes(config)
    if name in _WHOLE:
        return [Part(_WHOLE[name], (0, shapes[_WHOLE[name]][0]))]
    layer = re.fullmatch(r"layer\.(\d+)\.(\w+)", name)
    assert layer is not None, f"no parameter is called {name}"
    names, shared = _LAYER[layer[2]]
    return [_part(f"model.layers.{layer[1]}.{tensor}", shapes, shared, rank, ranks) for tensor in names]


def _part(name: str, shapes: Mapping[str, tuple[int, ...]], shared: str, rank: int, ranks: int) -> Part:
    shape = shapes[name]
    if shared == "rows":
        return Part(name, _share(shape[0], rank, ranks))
    return Part(name, (0, shape[0]), _share(shape[1], rank, ranks) if shared == "columns" and ranks > 1 else None)


def _share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Heads lie one after the other, so an even share of rows is an even share of heads."""
    return size * rank // ranks, size * (rank + 1) // ranks


def fill(checkpoint: Checkpoint, parameter: Parameter, out: torch.Tensor, rank: int = 0, ranks: int = 1) -> None:
    """Write one parameter into `out`, in the precision and on the device of `out`."""
    made_of = parts(checkpoint.config, parameter.name, rank, ranks)
    assert out.shape == parameter.shape, f"{parameter.name} is {parameter.shape}, its place {tuple(out.shape)}"
    at = 0
    for part in made_of:
        at = _fill_part(checkpoint, part, out, at)
    assert at == out.shape[0], f"{at} of {out.shape[0]} rows of {parameter.name} were written"


def _fill_part(checkpoint: Checkpoint, part: Part, out: torch.Tensor, at: int) -> int:
    width = out[0].numel() if part.columns is None else tensor_shapes(checkpoint.config)[part.name][1]
    step = max(1, CHUNK_BYTES // (4 * width))
    for first in range(*part.rows, step):
        last = min(first + step, part.rows[1])
        chunk = checkpoint.read(part.name, first, last)
        out[at : at + last - first].copy_(chunk if part.columns is None else chunk[:, slice(*part.columns)])
        at += last - first
    return at


def load(
    checkpoint: Checkpoint,
    parameters: Sequence[Parameter],
    outs: Mapping[str, torch.Tensor],
    progress: Progress,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Fill every parameter's memory, by name, telling how many bytes of it are written."""
    total, done = sum(outs[parameter.name].nbytes for parameter in parameters), 0
    progress("load", 0, total)
    for parameter in parameters:
        out = outs[parameter.name]
        fill(checkpoint, parameter, out, rank, ranks)
        done += out.nbytes
        progress("load", done, total)
