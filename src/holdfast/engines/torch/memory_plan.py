"""Plans memory: how much of a GPU the KV pool may use, and whether a deployment on CPUs fits a host. Pure, without
torch.

    pool = device - weights - (1 + standbys) x (context + graphs + workspace) - margin

Weights and pool exist once, in the vault, however many engines map them (facts 4a). Each engine has its own copy of the
other terms; a standby allocates them at its start, so that a wake allocates nothing.

Always true: every term is an upper bound. So the pool's memory is available whenever it is allocated, or the plan was
refused with the sum shown. Pairs that share a device plan with equal shares of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.errors import TransientError, UserError
from holdfast.engines.paged.canary import PROMPT_TOKENS, TOKENS
from holdfast.engines.torch.files.config import ModelConfig
from holdfast.engines.torch.model.parameters import count
from holdfast.kv.geometry import ITEM_BITS, Geometry
from holdfast.spec.engines import GIB, TorchSettings


def private_blocks(block_tokens: int) -> int:
    """Return three blocks more than a canary needs: slabs may begin and end inside a block, and the last block is
    filler."""
    return -(-(PROMPT_TOKENS + TOKENS) // block_tokens) + 3


# The largest captured step, in positions: 64 resumed streams with a block to compute each. A larger step computes for
# longer than the host needs to prepare it.
POSITIONS_MAX = 1024
POSITIONS_MIN = 32


def sizes_for(rows_max: int) -> list[int]:
    """Return the sizes of decodes to capture: a batch is padded to the next size, by seven cheap rows at most."""
    sizes = [size for size in (1, 2, 4) if size < rows_max]
    return [*sizes, *range(8, rows_max, 8), rows_max]


def positions_for(step_tokens_max: int) -> list[int]:
    """Return the numbers of positions of captured steps with chunks: powers of two."""
    powers = [1 << power for power in range(POSITIONS_MIN.bit_length() - 1, POSITIONS_MAX.bit_length())]
    return [size for size in powers if size <= step_tokens_max]


MIB = 1024**2

CONTEXT_BYTES = 640 * MIB  # facts 6: some 0.6 GiB with PyTorch: its kernels are loaded beside the bare context
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
    """The terms of the memory sum for one device of one pair, in bytes."""

    device_bytes: int  # all there is of it, used or not
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
        """Return the private memory of each engine, active or standby."""
        return self.context_bytes + self.graphs_bytes + self.workspace_bytes

    @property
    def pool_bytes(self) -> int:
        """Return the memory left for the pool; negative if the other terms do not fit."""
        return self.share_bytes - self.weights_bytes - self.engines * self.engine_bytes - self.margin_bytes

    def lines(self) -> list[str]:
        """Return the sum as a table, for the log."""
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
        """Return the sum in one line, for an error."""
        device = gib(self.share_bytes) + (f" (a share of {self.pairs})" if self.pairs > 1 else "")
        own = f"{mib(self.context_bytes)} context + {mib(self.graphs_bytes)} graphs"
        own += f" + {mib(self.workspace_bytes)} workspace"
        return (
            f"device {device} - weights {gib(self.weights_bytes)} - {self.engines} engines x ({own}) "
            f"- margin {gib(self.margin_bytes)} = {gib(self.pool_bytes)}"
        )

    def pool_for(self, kv_gib: float) -> int:
        """Return the pool's bytes: `kv_gib`, or what is left if it is 0. Raise UserError with the sum."""
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
    """Return the sum for one rank. `settings` are `for_device`'s, `one` is the geometry of a pool of one block."""
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
    """Return how much of a device all pairs together may use."""
    return device_bytes - _margin_bytes(device_bytes)


def needed_bytes(config: ModelConfig, asked: TorchSettings, standbys: int) -> int:
    """Return how much of each of its devices a pair needs; 0: its pool takes all that is left."""
    settings = asked.for_device(is_gpu=True)
    shape = (settings.block_tokens, config.layers, config.kv_heads // settings.ranks, config.head_size)
    plan = memory_plan(config, settings, Geometry("", "bfloat16", *shape, block_count=1), 0, standbys=standbys)
    pool = int(settings.kv_gib * GIB)
    return plan.weights_bytes + plan.engines * plan.engine_bytes + pool if pool else 0


def _margin_bytes(device_bytes: int, pairs: int = 1) -> int:
    return max(int(MARGIN_SHARE * device_bytes) // pairs, MARGIN_BYTES)


def _workspace_bytes(config: ModelConfig, settings: TorchSettings, context: int, item_bytes: int) -> int:
    """Return the workspace of the largest step, besides weights and KV."""
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


# On a CPU all is computed and kept in fp32.
ITEM_BYTES = 4
# An engine's pages of its own: 165 MiB measured with the tiny model and PyTorch's CPU build; others are larger.
ENGINE_BYTES = 256 * MIB
# Of a step's logits: as computed, scaled, the noise, a sort's values and indices.
HOST_LOGITS_COPIES = 6
# Supervisor, store, vaults, keepers and frontends have some 30 MiB each; the kernel's page tables come on top.
HOST_MARGIN_BYTES = 384 * MIB


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The terms of the memory sum for a host, in bytes: workers x (ranks x (weights + pool) + engines x own) + margin.

    It is computed before torch is loaded or memory is allocated: the kernel does not refuse memory, it kills processes
    when memory runs out, and a pool that is allocated in pieces would fill the machine first.
    """

    host_bytes: int  # the machine's, or what a cgroup allows of it
    workers: int
    ranks: int  # of each engine; each has weights and a pool of its own
    engines: int  # of each worker: 1 + standbys
    weights_bytes: int  # of one rank
    engine_bytes: int  # of one rank of one engine
    pool_bytes: int  # of one rank, as asked for
    block_bytes: int  # of its KV
    margin_bytes: int = HOST_MARGIN_BYTES

    @property
    def room_bytes(self) -> int:
        """Return the memory left for the pools; negative if the other terms do not fit."""
        own = self.weights_bytes + self.engines * self.engine_bytes
        return self.host_bytes - self.workers * self.ranks * own - self.margin_bytes

    @property
    def needed_bytes(self) -> int:
        return self.host_bytes - self.room_bytes + self.workers * self.ranks * self.pool_bytes

    def sum_text(self) -> str:
        """Return the sum in one line, for an error."""
        times = self.workers * self.ranks
        each = f"{times} x " if times > 1 else ""
        return (
            f"host {gib(self.host_bytes)} - {each}weights {gib(self.weights_bytes)} "
            f"- {times * self.engines} engines x {gib(self.engine_bytes)} - margin {gib(self.margin_bytes)} "
            f"= {gib(self.room_bytes)}"
        )

    def check(self, kv_gib: float, free_bytes: int | None = None) -> None:
        """Raise UserError with the sum if it does not fit. `free_bytes`: the memory that is free now, if it matters."""
        times = self.workers * self.ranks
        if self.room_bytes < 0:
            raise UserError(f"the model does not fit into memory: {self.sum_text()}; {_HOST_ADVICE}")
        if times * self.pool_bytes > self.room_bytes:
            asked = f"--kv-gib {kv_gib:g}" if kv_gib else f"a KV pool of {gib(self.pool_bytes)}"
            all_of_it = f" for each of {times}" if times > 1 else ""
            raise UserError(f"{asked}{all_of_it} does not fit into memory: {self.sum_text()}; {_HOST_ADVICE}")
        if self.pool_bytes < 2 * self.block_bytes:
            blocks = f"two KV blocks of {self.block_bytes:,} bytes"
            raise UserError(f"--kv-gib {kv_gib:g} does not hold {blocks}; give it more")
        if free_bytes is not None and self.needed_bytes > free_bytes:
            raise TransientError(
                f"{gib(self.needed_bytes)} of memory are needed and {gib(free_bytes)} of {gib(self.host_bytes)} are "
                f"free now; stop what uses the rest, or {_HOST_ADVICE}"
            )


_HOST_ADVICE = "use a smaller --kv-gib, fewer --standbys or --workers, or a smaller model"


def host_plan(config: ModelConfig, asked: TorchSettings, host_bytes: int, standbys: int, workers: int = 1) -> HostPlan:
    """Return the sum for equal workers. The caller has checked that the ranks can share the model."""
    settings = asked.for_device(is_gpu=False)
    kv_heads = config.kv_heads // settings.ranks
    return HostPlan(
        host_bytes=host_bytes,
        workers=workers,
        ranks=settings.ranks,
        engines=1 + standbys,
        weights_bytes=count(config, settings.ranks) * ITEM_BYTES,
        engine_bytes=ENGINE_BYTES + HOST_LOGITS_COPIES * settings.rows * config.vocabulary * 4,
        pool_bytes=int(settings.kv_gib * GIB),
        block_bytes=2 * config.layers * kv_heads * config.head_size * settings.block_tokens * ITEM_BYTES,
    )
