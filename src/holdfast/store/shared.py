"""Implements watches and leased keys on the client's side, for every kind of store.

A `LeasedKey` is a desired registration. The store client puts it if the server has not acknowledged it, at once if
possible and again after every loss.

Always true:

- At most one put of a key is in flight.
- A watch's queue is bounded in events and bytes. On overflow its events are dropped, and a new snapshot is requested
  when its consumer reads next.
- A snapshot replaces the changes queued before it. Between a `Lost` and the snapshot that ends the outage nothing is
  queued.
- An outage is reported once to every watch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from holdfast.core.tasks import Tasks
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

# For a consumer that is further behind, a snapshot is cheaper.
QUEUE_EVENTS_MAX = 1024
QUEUE_BYTES_MAX = 8 * 1024 * 1024
# How long a withdrawal waits for the store; after that it completes in the background.
WITHDRAW_TIMEOUT_S = 2.0


class WatchQueue:
    """The queued events of one watch. `on_refetch` requests a new snapshot, `on_close` removes the watch."""

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
        # The snapshot that ends the outage also ends an overflow.
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


class SharedStoreKeeper(Protocol):
    """The store client that keeps registrations in the store."""

    def keep(self, leased: LeasedKey) -> None:
        """Register a new or changed value; called synchronously, never waits."""

    async def drop(self, leased: LeasedKey) -> None:
        """Remove a registration; wait at most `WITHDRAW_TIMEOUT_S`."""


class LeasedKey:
    """A registration: the key and value that the store should hold while this client lives."""

    def __init__(self, key: str, value: bytes, keeper: SharedStoreKeeper) -> None:
        check_key(key)
        check_value(value)
        self.key = key
        self.value = value
        self.in_flight = False
        self.registered = False
        self._refusal = ""  # the store's last reason for refusing it
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
        """Record that the store holds `value`, which is the desired one unless that has changed since."""
        self._refusal, self.registered = "", value == self.value and not self._withdrawn

    def become_refused(self, reason: str) -> None:
        """Log a refusal by the store, each reason once."""
        if reason and reason != self._refusal:
            _log.warning("%r: refused: %s", self, reason)
            self._refusal = reason

    def become_lost(self) -> None:
        """Record that the store does not hold the desired value."""
        self.registered = False


class StoreClient:
    """The base of both clients: watches, the store's state, and the limits of calls. `mend` is the advice in the error
    for an unreachable store."""

    def __init__(self, address: str, mend: str, events_max: int) -> None:
        self._where = address
        self._mend = mend
        self._events_max = events_max
        self._calls = 0
        self._registrations: dict[str, LeasedKey] = {}
        self._queues: set[WatchQueue] = set()
        self._reason = "not connected yet"
        self._closed = False
        self._tasks = Tasks(f"store {address}")
        self.state: State = "connecting"

    def __repr__(self) -> str:
        done = sum(leased.registered for leased in self._registrations.values())
        counts = f"{done}/{len(self._registrations)} registered, {len(self._queues)} watches"
        return f"store {self._where} {'closed' if self._closed else self.state}{self._why}, {counts}"

    @property
    def _why(self) -> str:
        return f" ({self._reason})" if self._reason else ""

    def _unavailable(self, cause: str) -> StoreUnavailable:
        return StoreUnavailable(self._where, cause + self._why, f"{self._mend}; this client reconnects by itself")

    @contextlib.asynccontextmanager
    async def _bounded(self, what: str, timeout_s: float) -> AsyncIterator[None]:
        """Run one call with a time limit, and at most `CALLS_MAX` at once; raise StoreUnavailable otherwise."""
        if self._calls >= CALLS_MAX:
            raise self._unavailable(f"{CALLS_MAX} calls are under way already")
        self._calls += 1
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise self._unavailable(f"{what} was not answered within {timeout_s:g} s") from None
        finally:
            self._calls -= 1

    def _add_registration(self, leased: LeasedKey) -> None:
        if leased.key in self._registrations:
            raise ValueError(f"key {leased.key} is registered by this client already; use its update()")
        if len(self._registrations) >= REGISTRATIONS_MAX:
            raise ValueError(f"more than {REGISTRATIONS_MAX} registrations in one client")
        self._registrations[leased.key] = leased

    def watch(self, prefix: str) -> WatchQueue:
        check_prefix(prefix)
        if len(self._queues) >= WATCHES_MAX:
            raise ValueError(f"more than {WATCHES_MAX} watches in one client; close those no longer needed")
        queue = WatchQueue(prefix, self._request_watch, self._close_watch, self._events_max)
        self._queues.add(queue)
        if self.state == "lost":
            queue.offer_lost(self._reason)
        self._request_watch(queue)
        return queue

    def _close_watch(self, queue: WatchQueue) -> None:
        self._queues.discard(queue)
        self._forget_watch(queue)

    def _become_connected(self) -> None:
        self.state, self._reason = "connected", ""

    def _become_lost(self, reason: str) -> None:
        self._reason = reason
        if self.state == "lost":
            return
        self.state = "lost"
        for queue in self._queues:
            queue.offer_lost(reason)

    def _end_watches(self) -> None:
        for queue in self._queues:
            queue.end()
        self._queues.clear()

    def _request_watch(self, queue: WatchQueue) -> None:
        """Request a snapshot and the changes after it; do nothing while not connected."""
        raise NotImplementedError

    def _forget_watch(self, queue: WatchQueue) -> None:
        raise NotImplementedError


def _size(event: WatchEvent) -> int:
    if isinstance(event, Put):
        return len(event.key) + len(event.value)
    return len(event.key) if isinstance(event, Deleted) else 0
