"""The small ports through which shells reach the world, so that a simulated world can stand in for it.

Time comes from the event loop (`loop.time()`), randomness from an injected `random.Random`, connections
from a `Network`. Nothing else in a shell may open a socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
    """Where connections come from."""

    async def connect(self, address: Address, factory: ProtocolFactory, timeout_s: float) -> asyncio.Transport:
        """Connect or raise OSError / TimeoutError within `timeout_s`."""

    async def listen(self, address: Address, factory: ProtocolFactory, *, share_port: bool = False) -> Listener:
        """Bind and accept; port 0 picks a free one. `share_port` lets several processes accept on it."""
