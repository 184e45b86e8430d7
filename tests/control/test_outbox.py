"""What is decided is written down first; with a real store, stopped and started again."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.control.outbox import Outbox
from holdfast.core.address import UnixAddress
from holdfast.core.tasks import Tasks, beside
from holdfast.store.client import EmbeddedStore
from holdfast.store.contract import VALUE_BYTES_MAX
from holdfast.store.server import serve
from holdfast.testing.waiting import until
from holdfast.wire.net import SocketNetwork


class StoreRig:
    """A store's server that can be taken away, and a client of it."""

    def __init__(self, folder: Path) -> None:
        self._address = UnixAddress(str(folder / "s.sock"))
        self._durable = folder / "store.db"
        self._tasks = Tasks("server")
        self.store = EmbeddedStore(self._address, SocketNetwork(), random.Random(1))

    async def begin(self) -> None:
        ready = asyncio.Event()
        bound = lambda _address: ready.set()  # noqa: E731
        self._tasks.spawn(serve(self._address, self._durable, SocketNetwork(), bound), "server")
        await ready.wait()

    async def end(self) -> None:
        await self._tasks.stop()
        await until(lambda: self.store.state == "lost", "the store to be lost")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[StoreRig]:
    made = StoreRig(tmp_path)
    await made.begin()
    await made.store.start()
    try:
        yield made
    finally:
        await made.store.close()
        with contextlib.suppress(TimeoutError):
            await made.end()


async def test_what_follows_waits_for_the_writing(rig: StoreRig) -> None:
    """While the store is away nothing follows, and of a key the latest is written once it is back; what waits for
    several keys waits for all."""
    outbox = Outbox(rig.store, asyncio.Event())
    done: list[str] = []
    async with beside(outbox.run(), "outbox"):
        outbox.put("a", b"1")
        outbox.after(["a"], lambda: done.append("first"))
        await until(lambda: done == ["first"], "the first")
        await rig.end()
        outbox.put("a", b"2")
        outbox.after(["a"], lambda: done.append("second"))
        outbox.put("b", b"1")
        outbox.after(["a", "b"], lambda: done.append("both"))
        outbox.put("a", b"3")
        await until(lambda: outbox.failing, "a failure")
        assert done == ["first"]
        await rig.begin()
        await until(lambda: len(done) == 3, "the rest")
        assert set(done) == {"first", "second", "both"}
        assert (await rig.store.get("a", 60.0), await rig.store.get("b", 60.0)) == (b"3", b"1")
        assert not outbox.failing


async def test_nothing_is_written_once_the_lock_is_lost(rig: StoreRig) -> None:
    """Whatever waited; and what waits for nothing is not done either."""
    lost = asyncio.Event()
    done: list[str] = []
    outbox = Outbox(rig.store, lost)
    outbox.put("a", b"1")
    outbox.after(["a"], lambda: done.append("a"))
    lost.set()
    async with asyncio.timeout(60.0):
        await outbox.run()
    outbox.after(["b"], lambda: done.append("b"))
    assert done == []
    assert await rig.store.get("a", 60.0) is None


async def test_what_the_store_forgot_is_written_again(rig: StoreRig) -> None:
    """A key that somebody removed, or that an older copy of the store lacks; a key that was removed here stays so."""
    outbox = Outbox(rig.store, asyncio.Event())
    async with beside(outbox.run(), "outbox"):
        outbox.put("a", b"1")
        outbox.put("b", b"1")
        await until(lambda: not len(outbox), "the writing")
        outbox.put("b", None)
        await until(lambda: not len(outbox), "the removing")
        await rig.store.delete("a", 60.0)
        outbox.check({})
        await until(lambda: not len(outbox), "the writing anew")
        assert (await rig.store.get("a", 60.0), await rig.store.get("b", 60.0)) == (b"1", None)


async def test_what_another_wrote_is_written_again_too(rig: StoreRig) -> None:
    """It is gone on from, and was not written here; what was decided since goes before it."""
    outbox = Outbox(rig.store, asyncio.Event())
    outbox.put("b", b"2")
    for key in ("a", "b"):
        outbox.adopt(key, b"1")
    async with beside(outbox.run(), "outbox"):
        await until(lambda: not len(outbox), "the writing")
        assert await rig.store.get("a", 60.0) is None
        outbox.check({})
        await until(lambda: not len(outbox), "the writing anew")
        assert (await rig.store.get("a", 60.0), await rig.store.get("b", 60.0)) == (b"1", b"2")


async def test_what_no_store_takes_holds_up_nobody(rig: StoreRig) -> None:
    """A worker may say so much that its verdict is too long for any store."""
    outbox = Outbox(rig.store, asyncio.Event())
    done: list[str] = []
    outbox.put("a", b"x" * (VALUE_BYTES_MAX + 1))
    outbox.after(["a"], lambda: done.append("a"))
    outbox.put("b", b"1")
    async with beside(outbox.run(), "outbox"):
        await until(lambda: not len(outbox), "the writing")
    assert (await rig.store.get("a", 60.0), await rig.store.get("b", 60.0), done) == (None, b"1", [])


async def test_nothing_is_written_where_another_writes(rig: StoreRig) -> None:
    """Whatever waits then would undo what that one wrote."""
    outbox = Outbox(rig.store, asyncio.Event())
    outbox.put("a", b"1")
    outbox.close()
    async with asyncio.timeout(60.0):
        await outbox.run()
    assert await rig.store.get("a", 60.0) is None


async def test_an_act_that_fails_costs_itself(rig: StoreRig) -> None:
    """The next is done, and writing goes on."""
    outbox = Outbox(rig.store, asyncio.Event())
    done: list[str] = []

    def fail() -> None:
        raise ValueError("a bug")

    async with beside(outbox.run(), "outbox"):
        outbox.put("a", b"1")
        outbox.after(["a"], fail)
        outbox.after(["a"], lambda: done.append("next"))
        await until(lambda: done == ["next"], "the next")
