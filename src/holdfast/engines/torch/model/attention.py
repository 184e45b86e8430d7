"""KV pages as tensors, and attention of a step's rows over their texts' blocks in plain torch: gather, then call SDPA.

Always true: a row sees the positions of its own text up to its own, and no other memory: what a block holds beyond a
text's end is never multiplied into a result (or has weight zero and comes from the text itself). Under `exact` each
row is attended by its own call over just its positions: the same shapes in decode, in any chunk and after a resume.

Pages lie block by block, everything of one block in one piece: [block, layer, key or value, token, head, number]. So a
block id is an address whatever the number of blocks: the private blocks behind the pool need no second formula (a
layer-major order would put them in the midst of the pool's pages), a block moves with one copy, and a layer's view has
the shape that paged attention kernels take ([blocks, tokens, heads, size] with a stride of their own between blocks).
Gathering a text's blocks costs the same as from a layer-major order: each is one copy of `block_tokens` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from holdfast.engines.torch.model.batch import Batch, Chunk

LAYOUT = "block,layer,kv,token,head,size"


def kv_view(flat: torch.Tensor, layers: int, kv_heads: int, head_size: int, block_tokens: int) -> torch.Tensor:
    """Return the whole range, pool and private blocks, as [blocks, layers, 2, block_tokens, kv_heads, head_size].

    `flat` has the KV's dtype; what is left behind the last whole block is not used.
    """
    shape = (layers, 2, block_tokens, kv_heads, head_size)
    items = layers * 2 * block_tokens * kv_heads * head_size
    blocks = flat.numel() // items
    return flat[: blocks * items].view(blocks, *shape)


def write(kv: torch.Tensor, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
    """Write each row's keys and values ([rows, 2, kv_heads, head_size]) to its token's place."""
    kv[:, layer][blocks, :, offsets] = rows


def attend(queries: torch.Tensor, kv: torch.Tensor, batch: Batch, exact: bool) -> torch.Tensor:
    """Attend with `queries` [rows, heads, head_size] over one layer's `kv` [blocks, 2, block_tokens, kv_heads,
    head_size], in which the rows' own keys and values are written already. Return [rows, heads * head_size]."""
    keys, values = kv.unbind(1)
    outs: list[torch.Tensor] = []
    if batch.tables is not None:
        outs.append(_padded(queries[: batch.tables.shape[0]], keys, values, batch))
    alone = batch.alone
    for chunk, k, v in zip(alone, _gathered(keys, alone), _gathered(values, alone), strict=True):
        rows = queries[chunk.first : chunk.first + chunk.count]
        outs.append(_many(rows, k, v, chunk) if chunk.count > 1 and not exact else _each(rows, k, v, chunk))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _gathered(pages: torch.Tensor, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
    """Return each chunk's keys or values, [1, kv_heads, length, head_size], views of one copy: eight calls for a few
    blocks take longer than one for all. A share has the strides it would have alone, and starts at a whole block, so it
    gives the same bits."""
    if len(chunks) == 1:
        found = pages.index_select(0, chunks[0].blocks).flatten(0, 1)
        return [found[: chunks[0].length].transpose(0, 1).unsqueeze(0)]
    if not chunks:
        return []
    found = pages.index_select(0, torch.cat([chunk.blocks for chunk in chunks])).flatten(0, 1)
    firsts = accumulate((len(chunk.blocks) * pages.shape[1] for chunk in chunks[:-1]), initial=0)
    shares = [found[first : first + chunk.length] for first, chunk in zip(firsts, chunks, strict=True)]
    return [share.transpose(0, 1).unsqueeze(0) for share in shares]


def _each(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Attend one row at a time, over its own positions. Heads that share a KV head stand in for a text's queries."""
    count, heads, size = rows.shape
    shared = rows.view(count, 1, keys.shape[1], heads // keys.shape[1], size)
    outs = []
    for row in range(count):
        end = chunk.start + row + 1
        outs.append(sdpa(shared[row], keys[:, :, :end], values[:, :, :end]).reshape(1, heads * size))
    return outs[0] if count == 1 else torch.cat(outs)


def _many(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    queries = rows.transpose(0, 1).unsqueeze(0)
    out = sdpa(queries, keys, values, attn_mask=chunk.bias, is_causal=chunk.bias is None, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1).flatten(1)


def _padded(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Attend for all decodes at once, each over a block table of the same width."""
    assert batch.tables is not None
    count, heads, size = rows.shape
    kv_heads = keys.shape[2]
    table = batch.tables.flatten()
    found = [pages.index_select(0, table).view(count, -1, kv_heads, size).transpose(1, 2) for pages in (keys, values)]
    shared = rows.view(count, kv_heads, heads // kv_heads, size)
    return sdpa(shared, found[0], found[1], attn_mask=batch.bias).reshape(count, heads * size)
