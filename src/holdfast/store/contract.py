"""What a process asks of the store: keys with leases, and watches.

A `Store` is opened once and kept for the process's life. Always true: it outlives the store's death, restart and
freeze without anyone's help; no call waits longer than its `timeout_s`; a leased key lives as long as the client
that registered it and is put again by itself whenever the store has lost it (one that another client deletes or
overwrites on purpose stays so until the next reconnect). Watches tell what the store knows, and nothing about
who is alive: a vanished key is a hint, never proof of a dead worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

# Our longest key is under 200 bytes; etcd itself has no limit, so the smaller one is ours.
KEY_BYTES_MAX = 512
# etcd refuses requests over 1.5 MiB; larger things travel by content hash.
VALUE_BYTES_MAX = 1024 * 1024
# One process registers a handful of keys and watches a handful of prefixes; more is a leak.
REGISTRATIONS_MAX = 1024
WATCHES_MAX = 64
# Calls of one client under way at once; more means that callers do not wait for answers.
CALLS_MAX = 1024

State = Literal["connecting", "connected", "lost"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys under the watched prefix, now: what was told before is void."""

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
    """The store cannot be reached. Said once per outage; the `Snapshot` that follows ends it."""

    reason: str


WatchEvent = Snapshot | Put | Deleted | Lost


class StoreUnavailable(Exception):
    """The store did not do what was asked in time. A put or delete that failed so may still take effect later."""

    def __init__(self, address: str, cause: str, mend: str) -> None:
        super().__init__(f"store {address}: {cause}; {mend}")


class Registration(Protocol):
    """One leased key of this client."""

    def update(self, value: bytes) -> None:
        """Change the value; returns at once, the store follows."""

    async def withdraw(self) -> None:
        """Take the key away. Bounded: what the store cannot do now, it does when it is back. Idempotent."""


class Watch(Protocol):
    """One consumer's view of a prefix. Ends when it or the store's client is closed."""

    def __aiter__(self) -> AsyncIterator[WatchEvent]: ...

    async def __anext__(self) -> WatchEvent: ...

    async def aclose(self) -> None: ...


class Store(Protocol):
    """A client of the store; its repr is its status line."""

    @property
    def state(self) -> State: ...

    async def start(self) -> None:
        """Begin to connect; returns at once, whether or not the store is there."""

    async def close(self) -> None:
        """End watches and drop this client's leased keys promptly. Idempotent."""

    def register(self, key: str, value: bytes) -> Registration:
        """Hold a leased key from now on; returns at once."""

    async def get(self, key: str, timeout_s: float) -> bytes | None: ...

    async def put(self, key: str, value: bytes, timeout_s: float) -> None:
        """Write a key without a lease; when this returns it survives the store's restart."""

    async def swap(self, key: str, value: bytes | None, expected: bytes | None, timeout_s: float) -> bool:
        """Write a key as `put` does, or remove it (None), if it has the expected value (None: if it is not there);
        whether it has the new one now. Of several that expect the same one succeeds. It may be asked again: who has the
        new value has it."""

    async def delete(self, key: str, timeout_s: float) -> None:
        """Remove a key; one that is not there is no error."""

    def watch(self, prefix: str) -> Watch:
        """First a `Snapshot` (before it a `Lost`, if the store cannot be reached), then every change."""


def check_key(key: str) -> None:
    """Raise a ValueError that names what is wrong with a key."""
    if not key:
        raise ValueError("key must not be empty")
    _check_text("key", key)


def check_prefix(prefix: str) -> None:
    """Raise a ValueError that names what is wrong with a prefix; the empty one means every key."""
    _check_text("prefix", prefix)


def check_value(value: bytes) -> None:
    """Raise a ValueError that names what is wrong with a value."""
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
