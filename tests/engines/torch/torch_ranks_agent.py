"""A torch engine of several ranks in the tests, from inside: `torch_engine_agent.py` with a vault for each rank."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import torch_engine_agent
import uvloop
from torch_engine_agent import Agent, obey

from holdfast.engines.shadow.place import Place
from holdfast.engines.torch.engine import TorchEngine
from holdfast.engines.torch.files.tiny import tiny
from holdfast.engines.torch.settings import TorchSettings


class RanksAgent(Agent):
    def __init__(self, launch: dict[str, Any]) -> None:
        (socket, device), *more = launch["vaults"]
        number = launch["engine_id"]
        place = Place(socket, device, number, f"engine {number}", more=tuple(map(tuple, more)))
        self.engine = TorchEngine(tiny(), TorchSettings(**launch["settings"]), place, lambda *_: None)

    async def rest(self) -> None:
        await self.engine.rest()

    async def ranks(self) -> list[int]:
        return self.engine._ranks.processes.pids

    async def recomputed_total(self) -> int:
        assert self.engine._blocks is not None, "asleep"
        return self.engine._blocks.resumes.recomputed_tokens_total

    async def canary_passed(self) -> None:
        self.engine.canary_passed()


if __name__ == "__main__":
    os.dup2(2, 1)
    torch_engine_agent.Agent = RanksAgent  # type: ignore[misc]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as workers do
        runner.run(obey(json.loads(sys.argv[1])))
