"""The client's side of watches, shared by every kind of store.

Always true of a queue: it is bounded in events and bytes; on overflow everything in it is dropped and, when its
consumer next looks, a fresh snapshot is asked for; a snapshot replaces the changes queued before it; between a `Lost`
and the snapshot that ends it nothing is told. Always true of the hub: an outage is told once to every watch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from holdfast.store.contract import (
    WATCHES_MAX,
    Deleted,
    Lost,
    Put,
    Snapshot,
    State,
    WatchEvent,
    check_prefix,
)

# A consumer that is this far behind is better served by a snapshot.
QUEUE_EVENTS_MAX = 1024
QUEUE_BYTES_MAX = 8 * 1024 * 1024


class WatchQueue:
    """One consumer's events. `on_refetch` asks for a fresh snapshot, `on_close` forgets the watch."""

    def __init__(
        self,
        prefix: str,
        on_refetch: Callable[[WatchQueue], None],
        on_close: Callable[[WatchQueue], None],
        events_max: int = QUEUE_EVENTS_MAX,
    ) -> None:
        self.prefix = prefix
        self._on_refetch = on_refetch
        self._on_close = on_close
        self._events_max = events_max
        self._events: deque[WatchEvent] = deque()
        self._bytes = 0
        self._overflowed = False
        self._refetching = False
        self._outage = False
        self._closed = False
        self._wake = asyncio.Event()

    def offer_snapshot(self, items: dict[str, bytes]) -> None:
        untold = [event for event in self._events if isinstance(event, Lost)][:1]
        self._events = deque([*untold, Snapshot(items)])
        self._bytes = 0
        self._overflowed = self._refetching = self._outage = False
        self._wake.set()

    def offer_change(self, event: Put | Deleted) -> None:
        if self._overflowed or self._outage:
            return
        self._bytes += _size(event)
        if len(self._events) >= self._events_max or self._bytes > QUEUE_BYTES_MAX:
            self._events = deque(event for event in self._events if isinstance(event, Lost))
            self._overflowed = True
        else:
            self._events.append(event)
        self._wake.set()

    def offer_lost(self, reason: str) -> None:
        if not (self._events and isinstance(self._events[-1], Lost)):
            self._events.append(Lost(reason))
        # The snapshot that ends the outage serves for an overflow as well.
        self._outage, self._overflowed = True, False
        self._wake.set()

    def end(self) -> None:
        self._closed = True
        self._wake.set()

    def __aiter__(self) -> WatchQueue:
        return self

    async def __anext__(self) -> WatchEvent:
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            if self._overflowed and not self._refetching:
                self._refetching = True
                self._on_refetch(self)
            self._wake.clear()
            await self._wake.wait()
        event = self._events.popleft()
        self._bytes -= _size(event)
        return event

    async def aclose(self) -> None:
        if not self._closed:
            self.end()
            self._events.clear()
            self._on_close(self)


class WatchHub:
    """All watches of one client, and whether the store is there."""

    def __init__(
        self,
        on_refetch: Callable[[WatchQueue], None],
        on_close: Callable[[WatchQueue], None],
        events_max: int = QUEUE_EVENTS_MAX,
    ) -> None:
        self.queues: set[WatchQueue] = set()
        self.state: State = "connecting"
        self.reason = "not connected yet"
        self._on_refetch = on_refetch
        self._on_close = on_close
        self._events_max = events_max

    def add(self, prefix: str) -> WatchQueue:
        check_prefix(prefix)
        if len(self.queues) >= WATCHES_MAX:
            raise ValueError(f"more than {WATCHES_MAX} watches in one client; close those no longer needed")
        queue = WatchQueue(prefix, self._on_refetch, self._forget, self._events_max)
        self.queues.add(queue)
        if self.state == "lost":
            queue.offer_lost(self.reason)
        return queue

    def become_connected(self) -> None:
        self.state, self.reason = "connected", ""

    def become_lost(self, reason: str) -> None:
        self.reason = reason
        if self.state == "lost":
            return
        self.state = "lost"
        for queue in self.queues:
            queue.offer_lost(reason)

    def close(self) -> None:
        for queue in self.queues:
            queue.end()
        self.queues.clear()

    def _forget(self, queue: WatchQueue) -> None:
        self.queues.discard(queue)
        self._on_close(queue)


def _size(event: WatchEvent) -> int:
    if isinstance(event, Put):
        return len(event.key) + len(event.value)
    return len(event.key) if isinstance(event, Deleted) else 0
