"""The engine's parameters by their canonical names: of which Hugging Face tensors each is made, and filling them.

Always true: what is multiplied by the same input is one parameter, rows below rows (q, k, v; gate, up). A rank of a
tensor-parallel engine has whole heads and whole inner columns: rows of qkv and gate_up, columns of o and down; all
else is the same on every rank. A tied head has no parameter: `embed` is used. Filled memory is written through and
through, and nowhere beyond; besides it no more than one chunk of a tensor is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.checkpoint import Checkpoint, OnProgress, tensor_shapes
from holdfast.engines.torch.files.config import ModelConfig

if TYPE_CHECKING:  # a model is looked at before torch is loaded
    import torch

CHUNK_BYTES = 32 * 2**20  # of fp32 held beside the memory given; larger chunks load no faster


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """The tensor, rows and columns that some rows of a parameter come from."""

    name: str
    rows: tuple[int, int]
    width: int  # of the tensor's rows; 1 of a vector's
    columns: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    parts: tuple[ParameterPart, ...]  # from top to bottom


# parameter -> the tensors it is made of, and whether ranks share out its rows, its columns, or nothing
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_LAYER: dict[str, tuple[tuple[str, ...], str]] = {
    "norm_1": (("input_layernorm.weight",), ""),
    "qkv": (tuple(f"{name}.weight" for name in _QKV), "rows"),
    "o": (("self_attn.o_proj.weight",), "columns"),
    "norm_2": (("post_attention_layernorm.weight",), ""),
    "gate_up": (tuple(f"{name}.weight" for name in _GATE_UP), "rows"),
    "down": (("mlp.down_proj.weight",), "columns"),
    "qkv_bias": (tuple(f"{name}.bias" for name in _QKV), "rows"),
    "q_norm": (("self_attn.q_norm.weight",), ""),
    "k_norm": (("self_attn.k_norm.weight",), ""),
    "o_bias": (("self_attn.o_proj.bias",), ""),
    "gate_up_bias": (tuple(f"{name}.bias" for name in _GATE_UP), "rows"),
    "down_bias": (("mlp.down_proj.bias",), ""),
}


def parameters(config: ModelConfig, rank: int = 0, ranks: int = 1) -> list[Parameter]:
    """Return one rank's parameters, in the order the model uses them. Shapes are the same on every rank."""
    assert 0 <= rank < ranks
    check_ranks(config, ranks)
    table: dict[str, tuple[tuple[str, ...], str]] = {"embed": (("model.embed_tokens.weight",), "")}
    for layer in range(config.layers):
        for name, (tensors, shared) in _LAYER.items():
            table[f"layer.{layer}.{name}"] = tuple(f"model.layers.{layer}.{each}" for each in tensors), shared
    table |= {"norm": (("model.norm.weight",), ""), "head": (("lm_head.weight",), "")}
    shapes, found = tensor_shapes(config), []
    for name, (tensors, shared) in table.items():
        if tensors[0] in shapes:  # the family has it
            parts = tuple(_part(each, shapes[each], shared, rank, ranks) for each in tensors)
            rows, columns = sum(last - first for first, last in (part.rows for part in parts)), parts[0].columns
            found.append(Parameter(name, (rows, columns[1] - columns[0])[: len(shapes[tensors[0]])], parts))
    return found


def _part(name: str, shape: tuple[int, ...], shared: str, rank: int, ranks: int) -> ParameterPart:
    """Return a rank's part. Heads lie one after the other, so an even share of rows is an even share of heads."""
    rows, width = shape[0], prod(shape[1:])

    def share(size: int, how: str) -> tuple[int, int]:
        return (size * rank // ranks, size * (rank + 1) // ranks) if shared == how else (0, size)

    return ParameterPart(name, share(rows, "rows"), width, share(width, "columns"))


def count(config: ModelConfig, ranks: int = 1) -> int:
    """Return how many numbers one rank's parameters are."""
    return sum(prod(parameter.shape) for parameter in parameters(config, 0, ranks))


def load(
    checkpoint: Checkpoint, wanted: Sequence[Parameter], outs: Mapping[str, torch.Tensor], progress: OnProgress
) -> None:
    """Fill every parameter's memory, in its precision and on its device, telling how many bytes are written."""
    total, done = sum(outs[parameter.name].nbytes for parameter in wanted), 0
    progress("load", 0, total)
    for parameter in wanted:
        out, at = outs[parameter.name], 0
        assert out.shape == parameter.shape, f"{parameter.name} is {parameter.shape}, its place {tuple(out.shape)}"
        for part in parameter.parts:
            at = _fill(checkpoint, part, out, at)
        assert at == out.shape[0], f"{at} of {out.shape[0]} rows of {parameter.name} were written"
        done += out.nbytes
        progress("load", done, total)


def _fill(checkpoint: Checkpoint, part: ParameterPart, out: torch.Tensor, at: int) -> int:
    """Fill `out` from row `at` on; return the row after the last."""
    step = max(1, CHUNK_BYTES // (4 * part.width))
    for first in range(*part.rows, step):
        last = min(first + step, part.rows[1])
        chunk = checkpoint.read(part.name, first, last)
        out[at : at + last - first].copy_(chunk if chunk.ndim == 1 else chunk[:, slice(*part.columns)])
        at += last - first
    return at


def check_ranks(config: ModelConfig, ranks: int) -> None:
    """Raise UserError where ranks, real or virtual, cannot have whole heads and equal shares."""
    for what, there in (("KV heads", config.kv_heads), ("inner columns", config.intermediate)):
        if there % ranks:
            mend = "use a number that divides them"
            raise UserError(f"{ranks} ranks cannot share the model's {there} {what} evenly; {mend}")
