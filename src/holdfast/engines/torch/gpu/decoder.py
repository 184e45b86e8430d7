"""The forward pass on a GPU: the products of `model.forward`, everything between them in fused kernels.

Always true: the same rows, weights and pages as `model.forward`, and the same results up to rounding; nothing is read
beyond a text's end, so no block needs clearing. Imported only where there is a GPU: triton compiles for one. Not for
`exact`: split sums depend on how many rows run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from holdfast.engines.torch.gpu.kernels_attention import attend
from holdfast.engines.torch.gpu.kernels_rows import add_norm, silu_mul, turn_and_write
from holdfast.engines.torch.model.batch import Batch
from holdfast.engines.torch.model.bound import Model
from holdfast.engines.torch.model.linear import linear, linear_summed


@torch.inference_mode()
def forward_on_gpu(model: Model, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
    """As `model.forward`."""
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
        delta = linear_summed(attend(queries, pages, batch), layer.o, False, pieces.o, model.all_reduce)
        delta = delta if layer.o_bias is None else delta.add_(layer.o_bias)
        normed = add_norm(hidden, delta, layer.norm_2, eps)
        gate_up = linear(normed, layer.gate_up, layer.gate_up_bias, False, pieces.gate_up)
        delta = linear_summed(silu_mul(gate_up), layer.down, False, pieces.down, model.all_reduce)
        delta = delta if layer.down_bias is None else delta.add_(layer.down_bias)
    if batch.last is not None:
        hidden = hidden.index_select(0, batch.last)
        delta = delta.index_select(0, batch.last) if delta is not None else None
    return add_norm(hidden, delta, model.norm, eps)
