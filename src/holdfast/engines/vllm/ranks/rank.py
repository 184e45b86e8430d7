"""One rank of a vLLM engine beside its leader: `python -m holdfast.engines.vllm.ranks.rank '{"tether": …}'`.

It has a worker of vLLM's with a share of the weights and of every KV block, and no EngineCore: what the leader's asks
of its worker is asked of this one too. Always true: calls are made in the order they were told; vLLM warms up on
scratch, as the leader does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import msgspec
import torch
from vllm.platforms import current_platform
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from holdfast.engines.shadow.rank import Rank, RankLaunch
from holdfast.engines.shadow.seat import Order, Orders, tied
from holdfast.engines.vllm.ground import Ground
from holdfast.engines.vllm.hollow import Scratch
from holdfast.engines.vllm.kv_home import KvHome
from holdfast.engines.vllm.options import engine_config, loaded_as
from holdfast.engines.vllm.ranks.leader import RankWork
from holdfast.engines.vllm.ranks.words import answer, heard
from holdfast.engines.vllm.sampling import take_over
from holdfast.engines.vllm.weights import ModelBuild, VllmWeights
from holdfast.engines.vllm.worker import Rooms, let_in
from holdfast.memory.torch.tensors import torch_device


class VllmRank(Rank):
    """Besides a rank's orders it has `settle`, when vLLM has made its cache everywhere."""

    def __init__(self, launch: RankLaunch, work: RankWork, orders: Orders) -> None:
        super().__init__(launch, orders, work.rank, work.place)
        self._work = work
        self._config = engine_config(work.path, work.settings, work.place)
        take_over(self._config)
        self._device = torch_device(work.place.device)
        self._build = ModelBuild()
        identity = loaded_as(work.identity, work.settings.options, work.rank)
        self._weights = VllmWeights(identity, self._device, self._build)
        self._rooms: Rooms | None = None

    def orders(self) -> dict[str, Order]:
        return super().orders() | {"settle": self.settle}

    async def load(self) -> None:
        ground = Ground(self.memory.device, asyncio.get_running_loop())
        kv = KvHome(self._device, ground, self.place.engine_id, self.place.direct)
        self._rooms = Rooms(self._build, Scratch(self._device, ground), kv)
        self.begin_steps()
        await self.memory.load(self._weights)

    async def settle(self) -> None:
        assert self._rooms is not None, "load first"
        kv, work = self._rooms.kv, self._work
        identity = loaded_as(work.identity, work.settings.options)
        await self.memory.stand_by(kv.geometry(identity, rank=work.rank, ranks=work.ranks), kv.home)

    # -- steps

    def make_steps(self) -> None:
        worker = self._worker()
        while (told := heard(self.steps)) is not None:
            self.do_again(told.acts)
            done = run_method(worker, told.method, told.args, told.kwargs) if told.method else None
            if told.at_rest and self._device.type == "cuda":
                torch.cuda.synchronize()
            if told.answered:
                answer(self.steps, done)

    def _worker(self) -> Any:
        """As vLLM's executors make one; it meets the others on the way."""
        assert self._rooms is not None, "load first"
        work, config = self._work, self._config
        worker = WorkerWrapperBase(rpc_rank=work.rank, global_rank=work.rank)
        given = {
            "vllm_config": config,
            "local_rank": work.rank,
            "rank": work.rank,
            "distributed_init_method": work.meeting,
            "is_driver_worker": False,
        }
        with let_in(self._rooms):
            worker.init_worker([{}] * work.rank + [given])
            worker.init_device()
            worker.load_model()
        current_platform.update_block_size_for_backend(config)
        return worker


def main(text: str) -> int:
    launch = msgspec.json.decode(text, type=RankLaunch)
    if not tied(launch.tether):
        return 1
    asyncio.run(live(launch, msgspec.json.decode(launch.told(), type=RankWork)))
    return 0


async def live(launch: RankLaunch, work: RankWork) -> None:
    orders = Orders(launch.tether)
    await orders.obey(VllmRank(launch, work, orders).orders())
    os._exit(0)  # the leader is gone: nothing is left to be put in order, and a thread may hang in a sum


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
