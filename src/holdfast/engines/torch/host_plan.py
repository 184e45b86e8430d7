"""Whether host memory holds what a deployment on CPUs was asked for. Pure: the host's size comes in, a sum comes out.

    workers x (ranks x (weights + pool) + engines x own) + margin

Weights and pools are in vaults and there once for each rank's device, whoever maps them; the rest is each engine's
own. Always true: it is asked before torch is loaded or a page is taken. The kernel does not refuse memory, it kills
for want of it, and a pool that is taken piece by piece would have filled the machine by then.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.errors import Passing, UserError
from holdfast.engines.torch.files.config import ModelConfig
from holdfast.engines.torch.model.parameters import count
from holdfast.spec.engines import GIB, TorchSettings

MIB = 1024**2

# On a CPU all is computed and kept in fp32.
ITEM_BYTES = 4
# An engine's pages of its own: 165 MiB measured with the tiny model and PyTorch's CPU build; others are larger.
ENGINE_BYTES = 256 * MIB
# Of a step's logits: as computed, scaled, the noise, a sort's values and indices.
LOGITS_COPIES = 6
# Supervisor, store, vaults, keepers and frontends have some 30 MiB each; the kernel's page tables come on top.
MARGIN_BYTES = 384 * MIB


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The terms of the sum, bytes."""

    host_bytes: int  # the machine's, or what a cgroup allows of it
    workers: int
    ranks: int  # of each engine; each has weights and a pool of its own
    engines: int  # of each worker: 1 + standbys
    weights_bytes: int  # of one rank
    engine_bytes: int  # of one rank of one engine
    pool_bytes: int  # of one rank, as asked for
    block_bytes: int  # of its KV
    margin_bytes: int = MARGIN_BYTES

    @property
    def room_bytes(self) -> int:
        """What is left for the pools; negative where not even the rest fits."""
        own = self.weights_bytes + self.engines * self.engine_bytes
        return self.host_bytes - self.workers * self.ranks * own - self.margin_bytes

    @property
    def needed_bytes(self) -> int:
        return self.host_bytes - self.room_bytes + self.workers * self.ranks * self.pool_bytes

    def sum_text(self) -> str:
        """The sum in one line, for an error."""
        times = self.workers * self.ranks
        each = f"{times} x " if times > 1 else ""
        return (
            f"host {_gib(self.host_bytes)} - {each}weights {_gib(self.weights_bytes)} "
            f"- {times * self.engines} engines x {_gib(self.engine_bytes)} - margin {_gib(self.margin_bytes)} "
            f"= {_gib(self.room_bytes)}"
        )

    def check(self, kv_gib: float, free_bytes: int | None = None) -> None:
        """UserError with the sum where it does not fit. `free_bytes`: what nobody uses now, where that counts."""
        times = self.workers * self.ranks
        if self.room_bytes < 0:
            raise UserError(f"the model does not fit into memory: {self.sum_text()}; {_MENDS}")
        if times * self.pool_bytes > self.room_bytes:
            asked = f"--kv-gib {kv_gib:g}" if kv_gib else f"a KV pool of {_gib(self.pool_bytes)}"
            all_of_it = f" for each of {times}" if times > 1 else ""
            raise UserError(f"{asked}{all_of_it} does not fit into memory: {self.sum_text()}; {_MENDS}")
        if self.pool_bytes < 2 * self.block_bytes:
            blocks = f"two KV blocks of {self.block_bytes:,} bytes"
            raise UserError(f"--kv-gib {kv_gib:g} does not hold {blocks}; give it more")
        if free_bytes is not None and self.needed_bytes > free_bytes:
            raise Passing(
                f"{_gib(self.needed_bytes)} of memory are needed and {_gib(free_bytes)} of {_gib(self.host_bytes)} are "
                f"free now; stop what uses the rest, or {_MENDS}"
            )


_MENDS = "use a smaller --kv-gib, fewer --standbys or --workers, or a smaller model"


def host_plan(config: ModelConfig, wishes: TorchSettings, host_bytes: int, standbys: int, workers: int = 1) -> HostPlan:
    """The sum for workers alike. Who asks has checked that the ranks can share the model."""
    settings = wishes.for_device(is_gpu=False)
    kv_heads = config.kv_heads // settings.ranks
    return HostPlan(
        host_bytes=host_bytes,
        workers=workers,
        ranks=settings.ranks,
        engines=1 + standbys,
        weights_bytes=count(config, settings.ranks) * ITEM_BYTES,
        engine_bytes=ENGINE_BYTES + LOGITS_COPIES * settings.rows * config.vocabulary * 4,
        pool_bytes=int(settings.kv_gib * GIB),
        block_bytes=2 * config.layers * kv_heads * config.head_size * settings.block_tokens * ITEM_BYTES,
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
