"""The KV pool of a model: how its blocks are shaped, and how many of them the memory given to it holds.

Always true: the engines of one pair come to the same geometry, rank for rank, or they could not share the pool: it
follows from the model, the settings and the devices' sizes, never from what is free at the moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from msgspec import structs

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.checkpoint import Checkpoint
from holdfast.engines.torch.gpu.memory_plan import MemoryPlan, memory_plan
from holdfast.engines.torch.model.attention import LAYOUT
from holdfast.engines.torch.model.parameters import check_ranks
from holdfast.engines.torch.stepper import threads_for
from holdfast.kv.geometry import Geometry
from holdfast.memory.devices import Unsupported
from holdfast.memory.torch.tensors import dtype_name, torch_device
from holdfast.spec.engines import GIB, TorchSettings


def pool_geometry(checkpoint: Checkpoint, settings: TorchSettings, dtype: torch.dtype, rank: int = 0) -> Geometry:
    """One rank's pool of `settings.kv_gib`."""
    one = block_geometry(checkpoint, settings, dtype, rank)
    count = int(settings.kv_gib * GIB) // one.block_bytes
    if count < 2:
        raise UserError(f"kv_gib {settings.kv_gib:g} holds no KV block of {one.block_bytes} bytes; give it more")
    return replace(one, block_count=count)


def block_geometry(checkpoint: Checkpoint, settings: TorchSettings, dtype: torch.dtype, rank: int = 0) -> Geometry:
    """A pool of a single block: all that two engines must agree on but its size."""
    config, ranks = checkpoint.config, settings.ranks
    check_ranks(config, ranks)
    # Exact bits hold for one arithmetic on one number of threads: KV of another is another pool's.
    exact = f", exact on {threads_for(settings.threads)} threads" if settings.exact else ""
    return Geometry(
        checkpoint.identity,
        dtype_name(dtype),
        settings.block_tokens,
        config.layers,
        config.kv_heads // ranks,
        config.head_size,
        block_count=1,
        rank=rank,
        rank_count=ranks,
        rope=f"{config.rope_theta:g} {config.rope_scaling}",
        layout=f"{LAYOUT}{exact}",
    )


def settings_on(
    devices: Sequence[str], checkpoint: Checkpoint, wishes: TorchSettings, standbys: int, pairs: int = 1
) -> tuple[TorchSettings, MemoryPlan | None]:
    """What was asked for, with all that was left to the device worked out, and the plan behind it on a GPU.

    `devices` are the ranks', by name: the smallest decides. The plan is not checked: `settle` does, once it was shown.
    """
    check_ranks(checkpoint.config, wishes.ranks)
    try:
        places = [torch_device(name) for name in devices]
    except Unsupported as error:
        raise UserError(str(error)) from error
    is_gpu = places[0].type != "cpu"
    settings = wishes.for_device(is_gpu)
    if not is_gpu:
        return settings, None
    # The whole device, not what is free of it: what others use of it by then is in the sum.
    device_bytes = min(torch.cuda.get_device_properties(place).total_memory for place in places)
    one = block_geometry(checkpoint, settings, torch.bfloat16)
    return settings, memory_plan(checkpoint.config, settings, one, device_bytes, standbys=standbys, pairs=pairs)


def settle(settings: TorchSettings, plan: MemoryPlan | None) -> TorchSettings:
    """With the pool the plan allows; UserError with the sum where it allows none."""
    return settings if plan is None else structs.replace(settings, kv_gib=plan.pool_for(settings.kv_gib) / GIB)
