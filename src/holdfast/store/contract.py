"""Defines the interface of a store's client: keys with leases, and watches.

A process opens one `Store` and keeps it.

Always true:

- The client recovers by itself from the server's death, restart and freeze.
- No call waits longer than its `timeout_s`.
- A leased key lives as long as the client that registered it; if the server loses the key, the client puts it again. A
  key that another client deleted or overwrote is put again only at the next reconnect.
- A watch tells what the store holds, not which process is alive: a vanished key is a hint, never proof of a dead
  worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from holdfast.core.errors import UserError

# Our longest key is under 200 bytes; etcd has no limit.
KEY_BYTES_MAX = 512
# etcd refuses requests over 1.5 MiB; larger data is sent by content hash.
VALUE_BYTES_MAX = 1024 * 1024
# One process registers a handful of keys and watches a handful of prefixes; more is a leak.
REGISTRATIONS_MAX = 1024
WATCHES_MAX = 64
# Concurrent calls of one client; more means that callers do not wait for answers.
CALLS_MAX = 1024

State = Literal["connecting", "connected", "lost"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys under the watched prefix; replaces everything reported before."""

    items: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Deleted:
    key: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Says that the store cannot be reached; sent once per outage, which the next `Snapshot` ends."""

    reason: str


WatchEvent = Snapshot | Put | Deleted | Lost


def changes(event: WatchEvent, known: Iterable[str]) -> tuple[Mapping[str, bytes], Collection[str]]:
    """Return the keys and values that an event puts, and which of the `known` keys it removes."""
    match event:
        case Snapshot(items):
            return items, [key for key in known if key not in items]
        case Put(key, value):
            return {key: value}, ()
        case Deleted(key):
            return {}, (key,)
        case Lost():
            return {}, ()


class StoreUnavailable(Exception):
    """The store did not complete a call in time. A put or delete may still take effect later."""

    def __init__(self, address: str, cause: str, mend: str) -> None:
        super().__init__(f"store {address}: {cause}; {mend}")


class Registration(Protocol):
    def update(self, value: bytes) -> None:
        """Change the value; return before the store has it."""

    async def withdraw(self) -> None:
        """Remove the key. If the store does not answer in time, return; the key goes when the store is back.
        Idempotent."""


class Watch(Protocol):
    """The events of one prefix, for one consumer. It ends when it or the store's client is closed."""

    def __aiter__(self) -> AsyncIterator[WatchEvent]: ...

    async def __anext__(self) -> WatchEvent: ...

    async def aclose(self) -> None: ...


class Store(Protocol):
    """A client of the store; its repr is its status line."""

    @property
    def state(self) -> State: ...

    async def start(self) -> None:
        """Begin to connect; return at once, whether or not the store is reachable."""

    async def close(self) -> None:
        """End watches and drop this client's leased keys promptly. Idempotent."""

    def register(self, key: str, value: bytes) -> Registration:
        """Hold a leased key from now on; return at once."""

    async def get(self, key: str, timeout_s: float) -> bytes | None: ...

    async def put(self, key: str, value: bytes, timeout_s: float) -> None:
        """Write a key without a lease; once this returns, the key survives a restart of the store."""

    async def swap(self, key: str, value: bytes | None, expected: bytes | None, timeout_s: float) -> bool:
        """Write a key as `put` does, or remove it (None), if it has the expected value (None: if it does not exist).
        Return True if it has the new value now, also when it already had, so that a retry is safe. Of several swaps
        with the same expected value and different new ones, one succeeds."""

    async def delete(self, key: str, timeout_s: float) -> None:
        """Remove a key; a missing one is no error."""

    def watch(self, prefix: str) -> Watch:
        """Return a watch: first a `Snapshot` (before it a `Lost` if the store is unreachable), then every change."""


async def watch_key(store: Store, key: str) -> AsyncIterator[bytes | None]:
    """Yield the value of one key, now and after each change; None: the key does not exist. Other keys with this prefix
    are ignored."""
    async for event in store.watch(key):
        put, removed = changes(event, (key,))
        if key in put or key in removed:
            yield put.get(key)


def check_key(key: str) -> None:
    if not key:
        raise ValueError("key must not be empty")
    _check_text("key", key)


def check_prefix(prefix: str) -> None:
    """Raise ValueError if a prefix is invalid; the empty one matches every key."""
    _check_text("prefix", prefix)


def check_value(value: bytes) -> None:
    if len(value) > VALUE_BYTES_MAX:
        raise ValueError(f"value of {len(value)} bytes is over the limit of {VALUE_BYTES_MAX}")


def _check_text(field: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{field} is not valid Unicode: {error.reason}") from error
    if size > KEY_BYTES_MAX:
        raise ValueError(f"{field} of {size} bytes is over the limit of {KEY_BYTES_MAX}")
    if "\0" in text:
        raise ValueError(f"{field} must not contain a NUL character")


# Each failed attempt means that another client's change succeeded; far fewer clients change one record at once.
ATTEMPTS_MAX = 64


async def update_record(
    store: Store, key: str, change: Callable[[bytes | None], bytes | None], timeout_s: float
) -> tuple[bytes | None, bool]:
    """Change a record by compare-and-swap: of two concurrent changes, the second sees what the first wrote. Return the
    value after `change` (None: no such key), and whether it was written. `change` returns its argument to change
    nothing. Raise UserError after `ATTEMPTS_MAX` conflicts, StoreUnavailable if one call takes longer than
    `timeout_s`."""
    for _ in range(ATTEMPTS_MAX):
        before = await store.get(key, timeout_s)
        after = change(before)
        if after == before:
            return after, False
        if await store.swap(key, after, before, timeout_s):
            return after, True
    raise UserError(f"{key.rpartition('/')[2]} is changed by others all the time; try again")
