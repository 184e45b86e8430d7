"""A rank's parameters bound to their places in a decoder: what the forward pass reads, on a CPU and on a GPU.

Always true: weights are used where they lie (the vault's memory), never copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from holdfast.engines.torch.files.config import ModelConfig
from holdfast.engines.torch.model.linear import FAST, AllReduce, Arithmetic, Cuts, cuts
from holdfast.engines.torch.model.parameters import check_ranks, parameters
from holdfast.engines.torch.model.rope import Rope, rope_tables


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer's parameters under their names; None where the family has none."""

    norm_1: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    norm_2: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Pieces:
    """How `exact` cuts each product that ranks share out."""

    qkv: Cuts
    o: Cuts
    gate_up: Cuts
    down: Cuts


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A rank's parameters, bound. `heads` and `kv_heads` are the rank's own."""

    config: ModelConfig
    embed: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor
    rope: Rope
    heads: int
    kv_heads: int
    exact: bool
    pieces: Pieces
    all_reduce: AllReduce | None


def bind(
    tensors: Mapping[str, torch.Tensor],
    config: ModelConfig,
    *,
    positions_max: int,
    arithmetic: Arithmetic = FAST,
    ranks: int = 1,
    all_reduce: AllReduce | None = None,
) -> Model:
    """A model over a rank's tensors by canonical names; texts may be `positions_max` tokens long. With several ranks,
    `all_reduce` sums over them (under `exact` by `tree_sum`, in the order of ranks)."""
    assert (ranks > 1) == (all_reduce is not None), "several ranks, and only they, sum over one another"
    for parameter in parameters(config, 0, ranks):
        found = tuple(tensors[parameter.name].shape)
        assert found == parameter.shape, f"{parameter.name} is {found}, not {parameter.shape}"
    embed = tensors["embed"]
    return Model(
        config=config,
        embed=embed,
        layers=tuple(_layer(tensors, f"layer.{number}.") for number in range(config.layers)),
        norm=tensors["norm"],
        head=embed if config.tied else tensors["head"],
        rope=rope_tables(config, positions_max, embed.dtype, embed.device),
        heads=config.heads // ranks,
        kv_heads=config.kv_heads // ranks,
        exact=arithmetic.exact,
        pieces=_pieces(config, arithmetic, ranks),
        all_reduce=all_reduce,
    )


def arithmetic_for(config: ModelConfig, exact: bool, ranks: int) -> Arithmetic:
    """Under `exact` one rank sums in two slices wherever two ranks could share the model, so that both give the same
    bits; more ranks sum in slices of their own. `fast` has none."""
    halves = ranks == 1 and config.kv_heads % 2 == 0 and config.intermediate % 2 == 0
    return Arithmetic(exact, 2 if exact and halves else ranks)


def _layer(tensors: Mapping[str, torch.Tensor], prefix: str) -> Layer:
    return Layer(**{name.removeprefix(prefix): held for name, held in tensors.items() if name.startswith(prefix)})


def _pieces(config: ModelConfig, arithmetic: Arithmetic, ranks: int) -> Pieces:
    slices = arithmetic.virtual_ranks if arithmetic.exact else ranks
    check_ranks(config, slices)
    each = slices // ranks
    if slices % ranks or (ranks > 1 and each & (each - 1)):
        raise ValueError(f"{slices} slices cannot be summed by {ranks} ranks as one tree: use {ranks} times 1, 2, 4, …")
    q, k = config.heads // ranks * config.head_size, config.kv_heads // ranks * config.head_size
    inner, mine = config.intermediate // ranks, slices // ranks
    if slices == 1:  # nothing to be equal to: the fewest calls
        return Pieces((0, q + 2 * k), (0, q), (0, 2 * inner), (0, inner))
    return Pieces(cuts((q, k, k), mine), cuts((q,), mine), cuts((inner, inner), mine), cuts((inner,), mine))
