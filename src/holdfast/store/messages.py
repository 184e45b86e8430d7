"""The messages between the embedded store and its clients, and their encoding.

A connection opens with `Hello`; the answer is `Welcome` or `Refused`. Requests carry a number of the client's own and
are answered with it. What may be large (snapshots) travels in parts, each well under the frame limit, in one
unbroken sequence, so that the parts together are one moment of the store.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.wire.frames import reader

VERSION = 1
# A part closes once it holds this much; with one value of 1 MiB on top it is still far below a frame's limit.
PART_BYTES = 1024 * 1024


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First frame of a client. From here on the connection is the lease of what it registers."""

    version: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=2):
    pass


class Get(msgspec.Struct, frozen=True, array_like=True, tag=3):
    call: int
    key: str


class PutKey(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """`leased`: the key lives as long as this connection, and is not written to disk."""

    call: int
    key: str
    value: bytes
    leased: bool


class DeleteKey(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """`own`: only if this connection is the key's lease (a newer registrant's key is left alone)."""

    call: int
    key: str
    own: bool


class WatchPrefix(msgspec.Struct, frozen=True, array_like=True, tag=7):
    watch: int
    prefix: str


class Unwatch(msgspec.Struct, frozen=True, array_like=True, tag=8):
    watch: int


class SwapKey(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Put it without a lease (None: remove it) if it has this value (None: if it is not there), or the new one already.
    The answer is `Done`, or the `Value` that it has instead."""

    call: int
    key: str
    value: bytes | None
    expected: bytes | None


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=32):
    version: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """Why the connection ends; it closes after this."""

    code: str
    reason: str


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
    """`value` None: the key is gone."""

    watch: int
    key: str
    value: bytes | None


ToServer = Hello | Ping | Get | PutKey | DeleteKey | WatchPrefix | Unwatch | SwapKey
ToClient = Welcome | Refused | Pong | Value | Done | Failed | WatchItems | Changed

decode_to_server: Callable[[memoryview], ToServer] = reader(ToServer)
decode_to_client: Callable[[memoryview], ToClient] = reader(ToClient)


def in_parts(items: list[tuple[str, bytes]]) -> list[tuple[list[tuple[str, bytes]], bool]]:
    """Cut items into parts that fit a frame; the last (perhaps empty) one is marked."""
    parts: list[list[tuple[str, bytes]]] = [[]]
    size = 0
    for key, value in items:
        if size >= PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append((key, value))
        size += len(key) + len(value) + 16
    return [(part, index == len(parts) - 1) for index, part in enumerate(parts)]
