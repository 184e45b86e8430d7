"""Addresses with scratch in them, asked for in the step thread and taken in the loop, whose the memory is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from holdfast.memory.devices.contract import Device

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ground:
    device: Device
    loop: asyncio.AbstractEventLoop

    def reserve(self, size: int) -> int:
        return self._ask(lambda: self._reserve(size))

    def free(self, address: int, size: int) -> None:
        self._ask(lambda: self._free(address, size))

    def _reserve(self, size: int) -> int:
        address = self.device.reserve(size)
        self.device.scratch(address, size)
        return address

    def _free(self, address: int, size: int) -> None:
        self.device.unmap(address, size)
        self.device.release(address, size)

    def _ask(self, work: Callable[[], T]) -> T:
        async def do() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(do(), self.loop).result()
