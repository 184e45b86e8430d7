"""What an owner does beside its work after a takeover: in which order, under which lock; no wait is endless."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast.engines.host import memory
from holdfast.engines.host.memory import after_takeover
from holdfast.kv import adopt
from holdfast.kv.geometry import Geometry
from holdfast.kv.index import Index, index_bytes
from holdfast.kv.pool import Pool

KEY = bytes(range(16))


class Watched(Pool):
    """Notes every act that changes the books, and whether the lock was held."""

    def note(self, lock: threading.Lock) -> None:
        self.lock, self.acts = lock, list[tuple[str, bool]]()

    def gpu_fence_passed(self) -> int:
        self.acts.append(("passed", self.lock.locked()))
        return super().gpu_fence_passed()

    def fence_is_late(self) -> None:
        self.acts.append(("late", self.lock.locked()))
        super().fence_is_late()

    def streams_resumed(self) -> None:
        self.acts.append(("resumed", self.lock.locked()))
        super().streams_resumed()


def adopted(lock: threading.Lock) -> Watched:
    """One block awaited, one quarantined."""
    geometry = Geometry("w", "float32", 4, 1, 1, 1, 4)
    index = Index(bytearray(index_bytes(geometry)), geometry)
    index.format(10)
    dead = Pool(index, 10)
    got = dead.allocate(2)
    assert isinstance(got, list)
    dead.publish(*got[0], KEY, 0)
    pool = Watched(index, 11, adoption=adopt.adopt(index, 11))
    pool.note(lock)
    return pool


@pytest.mark.parametrize("late", [False, True])
async def test_waits_end_with_or_without_the_fence(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quarantined blocks come back at the fence; one that is late is called so, and whoever waits for room is told each
    time; last, nobody is awaited any more. All of it changes the books under their lock, which on_room may take."""
    monkeypatch.setattr(memory, "FENCE_PATIENCE_S", 0.02 if late else 3600.0)
    monkeypatch.setattr(memory, "AWAITED_S", 0.02)
    lock, fence = threading.Lock(), asyncio.Event()
    pool = adopted(lock)
    told: list[tuple[bool, int]] = []
    heard = asyncio.Event()

    def on_room() -> None:
        with lock:
            told.append((pool.fence_awaited, pool.quarantined_count))
        heard.set()

    async def fenced() -> None:
        await fence.wait()

    async with asyncio.timeout(60):
        work = asyncio.create_task(after_takeover(pool, fenced, lock, on_room))
        if late:
            await heard.wait()
            assert told == [(False, 1)]
        else:
            await asyncio.sleep(0)
            assert (told, pool.fence_awaited) == ([], True)
        fence.set()
        await work
    assert told[-1] == (False, 0)
    assert pool.acts == [("late", True)] * late + [("passed", True), ("resumed", True)]
    assert pool.awaited_count == 0


async def test_a_wait_that_is_cancelled_leaves_nothing_behind() -> None:
    """An owner that steps back before the fence: no act follows, and the lock is free."""
    lock = threading.Lock()
    pool = adopted(lock)
    work = asyncio.create_task(after_takeover(pool, asyncio.Event().wait, lock, lambda: None))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert (pool.acts, lock.locked(), pool.quarantined_count) == ([], False, 1)
