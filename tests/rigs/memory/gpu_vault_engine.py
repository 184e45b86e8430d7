"""An engine that a GPU test can script: `python gpu_vault_engine.py SOCKET write|read GIB`. One JSON line per event."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.layout import TensorSpec
from tests.rigs.gpu.lane import CudaLane, Piece

GPU = "cuda-0"
GIB = 1 << 30
SEED = 7


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def heard() -> str:
    return (await asyncio.to_thread(sys.stdin.readline)).strip()


class Engine:
    def __init__(self, path: str) -> None:
        self.device = open_device(GPU)
        self.lane = CudaLane(GPU)
        self.client = MemoryClient(path, self.device, 0, on_lost=lambda why: say(event="lost", why=why))

    def slabs(self) -> list[Piece]:
        mapped = self.client.mapped
        assert mapped is not None
        slabs = zip(mapped.offsets(), mapped.layout.slab_sizes, strict=True)
        return [(mapped.address + start, size, SEED + number) for number, (start, size) in enumerate(slabs)]

    def wrong(self) -> int:
        return self.lane.count_wrong(self.slabs())

    async def write(self, gib: int) -> None:
        assert await self.client.acquire("rw_or_ro", 30_000) == "rw"
        specs = [TensorSpec(f"layer.{n}", (GIB,), (1,), "uint8", GIB) for n in range(gib)]
        await self.client.allocate(specs, "gpu-test")
        for piece in self.slabs():
            self.lane.fill(*piece)
        self.lane.synchronize()
        say(event="committed", hash=await self.client.commit())

    async def remaps(self, rounds: int) -> None:
        remap_ms, unmap_ms = [], []
        for _ in range(rounds):
            began = time.perf_counter()
            await self.client.unmap()
            middle = time.perf_counter()
            assert await self.client.remap() == "ro"
            unmap_ms.append((middle - began) * 1000)
            remap_ms.append((time.perf_counter() - middle) * 1000)
        say(event="remapped", remap_ms=remap_ms, unmap_ms=unmap_ms, wrong=self.wrong())

    def fault(self) -> None:
        """Store where nothing is mapped: an illegal address, Xid 31."""
        nowhere = self.device.reserve(self.device.granularity)
        try:
            self.lane.fill(nowhere, 4, 1)
            self.lane.synchronize()
        except Exception as error:
            say(event="fault", error=str(error))


async def main(path: str, role: str, gib: int) -> None:
    engine = Engine(path)
    await engine.client.connect()
    if role == "write":
        await engine.write(gib)
    else:
        assert await engine.client.acquire("ro", 30_000) == "ro"
        say(event="mapped", wrong=engine.wrong())
    while (word := await heard()) not in ("", "end"):
        if word == "verify":
            say(event="verified", wrong=engine.wrong(), connected=engine.client.connected)
        elif word == "remap":
            await engine.remaps(9)
        elif word == "fault":
            engine.fault()
    await engine.client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
