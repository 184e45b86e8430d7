"""KV pages as tensors: where a block's keys and values lie, and how a step writes and finds them.

Block by block, everything of one block in one piece: [block, layer, key or value, token, head, number]. So a block id
is an address whatever the number of blocks: the private blocks behind the pool need no second formula (a layer-major
order would put them in the midst of the pool's pages), a block moves with one copy, and a layer's view has the shape
that paged attention kernels take ([blocks, tokens, heads, size] with a stride of their own between blocks). Gathering a
text's blocks costs the same as from a layer-major order: each is one copy of `block_tokens` rows either way.
"""

from __future__ import annotations

import torch

LAYOUT = "block,layer,kv,token,head,size"


def kv_view(flat: torch.Tensor, layers: int, kv_heads: int, head_size: int, block_tokens: int) -> torch.Tensor:
    """The whole range, pool and private blocks, as [blocks, layers, 2, block_tokens, kv_heads, head_size].

    `flat` has the KV's dtype; what is left behind the last whole block is not used."""
    shape = (layers, 2, block_tokens, kv_heads, head_size)
    items = layers * 2 * block_tokens * kv_heads * head_size
    blocks = flat.numel() // items
    return flat[: blocks * items].view(blocks, *shape)


def write(kv: torch.Tensor, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
    """Each row's keys and values ([rows, 2, kv_heads, head_size]) to its token's place."""
    kv[:, layer][blocks, :, offsets] = rows


def clear(kv: torch.Tensor, blocks: torch.Tensor) -> None:
    """What lies behind a text's end in its last block has weight zero where decodes are padded, and zero times an old
    infinity is not zero. So a block is cleared when a text begins to write it."""
    kv.index_fill_(0, blocks, 0)
