"""What only etcd can do to a client: compaction, lost history, several endpoints. Real etcd processes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.store.contract import Deleted, Put, Snapshot, StoreUnavailable
from holdfast.store.etcd_client import EtcdSettings, EtcdStore, range_end
from holdfast.testing import waiting
from tests.rigs.store.stores import (
    BOUND_S,
    ETCD_TTL_S,
    EtcdRig,
    end,
    free_port,
    items_under,
    registered,
    until,
    until_snapshot,
    upcoming,
)

pytestmark = pytest.mark.processes


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[EtcdRig]:
    rig = EtcdRig(tmp_path)
    await rig.start()
    yield rig
    end(rig.process)


@pytest.fixture
async def store(rig: EtcdRig) -> AsyncIterator[EtcdStore]:
    client = rig.client()
    assert isinstance(client, EtcdStore)
    await client.start()
    yield client
    await client.close()


def test_range_end_is_the_next_prefix() -> None:
    """The end of a prefix's range is the first key that no longer has the prefix."""
    assert range_end(b"a/") == b"a0"
    assert range_end(b"a\xff") == b"b"
    assert range_end(b"") == b"\0"
    assert range_end(b"\xff") == b"\0"


class Proxy:
    """Between a client and etcd: can cut every connection, and make new ones wait."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: list[asyncio.StreamWriter] = []
        self.flowing = asyncio.Event()
        self.flowing.set()

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.flowing.wait()
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, far_writer]
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@pytest.mark.parametrize("compacted", [False, True])
async def test_a_broken_stream_is_taken_up(rig: EtcdRig, store: EtcdStore, compacted: bool) -> None:
    """A watch whose stream breaks goes on with what it missed; if etcd has compacted that away, with a snapshot."""
    proxy = Proxy(rig.port)
    async with proxy as port:
        client = EtcdStore((f"127.0.0.1:{port}",), random.Random(5), EtcdSettings(lease_ttl_s=ETCD_TTL_S))
        await client.start()
        watch = client.watch("c/")
        assert await upcoming(watch) == Snapshot({})
        await store.put("c/1", b"0", BOUND_S)
        assert await upcoming(watch) == Put("c/1", b"0")
        proxy.flowing.clear()
        proxy.cut()
        for value in (b"1", b"2", b"3"):
            await store.put("c/1", value, BOUND_S)
        if compacted:
            assert (await post(rig, "kv/compaction", {"revision": "5", "physical": True}))["header"]["revision"] == "5"
        proxy.flowing.set()
        if compacted:
            assert await upcoming(watch) == Snapshot({"c/1": b"3"})
        else:
            assert [await upcoming(watch) for _ in range(3)] == [Put("c/1", value) for value in (b"1", b"2", b"3")]
        await store.put("c/1", b"4", BOUND_S)
        assert await upcoming(watch) == Put("c/1", b"4")
        await client.close()


async def post(rig: EtcdRig, path: str, body: dict[str, object]) -> dict[str, Any]:
    """Ask etcd directly."""
    url = f"http://127.0.0.1:{rig.port}/v3/{path}"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200
        return dict(await response.json())


async def test_a_lost_lease_is_granted_again(rig: EtcdRig, store: EtcdStore) -> None:
    """When etcd has dropped the lease, every registration is put again under a new one, by itself."""
    watch = store.watch("l/")
    assert await upcoming(watch) == Snapshot({})
    await registered(store, "l/1", b"a")
    await registered(store, "l/2", b"b")
    assert [await upcoming(watch) for _ in range(2)] == [Put("l/1", b"a"), Put("l/2", b"b")]
    await post(rig, "lease/revoke", {"ID": str(store._keeper._lease)})
    events = [await upcoming(watch) for _ in range(4)]
    assert sorted(event.key for event in events[:2] if isinstance(event, Deleted)) == ["l/1", "l/2"]
    assert sorted(event.key for event in events[2:] if isinstance(event, Put)) == ["l/1", "l/2"]


async def test_an_emptied_etcd_is_filled_again(rig: EtcdRig, store: EtcdStore) -> None:
    """An etcd that comes back without its data (a new history, lower revisions) is watched and registered with anew."""
    for index in range(10):
        await store.put("e/old", str(index).encode(), BOUND_S)
    await registered(store, "e/1", b"a")
    watch = store.watch("e/")
    assert await upcoming(watch) == Snapshot({"e/old": b"9", "e/1": b"a"})
    rig.kill()
    shutil.rmtree(rig.directory / "etcd")
    await rig.start()
    await until_snapshot(watch, {"e/1": b"a"})
    await store.put("e/2", b"b", BOUND_S)
    await until(watch, lambda event: event == Put("e/2", b"b"))


async def test_the_next_endpoint_serves(rig: EtcdRig, tmp_path: Path) -> None:
    """With several endpoints a dead first one costs nothing, and one that freezes later is left for the next."""
    other = EtcdRig(tmp_path / "other")
    other.directory.mkdir()
    await other.start()
    endpoints = (f"127.0.0.1:{free_port()}", f"127.0.0.1:{rig.port}", f"127.0.0.1:{other.port}")
    client = EtcdStore(endpoints, random.Random(5), EtcdSettings(lease_ttl_s=ETCD_TTL_S))
    await client.start()
    try:
        await registered(client, "n/1", b"a")
        watch = client.watch("n/")
        assert await upcoming(watch) == Snapshot({"n/1": b"a"})
        rig.freeze()
        # The other is no member of the same cluster, only another place to go: it is found and filled.
        reader = other.client()
        await reader.start()
        await until_snapshot(reader.watch("n/"), {"n/1": b"a"})
        await until_snapshot(watch, {"n/1": b"a"})
        await reader.close()
    finally:
        rig.thaw()
        await client.close()
        end(other.process)


async def test_another_applications_keys_are_no_trouble(rig: EtcdRig, store: EtcdStore) -> None:
    """Keys that are not text, put by someone else into the same etcd, are passed over."""
    watch = store.watch("")
    assert await upcoming(watch) == Snapshot({})
    await post(rig, "kv/put", {"key": base64.b64encode(b"\xff\xfe").decode(), "value": ""})
    await store.put("k", b"v", BOUND_S)
    assert await upcoming(watch) == Put("k", b"v")
    assert await items_under(store, "") == {"k": b"v"}


async def test_a_full_etcd_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It gives no lease any more: whoever registers says so in its log, with etcd's reason, and not at every try."""
    rig = EtcdRig(tmp_path)
    command = [*rig.command(), "--quota-backend-bytes", "65536"]
    rig.command = lambda: command  # type: ignore[method-assign]
    await rig.start()
    try:
        async with rig.opened() as store:
            with pytest.raises(StoreUnavailable, match="space exceeded"):
                await store.put("k", b"a" * 60_000, BOUND_S)
            store.register("r/1", b"here")
            await waiting.until(lambda: "registration r/1 pending: refused: " in caplog.text, "it to be told")
            await asyncio.sleep(1.0)  # several tries
            assert caplog.text.count("registration r/1 pending: refused: ") == 1
    finally:
        end(rig.process)
