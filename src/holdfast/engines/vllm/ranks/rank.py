"""Runs one rank of a vLLM engine beside its leader: `python -m holdfast.engines.vllm.ranks.rank '{"tether": …}'`.

It has one of vLLM's workers, with a share of the weights and of every KV block, and no EngineCore: it repeats every
call that the leader's EngineCore makes on its worker. Always true: calls run in the order they were sent. vLLM warms up
on scratch, as in the leader.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from typing import Any

import msgspec
import torch
from vllm.platforms import current_platform
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from holdfast.engines.host.rank import VaultRank
from holdfast.engines.ranks.follower import LeaderLink, RankLaunch, run_rank
from holdfast.engines.vllm.hollow import Scratch, ScratchMemory
from holdfast.engines.vllm.kv_home import KvHome
from holdfast.engines.vllm.options import engine_config, loaded_as
from holdfast.engines.vllm.ranks.leader import VllmRankWork
from holdfast.engines.vllm.sampling import take_over
from holdfast.engines.vllm.weights import ModelBuild, VllmWeights
from holdfast.engines.vllm.worker import WorkerParts, making_worker
from holdfast.memory.torch.tensors import torch_device


class VllmRank(VaultRank):
    """A rank with one of vLLM's workers. It adds the order `stand_by`, sent when vLLM has made its cache on all
    ranks."""

    def __init__(self, launch: RankLaunch, work: VllmRankWork, link: LeaderLink) -> None:
        super().__init__(launch, link, work.rank, work.failover)
        self._work = work
        self._config = engine_config(work.path, work.settings, work.failover)
        take_over(self._config)
        self._device = torch_device(work.failover.device)
        self._build = ModelBuild()
        identity = loaded_as(work.identity, work.settings.options, work.rank)
        self._weights = VllmWeights(identity, self._device, self._build)
        self._parts: WorkerParts | None = None
        self._worker: Any = None

    async def load(self) -> None:
        ground = ScratchMemory(self.memory.device, asyncio.get_running_loop())
        kv = KvHome(self._device, ground, self.failover.engine_id, self.failover.direct)
        self._parts = WorkerParts(self._build, Scratch(self._device, ground), kv)
        self.begin_steps()
        await self.memory.load(self._weights)

    async def stand_by(self) -> None:
        assert self._parts is not None, "load first"
        kv, work = self._parts.kv, self._work
        identity = loaded_as(work.identity, work.settings.options)
        await self.memory.stand_by(kv.geometry(identity, rank=work.rank, ranks=work.ranks), kv.home)

    # -- steps

    def prepare_steps(self) -> None:
        """Make a worker as vLLM's executors do; it waits there for the other ranks."""
        assert self._parts is not None, "load first"
        work, config = self._work, self._config
        worker = WorkerWrapperBase(rpc_rank=work.rank, global_rank=work.rank)
        given = {
            "vllm_config": config,
            "local_rank": work.rank,
            "rank": work.rank,
            "distributed_init_method": work.meeting,
            "is_driver_worker": False,
        }
        with making_worker(self._parts):
            worker.init_worker([{}] * work.rank + [given])
            worker.init_device()
            worker.load_model()
        current_platform.update_block_size_for_backend(config)
        self._worker = worker

    def compute(self, work: bytes, *, answered: bool) -> bytes:
        method, args, kwargs = pickle.loads(work)
        done = run_method(self._worker, method, args, kwargs)
        return pickle.dumps(done, pickle.HIGHEST_PROTOCOL) if answered else b""

    def drain_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def rank_for(launch: RankLaunch, link: LeaderLink) -> VllmRank:
    return VllmRank(launch, msgspec.json.decode(launch.read_work(), type=VllmRankWork), link)


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1], rank_for))
