"""The agent of the device tests with kernels of its own: fills and verifies at the memory's speed, and can go wrong."""

from __future__ import annotations

import socket
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.rigs.gpu.lane import CudaLane, Piece
from tests.rigs.memory.device_agent import Agent, Peer, main


class GpuAgent(Agent):
    """Runs an engine on a GPU."""

    def __init__(self, sock: socket.socket, device: str) -> None:
        super().__init__(sock, device)
        self.lane = CudaLane(device)

    def slabs(self, seed: int) -> list[Piece]:
        """Each with a seed of its own."""
        starts = zip([0, *accumulate(self.sizes)], self.sizes, strict=False)
        return [(self.address + start, size, seed + 7919 * number) for number, (start, size) in enumerate(starts)]

    def _fill(self, pieces: list[Piece]) -> dict[str, Any]:
        for piece in pieces:
            self.lane.fill(*piece)
        self.lane.synchronize()
        return {}

    def fill(self, fds: list[int], seed: int) -> dict[str, Any]:
        return self._fill(self.slabs(seed))

    def verify(self, fds: list[int], seed: int) -> dict[str, Any]:
        return {"wrong": self.lane.count_wrong(self.slabs(seed))}

    def poke(self, fds: list[int]) -> dict[str, Any]:
        """Store at the first mapped word, whatever its access."""
        return self._fill([(self.address, 4, 1)])

    def fault(self, fds: list[int]) -> dict[str, Any]:
        """Store at an address that is reserved and not mapped: an illegal address, Xid 31."""
        assert self.device is not None
        nowhere = self.device.reserve(self.device.granularity)
        return self._fill([(nowhere, 4, 1)])


def engine(gpu: str) -> Peer:
    return Peer(gpu, __file__)


if __name__ == "__main__":
    main(GpuAgent)
