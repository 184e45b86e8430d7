"""Defines the messages between the embedded store and its clients, and their encoding.

A connection opens with `Hello`; the answer is `Welcome` or `Refused`. The client numbers its requests, and an answer
carries its request's number. A snapshot is sent in parts, each well under the frame limit, in one unbroken sequence, so
that the parts together show the store at one moment.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.wire.connection import Refused, Versions
from holdfast.wire.frames import reader

VERSION = 1
VERSIONS = Versions(VERSION, VERSION)
# A part is closed once it holds this much; with one value of 1 MiB on top it is still far below a frame's limit.
PART_BYTES = 1024 * 1024


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A client's first frame; from here on the connection is the lease of the keys it registers."""

    version: int
    last_version: int = 0
    features: tuple[str, ...] = ()


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=2):
    pass


class Get(msgspec.Struct, frozen=True, array_like=True, tag=3):
    call: int
    key: str


class PutKey(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Writes a key. `leased`: it lives as long as this connection, and is not written to disk."""

    call: int
    key: str
    value: bytes
    leased: bool


class DeleteKey(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Removes a key. `own`: only if this connection is the key's lease (a newer registrant's key stays)."""

    call: int
    key: str
    own: bool


class WatchPrefix(msgspec.Struct, frozen=True, array_like=True, tag=7):
    watch: int
    prefix: str


class Unwatch(msgspec.Struct, frozen=True, array_like=True, tag=8):
    watch: int


class SwapKey(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Writes a key without a lease (`value` None: removes it) if it has the `expected` value (None: if it does not
    exist) or the new one already. The answer is `Done`, or the `Value` that it has instead."""

    call: int
    key: str
    value: bytes | None
    expected: bytes | None


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=32):
    version: int
    features: tuple[str, ...] = ()


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=34):
    pass


class Value(msgspec.Struct, frozen=True, array_like=True, tag=35):
    call: int
    value: bytes | None


class Done(msgspec.Struct, frozen=True, array_like=True, tag=37):
    call: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=38):
    call: int
    reason: str


class WatchItems(msgspec.Struct, frozen=True, array_like=True, tag=39):
    watch: int
    items: list[tuple[str, bytes]]
    last: bool


class Changed(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """Reports a change of a watched key; `value` None: it was removed."""

    watch: int
    key: str
    value: bytes | None


ToServer = Hello | Ping | Get | PutKey | DeleteKey | WatchPrefix | Unwatch | SwapKey
ToClient = Welcome | Refused | Pong | Value | Done | Failed | WatchItems | Changed

decode_to_server: Callable[[memoryview], ToServer] = reader(ToServer)
decode_to_client: Callable[[memoryview], ToClient] = reader(ToClient)


def in_parts(items: list[tuple[str, bytes]]) -> list[tuple[list[tuple[str, bytes]], bool]]:
    """Split items into parts that fit a frame, each with True if it is the last, which may be empty."""
    parts: list[list[tuple[str, bytes]]] = [[]]
    size = 0
    for key, value in items:
        if size >= PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append((key, value))
        size += len(key) + len(value) + 16
    return [(part, index == len(parts) - 1) for index, part in enumerate(parts)]
