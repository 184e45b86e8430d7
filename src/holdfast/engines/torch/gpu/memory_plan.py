"""What of a GPU's memory the KV pool may have. Pure: the device's size comes in, a sum comes out.

    pool = device - weights - (1 + standbys) x (context + graphs + workspace) - margin

Weights and pool are in the vault and there once, whoever maps them (facts 4a); the rest is each engine's own, and a
standby has it from its start, so that a wake allocates nothing. Always true: every term is an upper bound, so what the
plan gives the pool is there whenever it is taken, or the plan was refused with the sum shown. Where pairs share a
device, each plans with an even share of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.errors import UserError
from holdfast.engines.torch.canary import private_blocks
from holdfast.engines.torch.files.config import ModelConfig
from holdfast.engines.torch.gpu.sizes import sizes_for
from holdfast.engines.torch.model.parameters import count
from holdfast.kv.geometry import ITEM_BITS, Geometry
from holdfast.spec.engines import GIB, TorchSettings

MIB = 1024**2

CONTEXT_BYTES = 640 * MIB  # facts 6: some 0.6 GiB with PyTorch, whose kernels are loaded beside the bare context
LIBRARIES_BYTES = 96 * MIB  # cuBLAS works in 32 MiB on Hopper, once for each of two streams; small constants beside it
# One rank talks to others through NCCL's buffers. Not measured here; others report 200 to 500 MiB.
COLLECTIVES_BYTES = 512 * MIB
# A captured step keeps its nodes (some 350 for 32 layers) and its share of the graphs' common pool.
GRAPH_BYTES = 8 * MIB
# Of a step's logits in fp32: as computed, scaled, the noise; a sort's values and its indices of 8 bytes, the sums over
# them; what penalties count. Streams that only ask for a temperature need two.
LOGITS_COPIES = 8
# A step's rows of `hidden` that live at once: the residual, a normed one, a product's output, the attention's.
HIDDEN_COPIES = 4
# As kernels_attention.PROGRAMS_WANTED, doubled: the splits of a decode are rounded up to a power of two.
SPLIT_PROGRAMS = 2 * 1056
# Of the device: slabs are whole 2 MiB pieces, allocators keep more than they hand out, drivers keep some for
# themselves. A small device needs no less of it.
MARGIN_SHARE = 0.02
MARGIN_BYTES = GIB


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The terms of the sum for one device of one pair, bytes."""

    device_bytes: int  # all there is of it, whoever uses it now
    pairs: int  # that share the device
    weights_bytes: int
    engines: int  # 1 + standbys
    context_bytes: int
    graphs_bytes: int
    workspace_bytes: int
    margin_bytes: int
    context_tokens: int  # the longest text
    stream_bytes: int  # what that text's KV needs

    @property
    def share_bytes(self) -> int:
        return self.device_bytes // self.pairs

    @property
    def engine_bytes(self) -> int:
        """Of each engine's own, active or standing by."""
        return self.context_bytes + self.graphs_bytes + self.workspace_bytes

    @property
    def pool_bytes(self) -> int:
        """What is left; negative where not even the rest fits."""
        return self.share_bytes - self.weights_bytes - self.engines * self.engine_bytes - self.margin_bytes

    def lines(self) -> list[str]:
        """The sum as a table, for the log."""
        shared = f", of {gib(self.device_bytes)} shared by {self.pairs} pairs" if self.pairs > 1 else ""
        own = [("CUDA context", self.context_bytes), ("graphs", self.graphs_bytes), ("workspace", self.workspace_bytes)]
        needed = f", one text of {self.context_tokens:,} tokens needs {gib(self.stream_bytes)}"
        rows = [
            ("  device", self.share_bytes, shared),
            ("- weights", self.weights_bytes, ""),
            *((f"- {what}", self.engines * size, f", {self.engines} x {mib(size)}") for what, size in own),
            ("- margin", self.margin_bytes, ""),
            ("= KV pool", self.pool_bytes, needed),
        ]
        return [f"{what:<14} {size / GIB:>9.2f} GiB{note}" for what, size, note in rows]

    def sum_text(self) -> str:
        """The sum in one line, for an error."""
        device = gib(self.share_bytes) + (f" (a share of {self.pairs})" if self.pairs > 1 else "")
        own = f"{mib(self.context_bytes)} context + {mib(self.graphs_bytes)} graphs"
        own += f" + {mib(self.workspace_bytes)} workspace"
        return (
            f"device {device} - weights {gib(self.weights_bytes)} - {self.engines} engines x ({own}) "
            f"- margin {gib(self.margin_bytes)} = {gib(self.pool_bytes)}"
        )

    def pool_for(self, kv_gib: float) -> int:
        """The pool's bytes: `kv_gib` if it fits, for 0 what is left; UserError with the sum if not."""
        wanted = int(kv_gib * GIB)
        if wanted and wanted > self.pool_bytes:
            raise UserError(
                f"--kv-gib {kv_gib:g} does not fit: {self.sum_text()}; use a smaller --kv-gib, fewer --standbys, "
                "a smaller --streams-max, or a larger device"
            )
        if not wanted and self.pool_bytes < self.stream_bytes:
            raise UserError(
                f"one text of {self.context_tokens} tokens needs a KV pool of {gib(self.stream_bytes)}, and there is "
                f"{self.sum_text()}; use a smaller --context, fewer --standbys, a smaller --streams-max, "
                "or a larger device"
            )
        return wanted or self.pool_bytes


def memory_plan(
    config: ModelConfig, settings: TorchSettings, one: Geometry, device_bytes: int, *, standbys: int, pairs: int = 1
) -> MemoryPlan:
    """The sum for one rank. `settings` are `for_device`'s, `one` is the pool's geometry but for its count of blocks."""
    context = settings.context_tokens_max or config.context_tokens_max
    item_bytes = ITEM_BITS[one.dtype] // 8
    private_bytes = private_blocks(one.block_tokens) * one.block_bytes
    blocks = max(2, -(-context // one.block_tokens))
    return MemoryPlan(
        device_bytes=device_bytes,
        pairs=pairs,
        weights_bytes=count(config, settings.ranks) * item_bytes,
        engines=1 + standbys,
        context_bytes=CONTEXT_BYTES + (COLLECTIVES_BYTES if settings.ranks > 1 else 0),
        graphs_bytes=GRAPH_BYTES * len(sizes_for(settings.rows)),
        workspace_bytes=_workspace_bytes(config, settings, context, item_bytes) + private_bytes,
        margin_bytes=_margin_bytes(device_bytes, pairs),
        context_tokens=context,
        stream_bytes=blocks * one.block_bytes,
    )


def usable_bytes(device_bytes: int) -> int:
    """What pairs together may have of a device."""
    return device_bytes - _margin_bytes(device_bytes)


def needed_bytes(config: ModelConfig, wishes: TorchSettings, standbys: int) -> int:
    """What a pair takes of each of its devices, however large these are; 0: its pool takes what is left of them."""
    settings = wishes.for_device(is_gpu=True)
    shape = (settings.block_tokens, config.layers, config.kv_heads // settings.ranks, config.head_size)
    plan = memory_plan(config, settings, Geometry("", "bfloat16", *shape, block_count=1), 0, standbys=standbys)
    pool = int(settings.kv_gib * GIB)
    return plan.weights_bytes + plan.engines * plan.engine_bytes + pool if pool else 0


def _margin_bytes(device_bytes: int, pairs: int = 1) -> int:
    return max(int(MARGIN_SHARE * device_bytes) // pairs, MARGIN_BYTES)


def _workspace_bytes(config: ModelConfig, settings: TorchSettings, context: int, item_bytes: int) -> int:
    """What a step needs beside weights and KV, at its largest."""
    rows, streams, ranks = settings.step_tokens_max, settings.rows, settings.ranks
    heads, kv_heads = config.heads // ranks, config.kv_heads // ranks
    widths = HIDDEN_COPIES * config.hidden + (2 * heads + 2 * kv_heads) * config.head_size
    widths += 3 * config.intermediate // ranks  # gate and up, and their product
    splits = max(SPLIT_PROGRAMS, 2 * streams * kv_heads) * (heads // kv_heads) * (config.head_size + 1)
    tables = 2 * context * config.head_size * item_bytes  # the rope's
    tables += streams * -(-context // settings.block_tokens) * 8
    tables += streams * context * (item_bytes + 1)  # a decode's mask, and the bools it is made of
    logits = LOGITS_COPIES * streams * config.vocabulary * 4
    return LIBRARIES_BYTES + rows * widths * item_bytes + 4 * splits + tables + logits


def mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
