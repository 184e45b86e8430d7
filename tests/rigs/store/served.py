"""Runs a real store on a socket, and clients of it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

from holdfast.core.address import UnixAddress
from holdfast.core.tasks import beside
from holdfast.store.client import EmbeddedStore
from holdfast.store.server import DurableFile, ServerSettings, StoreServer
from holdfast.wire.net import SocketNetwork


@contextlib.asynccontextmanager
async def served_store(folder: Path, clients: int = 1) -> AsyncIterator[list[EmbeddedStore]]:
    """At `folder/s`, kept in `folder/durable`."""
    address, network = UnixAddress(str(folder / "s")), SocketNetwork()
    server = StoreServer(address, network, DurableFile(folder / "durable"), ServerSettings())
    await server.start()
    made = [EmbeddedStore(address, network, random.Random(seed + 1)) for seed in range(clients)]
    async with beside(server.run(), "store"):
        for client in made:
            await client.start()
        yield made
        for client in made:
            await client.close()
