"""What was asked of a real engine, held against the model's own files and this machine's memory, before torch loads.

Always true: what no second try can mend is found here, in about a second, by `up` and by every engine that starts: a
model that is not there, not whole or not supported, ranks that cannot share it, memory that is not there.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core.errors import UserError
from holdfast.memory.devices.host_room import host_bytes
from holdfast.spec.engines import GIB, NO_VLLM, TorchSettings
from holdfast.spec.launch import WorkerLaunch
from holdfast.spec.names import is_host

if TYPE_CHECKING:
    from holdfast.engines.torch.files.checkpoint import Checkpoint, OnProgress
    from holdfast.engines.vllm.files import ModelFiles
    from holdfast.engines.vllm.memory_plan import VllmPlan
    from holdfast.spec.deployment import DeploymentSpec

# Threads beyond the cores only wait for each other; that many are a typing mistake.
THREADS_PER_CORE = 4
SETS_MAX = 64  # whose needs are remembered: of all revisions that are kept, and more
BF16_BYTES = 2  # of a number, on a GPU; on a CPU it takes twice as much
THREADS_MIN = 16  # as many may be asked for anywhere: what was chosen for one machine starts on a smaller one


@dataclass(frozen=True, slots=True)
class Asked:
    """All of a request for torch engines that the model and the memory decide about."""

    source: str
    cache_dir: str
    torch: TorchSettings
    on_host: bool  # else on a GPU, whose memory plan is made where the GPU can be asked
    standbys: int
    workers: int = 1
    free_bytes: int | None = None  # host memory that nobody uses; None: what is ours already may be part of the rest

    @classmethod
    def of_worker(cls, launch: WorkerLaunch) -> Asked:
        return cls(launch.source, launch.cache_dir, launch.torch, is_host(launch.failover.device), launch.standbys)

    @classmethod
    def of_deployment(cls, spec: DeploymentSpec, free_bytes: int | None) -> Asked:
        worker = spec.worker
        shape = (worker.torch, not spec.gpus, spec.standbys, spec.workers)
        return cls(worker.source, worker.cache_dir, *shape, free_bytes)


def examine_sim(spec: DeploymentSpec, free_bytes: int | None) -> None:
    """A simulator's memory in vaults is real; UserError where the host does not hold it."""
    wanted = int(spec.workers * spec.worker.sim.vault_gib * GIB) if spec.standbys else 0
    there, what = (host_bytes(), "in all") if free_bytes is None else (free_bytes, "free now")
    if wanted > there:
        raise UserError(
            f"--vault-gib {spec.worker.sim.vault_gib:g} for each of {spec.workers} workers does not fit into memory: "
            f"{wanted / GIB:.2f} GiB of {there / GIB:.2f} GiB {what}; use less, or fewer --workers"
        )


def check_threads(threads: int, cores: int) -> None:
    """UserError for more than this machine would ever run: starting them fails, or ends in a crawl."""
    most = max(THREADS_MIN, THREADS_PER_CORE * cores)
    if threads > most:
        raise UserError(f"--torch-threads {threads} is too many: at most {most} on {cores} cores; 0 is all but one")


def examine(asked: Asked, progress: OnProgress) -> Checkpoint:
    """The model, looked at but not read; UserError or ValueError says what cannot be."""
    from holdfast.engines.torch.files.config import check_context
    from holdfast.engines.torch.files.resolve import look_at
    from holdfast.engines.torch.memory_plan import host_plan
    from holdfast.engines.torch.model.parameters import check_ranks

    settings = asked.torch
    check_threads(settings.threads, os.cpu_count() or 1)
    looked_at = look_at(asked.source, Path(asked.cache_dir), progress)
    check_ranks(looked_at.config, settings.ranks)
    check_context(looked_at.config, settings.context_tokens_max)
    if asked.on_host:
        plan = host_plan(looked_at.config, settings, host_bytes(), asked.standbys, asked.workers)
        plan.check(settings.kv_gib, asked.free_bytes)
    return looked_at


def gpu_bytes(asked: Asked) -> int:
    """What its engines take together of each GPU that they are on; 0: nobody knows, because no --kv-gib was given, the
    model is not here yet, or it cannot be."""
    if not asked.torch.kv_gib:
        return 0
    try:
        return _gpu_bytes(asked)
    except (UserError, ValueError, OSError):
        return 0


@lru_cache(SETS_MAX)
def _gpu_bytes(asked: Asked) -> int:
    """UserError for a model that is not here: it may come, so that this is not remembered."""
    from holdfast.engines.torch.files.resolve import shape_at_hand
    from holdfast.engines.torch.memory_plan import needed_bytes
    from holdfast.engines.torch.model.parameters import check_ranks

    shape = shape_at_hand(asked.source, Path(asked.cache_dir))
    if shape is None:
        raise UserError(f"{asked.source} is not here yet")
    check_ranks(shape, asked.torch.ranks)
    return needed_bytes(shape, asked.torch, asked.standbys)


def torch_weights_bytes(asked: Asked) -> int:
    """What the weights take on GPUs, of all ranks together, and so at least; 0: the model is not here, or cannot be."""
    from holdfast.engines.torch.files.resolve import shape_at_hand
    from holdfast.engines.torch.model.parameters import check_ranks, count

    try:
        shape = shape_at_hand(asked.source, Path(asked.cache_dir))
        if shape is None:
            return 0
        check_ranks(shape, asked.torch.ranks)
    except (UserError, ValueError, OSError):
        return 0
    return count(shape, asked.torch.ranks) * asked.torch.ranks * BF16_BYTES


# -- vLLM


def has_vllm() -> bool:
    """Whether the package is installed; a mere folder of that name is not it."""
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None


def examine_vllm(
    launch: WorkerLaunch, progress: OnProgress, free_bytes: int | None = None, **where: int
) -> tuple[ModelFiles, VllmPlan]:
    """The model, looked at but not read, what its engines take of memory, and vLLM's options as far as they can be told
    without it; UserError says what cannot be. `free_bytes`: as in `Asked`; `where`: as `plan_vllm` takes it."""
    from holdfast.engines.vllm.files import SOURCES, check_shares, look_at_files
    from holdfast.engines.vllm.reserved_options import check_arguments
    from holdfast.roles.model_names import is_made

    if not has_vllm():
        raise UserError(NO_VLLM)
    check_arguments(launch.vllm.options, direct=launch.failover.direct)
    if is_made(launch.source):
        what = "needs --model" if launch.source == "default" else f"cannot serve --model {launch.source}"
        raise UserError(f"--engine vllm {what}: it takes {SOURCES}")
    files = look_at_files(launch.source, progress)
    check_shares(files.config, launch.vllm.ranks)
    plan = plan_vllm(launch, files, **where)
    plan.check(free_bytes)
    return files, plan


def vllm_bytes(launch: WorkerLaunch) -> int:
    """As `gpu_bytes`, by an estimate."""
    if not Path(launch.source).expanduser().is_dir():
        return 0  # to look at one on the Hub is to fetch it
    try:
        return _vllm_bytes(launch)
    except (UserError, ValueError, OSError):
        return 0


@lru_cache(SETS_MAX)
def _vllm_bytes(launch: WorkerLaunch) -> int:
    from holdfast.engines.vllm.files import look_at_files

    return plan_vllm(launch, look_at_files(launch.source, lambda *_: None)).needed_bytes


def plan_vllm(launch: WorkerLaunch, files: ModelFiles, workers: int = 1, gpu_bytes: int = 0) -> VllmPlan:
    """For so many workers that share the host's memory, or a GPU that has so many bytes (0: nobody knows). Ranks
    share the weights out; each has a pool and memory of its own, on one GPU one of them."""
    from holdfast.engines.vllm.memory_plan import vllm_plan

    device, weights = launch.failover.device, files.weights_bytes
    stored = str(files.config.get("dtype") or files.config.get("torch_dtype"))
    if is_host(device) and platform.machine() == "aarch64" and "16" in stored and "--dtype" not in launch.vllm.options:
        weights *= 2  # they are computed with in fp32
    plan = vllm_plan(
        files.of_text,
        weights,
        launch.vllm,
        is_gpu=not is_host(device),
        where="memory" if is_host(device) else device,
        has_bytes=host_bytes() if is_host(device) else gpu_bytes,
        workers=workers,
        engines=1 + launch.standbys,
    )
    ranks = launch.vllm.ranks
    if is_host(device):
        return dataclasses.replace(plan, pool_bytes=ranks * plan.pool_bytes, own_bytes=ranks * plan.own_bytes)
    return dataclasses.replace(plan, weights_bytes=-(-weights // ranks))
