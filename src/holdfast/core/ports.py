"""The ports for network, clocks and randomness, so that tests can replace them with a simulation.

Timers and tasks come from the running event loop (`loop.time()`, `call_later`, `core.tasks`); a simulation uses a loop
with virtual time. What a loop does not provide is here, and `roles` passes it to the constructors: connections, clocks
shared with other processes, and randomness. A port with a package's own types is in that package: beats
(`worker.beat`), processes (`supervise.processes`), election locks (`failover.lock`), the store (`store.contract`),
engines (`engines.contract`).
"""

from __future__ import annotations

import asyncio
import random
import time
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
        """Stop accepting; accepted connections stay open."""


class Network(Protocol):
    """Opens and accepts connections; outside of simulations a `wire.net.SocketNetwork`."""

    async def connect(self, address: Address, factory: ProtocolFactory, timeout_s: float) -> asyncio.Transport:
        """Connect or raise OSError / TimeoutError within `timeout_s`."""

    async def listen(self, address: Address, factory: ProtocolFactory, *, share_port: bool = False) -> Listener:
        """Bind and accept; port 0 picks a free port. `share_port`: several processes may accept on the port."""


class Clock(Protocol):
    """The clocks that processes share; outside of simulations a `SystemClock`."""

    def monotonic_s(self) -> float:
        """Return the time of the clock that all processes of a machine share, and on which `loop.time()` is based. It
        is read at the call: uvloop's `loop.time()` does not advance within a callback. Thread-safe."""

    def unix_s(self) -> float:
        """Return the wall time: for people, for records in the store, and for epochs."""


@dataclass(frozen=True, slots=True)
class World:
    """The ports of one process. Outside of simulations `roles` creates it once, with `wire.net.real_world`."""

    network: Network
    clock: Clock
    rng: random.Random


class SystemClock:
    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """The event that a machine's `next_deadline_s` has been reached."""
