"""The forward pass of one dense Llama-family decoder, on one rank, over paged KV.

Always true: a step writes its rows' keys and values
to their blocks and nothing else; rows of different texts never meet. With `Arithmetic.exact`, a position's hidden state
has the same bits however its text was chunked, batched, resumed, or shared out over ranks (linear.py, attention.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from holdfast.engines.torch.model.attention import attend, clear, write
from holdfast.engines.torch.model.batch import Batch
from holdfast.engines.torch.model.bound import Layer, Model
from holdfast.engines.torch.model.linear import gated, linear, linear_summed
from holdfast.engines.torch.model.rope import rotate


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
        hidden = hidden.add_(_attention(model, layer, number, hidden, turn, batch=batch, kv=kv))
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


def _mlp(model: Model, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
    normed = _normed(hidden, layer.norm_2, model.config.norm_eps)
    gate_up = linear(normed, layer.gate_up, layer.gate_up_bias, model.exact, model.pieces.gate_up)
    inner = gated(gate_up, model.exact, len(model.pieces.down) - 1)
    out = linear_summed(inner, layer.down, model.exact, model.pieces.down, model.all_reduce)
    return out if layer.down_bias is None else out.add_(layer.down_bias)


def _normed(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(rows, (rows.shape[-1],), weight, eps)
