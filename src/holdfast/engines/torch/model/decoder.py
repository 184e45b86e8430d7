"""The forward pass of one dense Llama-family decoder, on one rank, over paged KV.

Always true: weights are used where they lie (the vault's memory), never copied; a step writes its rows' keys and values
to their blocks and nothing else; rows of different texts never meet. With `Arithmetic.exact`, a position's hidden state
has the same bits however its text was chunked, batched, resumed, or shared out over ranks (linear.py, attention.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from holdfast.engines.torch.files.config import ModelConfig
from holdfast.engines.torch.model.attention import attend
from holdfast.engines.torch.model.batch import Batch
from holdfast.engines.torch.model.linear import FAST, AllReduce, Arithmetic, Cuts, cuts, gated, linear, linear_summed
from holdfast.engines.torch.model.pages import clear, write
from holdfast.engines.torch.model.parameters import check_ranks, parameters
from holdfast.engines.torch.model.rope import Rope, rope_tables, rotate


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


@torch.inference_mode()
def forward(model: Model, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
    """Compute a step's rows and write their KV. `kv` is the whole range, as `kv_view` gives it. Returns the normed
    hidden state of each segment's last position: [segments, hidden]."""
    if kv.is_cuda and not model.exact:
        from holdfast.engines.torch.gpu.decoder import forward_on_gpu  # loads triton

        return forward_on_gpu(model, batch, kv)
    hidden = F.embedding(batch.tokens, model.embed)
    if batch.begun is not None:
        clear(kv, batch.begun)
    turn = model.rope.at(batch.positions)
    for number, layer in enumerate(model.layers):
        hidden = hidden.add_(_attention(model, layer, number, hidden, turn, batch, kv))
        hidden = hidden.add_(_mlp(model, layer, hidden))
    last = hidden if batch.last is None else hidden.index_select(0, batch.last)
    return _normed(last, model.norm, model.config.norm_eps)


@torch.inference_mode()
def logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """[segments, vocabulary], of the rows that draw a token. The head is a fifth of a small model."""
    return linear(hidden, model.head, None, model.exact, (0, model.head.shape[0]))


def _attention(
    model: Model,
    layer: Layer,
    number: int,
    hidden: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
    batch: Batch,
    kv: torch.Tensor,
) -> torch.Tensor:
    eps, rows = model.config.norm_eps, hidden.shape[0]
    normed = _normed(hidden, layer.norm_1, eps)
    qkv = linear(normed, layer.qkv, layer.qkv_bias, model.exact, model.pieces.qkv)
    heads = qkv.view(rows, model.heads + 2 * model.kv_heads, model.config.head_size)
    turned = heads[:, : model.heads + model.kv_heads]
    if layer.q_norm is not None and layer.k_norm is not None:
        turned[:, : model.heads] = _normed(turned[:, : model.heads], layer.q_norm, eps)
        turned[:, model.heads :] = _normed(turned[:, model.heads :], layer.k_norm, eps)
    rotate(turned, *turn)
    # k and v lie side by side in a row of qkv, as in a block.
    both = heads[:, model.heads :].view(rows, 2, model.kv_heads, model.config.head_size)
    write(kv, number, batch.blocks, batch.offsets, both)
    out = attend(heads[:, : model.heads], kv[:, number], batch, model.exact)
    out = linear_summed(out, layer.o, model.exact, model.pieces.o, model.all_reduce)
    return out if layer.o_bias is None else out.add_(layer.o_bias)


def _mlp(model: Model, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
    normed = _normed(hidden, layer.norm_2, model.config.norm_eps)
    gate_up = linear(normed, layer.gate_up, layer.gate_up_bias, model.exact, model.pieces.gate_up)
    inner = gated(gate_up, model.exact, len(model.pieces.down) - 1)
    out = linear_summed(inner, layer.down, model.exact, model.pieces.down, model.all_reduce)
    return out if layer.down_bias is None else out.add_(layer.down_bias)


def _normed(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(rows, (rows.shape[-1],), weight, eps)
