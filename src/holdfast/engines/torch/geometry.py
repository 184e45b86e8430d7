"""Computes the geometry of a model's KV pool: the shape of its blocks, and how many fit into the memory given to it.

Always true: the engines of one pair compute the same geometry for each rank, otherwise they could not share the pool.
It follows from the model, the settings and the devices' sizes, never from the memory that is free now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from msgspec import structs

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.checkpoint import Checkpoint
from holdfast.engines.torch.memory_plan import MemoryPlan, memory_plan
from holdfast.engines.torch.model.attention import LAYOUT
from holdfast.engines.torch.model.parameters import check_ranks
from holdfast.engines.torch.stepper import threads_for
from holdfast.kv.geometry import Geometry
from holdfast.memory.devices import Unsupported
from holdfast.memory.torch.tensors import dtype_name, torch_device
from holdfast.spec.engines import GIB, TorchSettings


def pool_geometry(checkpoint: Checkpoint, settings: TorchSettings, dtype: torch.dtype, rank: int = 0) -> Geometry:
    """Return the geometry of one rank's pool of `settings.kv_gib`."""
    one = block_geometry(checkpoint, settings, dtype, rank)
    count = int(settings.kv_gib * GIB) // one.block_bytes
    if count < 2:
        raise UserError(f"kv_gib {settings.kv_gib:g} holds no KV block of {one.block_bytes} bytes; give it more")
    return replace(one, block_count=count)


def block_geometry(checkpoint: Checkpoint, settings: TorchSettings, dtype: torch.dtype, rank: int = 0) -> Geometry:
    """Return the geometry of a one-block pool: everything two engines must agree on, except the pool's size."""
    config, ranks = checkpoint.config, settings.ranks
    check_ranks(config, ranks)
    # Bits are equal only for the same arithmetic and number of threads, so these are part of the pool's identity.
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
    devices: Sequence[str], checkpoint: Checkpoint, asked: TorchSettings, standbys: int, pairs: int = 1
) -> tuple[TorchSettings, MemoryPlan | None]:
    """Return the settings with defaults chosen for the device, and on a GPU the memory plan behind them.

    `devices` are the names of the ranks' devices: the smallest decides. `with_planned_pool` checks the plan later.
    """
    check_ranks(checkpoint.config, asked.ranks)
    try:
        places = [torch_device(name) for name in devices]
    except Unsupported as error:
        raise UserError(str(error)) from error
    is_gpu = places[0].type != "cpu"
    settings = asked.for_device(is_gpu)
    if not is_gpu:
        return settings, None
    # The whole device, not its free memory: the sum includes the other processes' use.
    device_bytes = min(torch.cuda.get_device_properties(place).total_memory for place in places)
    one = block_geometry(checkpoint, settings, torch.bfloat16)
    return settings, memory_plan(checkpoint.config, settings, one, device_bytes, standbys=standbys, pairs=pairs)


def with_planned_pool(settings: TorchSettings, plan: MemoryPlan | None) -> TorchSettings:
    """Return the settings with the pool that the plan allows; raise UserError with the sum if it allows none."""
    return settings if plan is None else structs.replace(settings, kv_gib=plan.pool_for(settings.kv_gib) / GIB)
