"""The small ports through which shells reach the world, so that a simulated world can stand in for it.

Time and timers come from the running event loop (`loop.time()`, `call_later`), tasks are started on it (`core.tasks`);
a loop of virtual time is all they need. What a loop does not have is here, and is handed to a shell's constructor by
`roles`: connections, the clocks that other processes and people read too, and randomness. A port that speaks in a
room's own types stands in that room: beats (`worker.beat`), processes and their ends (`supervise.processes`), election
locks (`failover.lock`), the store (`store.contract`), engines (`engines.contract`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from holdfast.core.address import Address

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class Listener(Protocol):
    """A bound, listening socket."""

    @property
    def address(self) -> Address: ...

    def close(self) -> None:
        """Stop accepting; connections already made live on."""


class Network(Protocol):
    """Where connections come from. The real one: `wire.net.SocketNetwork`."""

    async def connect(self, address: Address, factory: ProtocolFactory, timeout_s: float) -> asyncio.Transport:
        """Connect or raise OSError / TimeoutError within `timeout_s`."""

    async def listen(self, address: Address, factory: ProtocolFactory, *, share_port: bool = False) -> Listener:
        """Bind and accept; port 0 picks a free one. `share_port` lets several processes accept on it."""


class Clock(Protocol):
    """The clocks that are more than this process's own. The real one: `core.clock.SystemClock`."""

    def monotonic_s(self) -> float:
        """The clock that all processes of a machine share, and the loop's too, read now: uvloop's `loop.time()` stands
        still inside a callback. Any thread may ask."""

    def unix_s(self) -> float:
        """Wall time: for people, for the store's readers, and for epochs."""


@dataclass(frozen=True, slots=True)
class World:
    """What every process is handed. `wire.world.real_world` makes the real one, in `roles`, once for each process."""

    network: Network
    clock: Clock
    rng: random.Random
