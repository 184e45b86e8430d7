"""What control reads of the store."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from holdfast.control.store_view import StoreView
from holdfast.core.address import UnixAddress
from holdfast.store.client import EmbeddedStore
from holdfast.store.contract import WATCHES_MAX, Lost
from holdfast.store.server import DurableFile, ServerSettings, StoreServer
from holdfast.wire.net import SocketNetwork


async def test_a_lost_store_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However many watches there are, each of which is told of it before it has read everything."""
    address, network = UnixAddress(f"{tmp_path}/store.sock"), SocketNetwork()
    store = EmbeddedStore(address, network, random.Random(3))
    await store.start()
    book = StoreView(store, "d")
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


async def test_whoever_begins_anew_leaves_no_watches_behind(tmp_path: Path) -> None:
    """A control that is overtaken again and again goes on: a client may have few of them."""
    store = EmbeddedStore(UnixAddress(f"{tmp_path}/store.sock"), SocketNetwork(), random.Random(3))
    await store.start()
    for _ in range(WATCHES_MAX):
        book = StoreView(store, "d")
        book.open()
        await asyncio.sleep(0)  # its tasks begin
        await book.close()
    assert "0 watches" in repr(store)
    await store.close()
