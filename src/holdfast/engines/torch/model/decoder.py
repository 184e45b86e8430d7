"""Binds a rank's parameters to their places in a dense Llama-family decoder, and computes its forward pass.

Always true: weights are used where they lie (the vault's memory), never copied; a step writes its rows' keys and values
to their blocks and nothing else; rows of different texts never meet. With `Arithmetic.exact`, a position's hidden state
has the same bits however its text was chunked, batched, resumed, or shared out over ranks (linear.py, attention.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from holdfast.engines.torch.files.config import ModelConfig, RopeScaling
from holdfast.engines.torch.model.attention import attend, write
from holdfast.engines.torch.model.batch import Batch
from holdfast.engines.torch.model.linear import FAST, AllReduce, Arithmetic, Cuts, cuts, gated, linear, linear_summed
from holdfast.engines.torch.model.parameters import check_ranks, parameters


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """How far each pair of a head's numbers is turned at each position: tables of [positions, 1, head_size], made once
    in fp32, so that a row depends on its position alone. A pair is (i, i + head_size / 2), as Hugging Face lays heads
    out; sin's first half is negative, so that one `roll` rotates a head."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rope_tables(config: ModelConfig, positions: int, dtype: torch.dtype, device: torch.device) -> Rope:
    """Return the tables for the positions that the engine lets a text grow to, not for all that the model could."""
    frequencies, scale = _frequencies(config)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    tables = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    return Rope(*(table.to(device, dtype).unsqueeze(1) for table in tables))


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [rows, heads, head_size] in place. A fused product and sum would round otherwise where a vector ends."""
    turned = heads.roll(heads.shape[-1] // 2, -1).mul_(sin)
    return heads.mul_(cos).add_(turned)


def _frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Return the turns per position of each pair, and the factor of cos and sin."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    assert scaling.kind == "yarn", f"config.py lets no rope of the kind {scaling.kind} through"
    return _yarn(plain, scaling, config), scaling.attention_factor


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Keep quick turns, stretch slow ones, and mix those between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_context * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: torch.Tensor, scaling: RopeScaling, config: ModelConfig) -> torch.Tensor:
    """Scale as llama3 does, but with a mix that is a ramp over the dimensions."""
    size, theta = config.head_size, config.rope_theta

    def dimension(turns: float) -> float:
        return size * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0
    stretched = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)


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
class BoundModel:
    """A rank's parameters, bound to memory. `heads` and `kv_heads` are the rank's own."""

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
) -> BoundModel:
    """Return a model over a rank's tensors by canonical names; texts may be `positions_max` tokens long. With several
    ranks, `all_reduce` sums over them (under `exact` by `tree_sum`, in the order of ranks)."""
    assert (ranks > 1) == (all_reduce is not None), "several ranks, and only they, sum over one another"
    for parameter in parameters(config, 0, ranks):
        found = tuple(tensors[parameter.name].shape)
        assert found == parameter.shape, f"{parameter.name} is {found}, not {parameter.shape}"
    embed, layers = tensors["embed"], []
    for number in range(config.layers):
        prefix = f"layer.{number}."
        held = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        layers.append(Layer(**held))
    return BoundModel(
        config=config,
        embed=embed,
        layers=tuple(layers),
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
    """Return the arithmetic. Under `exact` one rank sums in two slices wherever two ranks could share the model, so
    that both give the same bits; more ranks sum in slices of their own. `fast` has none."""
    halves = ranks == 1 and config.kv_heads % 2 == 0 and config.intermediate % 2 == 0
    return Arithmetic(exact, 2 if exact and halves else ranks)


def _pieces(config: ModelConfig, arithmetic: Arithmetic, ranks: int) -> Pieces:
    slices = arithmetic.virtual_ranks if arithmetic.exact else ranks
    check_ranks(config, slices)
    mine = slices // ranks
    if slices % ranks or (ranks > 1 and mine & (mine - 1)):
        raise ValueError(f"{slices} slices cannot be summed by {ranks} ranks as one tree: use {ranks} times 1, 2, 4, …")
    q, k = config.heads // ranks * config.head_size, config.kv_heads // ranks * config.head_size
    inner = config.intermediate // ranks
    if slices == 1:  # nothing to be equal to: the fewest calls
        return Pieces((0, q + 2 * k), (0, q), (0, 2 * inner), (0, inner))
    return Pieces(cuts((q, k, k), mine), cuts((q,), mine), cuts((inner, inner), mine), cuts((inner,), mine))


@torch.inference_mode()
def forward(model: BoundModel, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
    """Compute a step's rows and write their KV. `kv` is the whole range, as `kv_view` gives it. Returns the normed
    hidden state of each segment's last position: [segments, hidden]."""
    if kv.is_cuda and not model.exact:
        return _forward_on_gpu(model, batch, kv)
    hidden = F.embedding(batch.tokens, model.embed)
    if batch.begun is not None:
        # What lies behind a text's end in its last block has weight zero where decodes are padded, and zero times an
        # old infinity is not zero.
        kv.index_fill_(0, batch.begun, 0)
    turn = model.rope.at(batch.positions)
    for number, layer in enumerate(model.layers):
        hidden = hidden.add_(_attention(model, layer, number, hidden, turn, batch=batch, kv=kv))
        hidden = hidden.add_(_mlp(model, layer, hidden))
    last = hidden if batch.last is None else hidden.index_select(0, batch.last)
    return _normed(last, model.norm, model.config.norm_eps)


@torch.inference_mode()
def logits(model: BoundModel, hidden: torch.Tensor) -> torch.Tensor:
    """Return [segments, vocabulary], of the rows that draw a token. The head is a fifth of a small model."""
    return linear(hidden, model.head, None, model.exact, (0, model.head.shape[0]))


def _attention(
    model: BoundModel,
    layer: Layer,
    number: int,
    hidden: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
    *,
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


def _mlp(model: BoundModel, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
    normed = _normed(hidden, layer.norm_2, model.config.norm_eps)
    gate_up = linear(normed, layer.gate_up, layer.gate_up_bias, model.exact, model.pieces.gate_up)
    inner = gated(gate_up, model.exact, len(model.pieces.down) - 1)
    out = linear_summed(inner, layer.down, model.exact, model.pieces.down, model.all_reduce)
    return out if layer.down_bias is None else out.add_(layer.down_bias)


def _normed(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(rows, (rows.shape[-1],), weight, eps)


@torch.inference_mode()
def _forward_on_gpu(model: BoundModel, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
    """Compute as `forward` does, everything between the products in fused kernels: the same rows, weights and pages,
    and the same results up to rounding. Nothing is read beyond a text's end, so no block needs clearing. Not for
    `exact`: split sums depend on how many rows run."""
    from holdfast.engines.torch.gpu import kernels_attention  # loads triton, which compiles for a GPU
    from holdfast.engines.torch.gpu.kernels_rows import add_norm, silu_mul, turn_and_write

    eps, rope, pieces = model.config.norm_eps, model.rope, model.pieces
    hidden = F.embedding(batch.tokens, model.embed)
    delta: torch.Tensor | None = None  # what the layer before adds, summed into `hidden` by the next norm
    for number, layer in enumerate(model.layers):
        pages = kv[:, number]
        normed = add_norm(hidden, delta, layer.norm_1, eps)
        qkv = linear(normed, layer.qkv, layer.qkv_bias, False, pieces.qkv)
        norms = (layer.q_norm, layer.k_norm, eps)
        queries = turn_and_write(
            qkv, model.heads, rope.cos, rope.sin, batch.positions, pages, batch.blocks, batch.offsets, *norms
        )
        delta = linear_summed(
            kernels_attention.attend(queries, pages, batch), layer.o, False, pieces.o, model.all_reduce
        )
        delta = delta if layer.o_bias is None else delta.add_(layer.o_bias)
        normed = add_norm(hidden, delta, layer.norm_2, eps)
        gate_up = linear(normed, layer.gate_up, layer.gate_up_bias, False, pieces.gate_up)
        delta = linear_summed(silu_mul(gate_up), layer.down, False, pieces.down, model.all_reduce)
        delta = delta if layer.down_bias is None else delta.add_(layer.down_bias)
    if batch.last is not None:
        hidden = hidden.index_select(0, batch.last)
        delta = delta.index_select(0, batch.last) if delta is not None else None
    return add_norm(hidden, delta, model.norm, eps)
