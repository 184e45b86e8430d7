"""The messages between the lock server and its clients, and their encoding.

A connection opens with `Hello`; the answer is `Welcome` or `Refused`, and after a `Refused` the connection closes. One
connection asks for the lock once. Always true: no message is longer than `MESSAGE_BYTES_MAX`, and none is sent unasked
but `Granted` to a waiter: whoever is killed while it holds has then read everything, so its connection ends with a
clean end of file and not with a reset (which proves less, see machine.py).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.wire.frames import FrameError, FrameSplitter, reader

VERSION = 1
# The longest is a Hello: a name, an id and a token, each a few hundred bytes at most.
MESSAGE_BYTES_MAX = 4096

# Why a connection is refused. The first three do not mend by waiting.
WRONG_VERSION = "WrongVersion"
WRONG_TOKEN = "WrongToken"
WRONG_USER = "WrongUser"
MALFORMED = "Malformed"
NO_HELLO = "NoHello"
FULL = "Full"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First frame of a client. `id` is random, one per client object: what a holder that comes back is known by."""

    version: int
    id: str
    who: str
    pid: int
    start_ticks: int
    token: str = ""


class AskLock(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """`grant`: the number under which the client holds the lock already; 0: it does not hold it."""

    grant: int = 0


class GiveBack(msgspec.Struct, frozen=True, array_like=True, tag=3):
    pass


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=4):
    number: int


class AskOwner(msgspec.Struct, frozen=True, array_like=True, tag=5):
    pass


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """`window_s`: how long this server, once restarted, waits for the holder; a holder gives up well before."""

    version: int
    window_s: float


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=33):
    code: str
    reason: str


class Granted(msgspec.Struct, frozen=True, array_like=True, tag=34):
    grant: int


class Released(msgspec.Struct, frozen=True, array_like=True, tag=35):
    pass


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """`holds`: this very connection holds the lock."""

    number: int
    holds: bool


class Owner(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """An empty `who`: nobody."""

    who: str = ""
    pid: int = 0
    start_ticks: int = 0
    since_unix_s: float = 0.0
    waiting: int = 0


ToServer = Hello | AskLock | GiveBack | Ping | AskOwner
ToClient = Welcome | Refused | Granted | Released | Pong | Owner

decode_to_server: Callable[[memoryview], ToServer] = reader(ToServer)
decode_to_client: Callable[[memoryview], ToClient] = reader(ToClient)


def split(splitter: FrameSplitter, data: bytes) -> list[memoryview]:
    """The frames that `data` completes; a long one is refused, also before it is complete."""
    payloads = splitter.feed(data)
    if splitter.held_bytes > MESSAGE_BYTES_MAX or any(len(payload) > MESSAGE_BYTES_MAX for payload in payloads):
        raise FrameError(f"message over the limit of {MESSAGE_BYTES_MAX} bytes")
    return payloads
