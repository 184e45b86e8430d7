"""The agent of the device tests with kernels of its own: fills and verifies at the memory's speed, and can go wrong."""

from __future__ import annotations

import socket
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "devices"))

from device_agent import Agent, Peer, main
from gpu_kernels import Kernels


class GpuAgent(Agent):
    """An engine on a GPU."""

    def __init__(self, sock: socket.socket, device: str) -> None:
        super().__init__(sock, device)
        self.kernels = Kernels(device)

    def slabs(self) -> list[tuple[int, int]]:
        starts = [0, *accumulate(self.sizes)]
        return [(self.address + start, size) for start, size in zip(starts, self.sizes, strict=False)]

    def fill(self, fds: list[int], seed: int) -> dict[str, Any]:
        self.kernels.fill(self.slabs(), seed)
        return {}

    def verify(self, fds: list[int], seed: int) -> dict[str, Any]:
        return {"wrong": self.kernels.count_wrong(self.slabs(), seed)}

    def poke(self, fds: list[int]) -> dict[str, Any]:
        """Store at the first mapped word, whatever its access."""
        self.kernels.fill([(self.address, 4)], 1)
        return {}

    def fault(self, fds: list[int]) -> dict[str, Any]:
        """Store at an address that is reserved and not mapped: an illegal address, Xid 31."""
        assert self.device is not None
        nowhere = self.device.reserve(self.device.granularity)
        self.kernels.fill([(nowhere, 4)], 1)
        return {}


def engine(gpu: str) -> Peer:
    return Peer(gpu, __file__)


if __name__ == "__main__":
    main(GpuAgent)
