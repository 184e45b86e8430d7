"""The KV pool of a model: how its blocks are shaped, and how many of them the memory given to it holds."""

from __future__ import annotations

import torch

from holdfast.core.errors import UserError
from holdfast.engines.torch.checkpoint import Checkpoint
from holdfast.engines.torch.paged import LAYOUT
from holdfast.engines.torch.settings import TorchSettings
from holdfast.engines.torch.stepper import threads_for
from holdfast.memory.kv.geometry import Geometry
from holdfast.memory.torch_tensors import dtype_name

GIB = 1024**3


def pool_geometry(checkpoint: Checkpoint, settings: TorchSettings, dtype: torch.dtype) -> Geometry:
    config = checkpoint.config
    sizes = (settings.block_tokens, config.layers, config.kv_heads, config.head_size)
    rope = f"{config.rope_theta:g} {config.rope_scaling}"
    # Exact bits hold for one arithmetic on one number of threads: KV of another is another pool's.
    layout = f"{LAYOUT}, exact on {threads_for(settings.threads)} threads" if settings.exact else LAYOUT
    one = Geometry(checkpoint.identity, dtype_name(dtype), *sizes, block_count=1, rope=rope, layout=layout)
    count = int(settings.kv_gib * GIB) // one.block_bytes
    if count < 2:
        raise UserError(f"kv_gib {settings.kv_gib:g} holds no KV block of {one.block_bytes} bytes; give it more")
    return Geometry(checkpoint.identity, dtype_name(dtype), *sizes, block_count=count, rope=rope, layout=layout)
