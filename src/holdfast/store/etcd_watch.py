"""Watches of etcd: for each one a task that reads a snapshot and then follows the changes after it.

Always true: a snapshot is one revision, however many pages it took; a stream that breaks is taken up at the revision
after the last whole one; where etcd no longer has that history, a new snapshot is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from holdfast.store.backoff import Backoff
from holdfast.store.contract import Deleted, Put
from holdfast.store.etcd_gateway import (
    CODE_RESOURCE_EXHAUSTED,
    EtcdError,
    EtcdGateway,
    EtcdUnreachable,
    RangeRequest,
    RangeResponse,
    WatchResult,
)
from holdfast.store.shared import WatchQueue

_log = logging.getLogger(__name__)

# A snapshot's page; an answer that is too large for etcd's gateway is asked for again in smaller pieces.
PAGE_KEYS = 512
SNAPSHOT_TIMEOUT_S = 5.0


async def read_prefix(gateway: EtcdGateway, prefix: str, timeout_s: float) -> tuple[dict[str, bytes], int]:
    """All keys under a prefix at one revision, and that revision."""
    start, end = prefix.encode() or b"\0", range_end(prefix.encode())
    items: dict[str, bytes] = {}
    page_keys, revision = PAGE_KEYS, 0
    while True:
        request = RangeRequest(start, end, limit=page_keys, revision=revision)
        try:
            answer = await gateway.ask("kv/range", request, RangeResponse, timeout_s)
        except EtcdError as error:
            if error.code != CODE_RESOURCE_EXHAUSTED or page_keys == 1:
                raise
            page_keys = max(1, page_keys // 8)
            continue
        revision = revision or answer.header.revision
        for kv in answer.kvs:
            with contextlib.suppress(UnicodeDecodeError):  # another application's key
                items[kv.key.decode()] = kv.value
        if not answer.more:
            return items, revision
        start = answer.kvs[-1].key + b"\0"


class WatchTasks:
    """The tasks behind a client's watches. `on_break` hears of every broken stream."""

    def __init__(self, gateway: EtcdGateway, rng: random.Random, on_break: Callable[[], None]) -> None:
        self._gateway = gateway
        self._rng = rng
        self._on_break = on_break
        self._tasks: dict[WatchQueue, asyncio.Task[None]] = {}

    def restart(self, queue: WatchQueue, group: asyncio.TaskGroup) -> None:
        """Begin (again) with a snapshot."""
        self.stop(queue)
        self._tasks[queue] = group.create_task(self._follow(queue))

    def stop(self, queue: WatchQueue) -> None:
        task = self._tasks.pop(queue, None)
        if task is not None:
            task.cancel()

    async def _follow(self, queue: WatchQueue) -> None:
        backoff = Backoff(self._rng)
        revision = 0
        while True:
            try:
                if revision == 0:
                    revision = await self._snapshot(queue)
                async with contextlib.aclosing(
                    self._gateway.watch(watch_request(queue.prefix.encode(), revision + 1))
                ) as results:
                    async for result in results:
                        backoff.reset()
                        if result.canceled or result.header.revision < revision:
                            break  # compacted, or another history
                        revision = _tell(queue, result, revision)
                revision = 0
            except (EtcdUnreachable, TimeoutError):
                self._on_break()
            except EtcdError as error:
                _log.warning("watch of %r starts anew: %s", queue.prefix, error)
                revision = 0
            await asyncio.sleep(backoff.next_s())

    async def _snapshot(self, queue: WatchQueue) -> int:
        async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
            items, revision = await read_prefix(self._gateway, queue.prefix, SNAPSHOT_TIMEOUT_S)
        queue.offer_snapshot(items)
        return revision


def _tell(queue: WatchQueue, result: WatchResult, revision: int) -> int:
    """Pass a line's events on; return the last revision that is known whole."""
    for event in result.events:
        with contextlib.suppress(UnicodeDecodeError):  # another application's key
            key = event.kv.key.decode()
            queue.offer_change(Deleted(key) if event.type == "DELETE" else Put(key, event.kv.value))
    if not result.events or result.fragment:
        return revision
    return max(revision, result.events[-1].kv.mod_revision)


def range_end(prefix: bytes) -> bytes:
    """The first key after every key with this prefix; a single NUL means: to the end of the keyspace."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\0"


def watch_request(prefix: bytes, start_revision: int) -> object:
    """Fragments keep each line small, however much one revision changed."""
    create = {
        "key": prefix or b"\0",
        "range_end": range_end(prefix),
        "start_revision": start_revision,
        "fragment": True,
    }
    return {"create_request": create}
