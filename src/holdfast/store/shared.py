"""The client's side of watches and of leased keys, shared by every kind of store.

A `LeasedKey` is the wish; the store that keeps it compares the wish with what the server has acknowledged and closes
the gap, at once when it can and again after every loss. Always true: at most one put of a key is under way.

Always true of a queue: it is bounded in events and bytes; on overflow everything in it is dropped and, when its
consumer next looks, a fresh snapshot is asked for; a snapshot replaces the changes queued before it; between a `Lost`
and the snapshot that ends it nothing is told. Always true of the hub: an outage is told once to every watch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from typing import Protocol

from holdfast.store.contract import (
    CALLS_MAX,
    REGISTRATIONS_MAX,
    WATCHES_MAX,
    Deleted,
    Lost,
    Put,
    Snapshot,
    State,
    StoreUnavailable,
    WatchEvent,
    check_key,
    check_prefix,
    check_value,
)

_log = logging.getLogger(__name__)

# A consumer that is this far behind is better served by a snapshot.
QUEUE_EVENTS_MAX = 1024
QUEUE_BYTES_MAX = 8 * 1024 * 1024
# How long a withdrawal waits for the store before it leaves the rest to the background.
WITHDRAW_TIMEOUT_S = 2.0


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


class Keeper(Protocol):
    """The store client that makes wishes true."""

    def keep(self, leased: LeasedKey) -> None:
        """The wish is new or has changed; called synchronously, never waits."""

    async def drop(self, leased: LeasedKey) -> None:
        """The wish is withdrawn; bounded by `WITHDRAW_TIMEOUT_S`."""


class LeasedKey:
    """One registration: what should be in the store while this client lives."""

    def __init__(self, key: str, value: bytes, keeper: Keeper) -> None:
        check_key(key)
        check_value(value)
        self.key = key
        self.value = value
        self.in_flight = False
        self.registered = False
        self._refusal = ""  # the store's last reason for not taking it
        self._keeper = keeper
        self._withdrawn = False

    def __repr__(self) -> str:
        state = "withdrawn" if self._withdrawn else "registered" if self.registered else "pending"
        return f"registration {self.key} {state}"

    def update(self, value: bytes) -> None:
        check_value(value)
        if self._withdrawn:
            raise ValueError(f"registration {self.key} was withdrawn")
        self.value = value
        self.become_lost()
        self._keeper.keep(self)

    async def withdraw(self) -> None:
        if not self._withdrawn:
            self._withdrawn = True
            self.become_lost()
            await self._keeper.drop(self)

    def become_acknowledged(self, value: bytes) -> None:
        """The store holds `value`; that is the wish unless it has changed since."""
        self._refusal, self.registered = "", value == self.value and not self._withdrawn

    def become_refused(self, reason: str) -> None:
        """The store does not take it; each reason is told once."""
        if reason and reason != self._refusal:
            _log.warning("%r: refused: %s", self, reason)
            self._refusal = reason

    def become_lost(self) -> None:
        """The store does not hold the wish (any more)."""
        self.registered = False


def add_wish(wishes: dict[str, LeasedKey], leased: LeasedKey) -> None:
    """Take a new registration; one client holds a key once."""
    if leased.key in wishes:
        raise ValueError(f"key {leased.key} is registered by this client already; use its update()")
    if len(wishes) >= REGISTRATIONS_MAX:
        raise ValueError(f"more than {REGISTRATIONS_MAX} registrations in one client")
    wishes[leased.key] = leased


class WatchHub:
    """All watches of one client, whether the store is there, and the bounds of its calls. `mend`: what to do if not."""

    def __init__(
        self,
        address: str,
        mend: str,
        *,
        on_refetch: Callable[[WatchQueue], None],
        on_close: Callable[[WatchQueue], None],
        events_max: int = QUEUE_EVENTS_MAX,
    ) -> None:
        self._address = address
        self._mend = mend
        self._calls = 0
        self.queues: set[WatchQueue] = set()
        self.state: State = "connecting"
        self.reason = "not connected yet"
        self._on_refetch = on_refetch
        self._on_close = on_close
        self._events_max = events_max

    def status(self, wishes: Collection[LeasedKey], *, closed: bool) -> str:
        """The client's status line."""
        why = f" ({self.reason})" if self.reason else ""
        counts = f"{sum(leased.registered for leased in wishes)}/{len(wishes)} registered, {len(self.queues)} watches"
        return f"store {self._address} {'closed' if closed else self.state}{why}, {counts}"

    def unavailable(self, cause: str) -> StoreUnavailable:
        why = f" ({self.reason})" if self.reason else ""
        return StoreUnavailable(self._address, cause + why, f"{self._mend}; this client reconnects by itself")

    @contextlib.asynccontextmanager
    async def call(self, what: str, timeout_s: float) -> AsyncIterator[None]:
        """One call of this client: so many at once, and none for longer than its time."""
        if self._calls >= CALLS_MAX:
            raise self.unavailable(f"{CALLS_MAX} calls are under way already")
        self._calls += 1
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise self.unavailable(f"{what} was not answered within {timeout_s:g} s") from None
        finally:
            self._calls -= 1

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
