"""What control reads of the store."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from holdfast.control.book import Book
from holdfast.core.address import UnixAddress
from holdfast.store.client import EmbeddedStore
from holdfast.store.contract import Lost
from holdfast.store.durable import DurableFile
from holdfast.store.server import ServerSettings, StoreServer
from holdfast.wire.net import SocketNetwork


async def test_a_lost_store_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However many watches there are, each of which is told of it before it has read everything."""
    address, network = UnixAddress(f"{tmp_path}/store.sock"), SocketNetwork()
    store = EmbeddedStore(address, network, random.Random(3))
    await store.start()
    book = Book(store, "d")
    book.open()
    async for event in store.watch("another/"):
        assert isinstance(event, Lost)
        break
    server = StoreServer(address, network, DurableFile(tmp_path / "durable"), ServerSettings())
    await server.start()
    await asyncio.wait_for(book.whole.wait(), 60.0)
    await book.close()
    await store.close()
    server.close()
    assert [record.message.partition(":")[0] for record in caplog.records].count("store lost") == 1
