"""The model's parameters by their canonical names, and the shapes one rank holds.

Always true: what is multiplied by the same input is one parameter (rows q, then k, then v; gate, then up). A rank of a
tensor-parallel engine has whole heads and whole inner columns: rows of qkv and gate_up, columns of o and down; all
else is the same on every rank. A tied head has no parameter: `embed` is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.config import ModelConfig

if TYPE_CHECKING:  # a model is looked at before torch is loaded
    import torch


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    shape: tuple[int, ...]


def parameters(config: ModelConfig, rank: int = 0, ranks: int = 1) -> list[Parameter]:
    """One rank's, in the order the model uses them. Shapes are the same on every rank."""
    assert 0 <= rank < ranks
    check_ranks(config, ranks)
    embed = (config.vocabulary, config.hidden)
    found = [Parameter("embed", embed)]
    for layer in range(config.layers):
        found += [Parameter(f"layer.{layer}.{name}", shape) for name, shape in _layer(config, ranks).items()]
    found.append(Parameter("norm", (config.hidden,)))
    return found if config.tied else [*found, Parameter("head", embed)]


def _layer(config: ModelConfig, ranks: int) -> dict[str, tuple[int, ...]]:
    heads, kv_heads = config.heads // ranks, config.kv_heads // ranks
    qkv = (heads + 2 * kv_heads) * config.head_size
    inner = config.intermediate // ranks
    optional = {
        "qkv_bias": ((qkv,), config.qkv_bias),
        "q_norm": ((config.head_size,), config.qk_norm),
        "k_norm": ((config.head_size,), config.qk_norm),
        "o_bias": ((config.hidden,), config.o_bias),
        "gate_up_bias": ((2 * inner,), config.mlp_bias),
        "down_bias": ((config.hidden,), config.mlp_bias),
    }
    return {
        "norm_1": (config.hidden,),
        "qkv": (qkv, config.hidden),
        "o": (config.hidden, heads * config.head_size),
        "norm_2": (config.hidden,),
        "gate_up": (2 * inner, config.hidden),
        "down": (config.hidden, inner),
    } | {name: shape for name, (shape, there) in optional.items() if there}


def bytes_needed(config: ModelConfig, dtype: torch.dtype, ranks: int = 1) -> int:
    """Of one rank's parameters, without what slabs add for alignment."""
    return sum(prod(parameter.shape) for parameter in parameters(config, 0, ranks)) * dtype.itemsize


def check_ranks(config: ModelConfig, ranks: int) -> None:
    """UserError where ranks, real or virtual, cannot have whole heads and equal shares."""
    for what, count in (("KV heads", config.kv_heads), ("inner columns", config.intermediate)):
        if count % ranks:
            mend = "use a number that divides them"
            raise UserError(f"{ranks} ranks cannot share the model's {count} {what} evenly; {mend}")
