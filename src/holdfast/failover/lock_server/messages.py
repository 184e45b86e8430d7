"""Defines the messages between the lock server and its clients, and their encoding.

A connection opens with `Hello`; the answer is `Welcome` or `Refused`, and after a `Refused` the connection closes. One
connection asks for the lock once.

Always true: no message is longer than `MESSAGE_BYTES_MAX`; the server sends only answers, and `Granted` to a waiter. So
a holder that is killed has no unread input, and its connection ends with an end of file and not with a reset (which
proves less, see machine.py).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.wire.connection import FULL, MALFORMED, NO_HELLO, WRONG_VERSION, Refused, Versions
from holdfast.wire.frames import reader

__all__ = ["FULL", "MALFORMED", "NO_HELLO", "WRONG_VERSION", "Refused"]

VERSION = 1
VERSIONS = Versions(VERSION, VERSION)
# The longest message is a Hello: a name, an id and a token, each a few hundred bytes at most.
MESSAGE_BYTES_MAX = 4096

# Refusal codes besides the kit's. After these, or a wrong version, a retry is useless.
WRONG_TOKEN = "WrongToken"
WRONG_USER = "WrongUser"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A client's first frame. `id` is random, one per client object; it identifies a returning holder."""

    version: int
    id: str
    engine: str
    pid: int
    start_ticks: int
    token: str = ""
    last_version: int = 0
    features: tuple[str, ...] = ()


class AskLock(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Asks for the lock. `grant` is the number of the grant that the client already holds; 0: none."""

    grant: int = 0


class GiveBack(msgspec.Struct, frozen=True, array_like=True, tag=3):
    pass


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=4):
    number: int


class AskOwner(msgspec.Struct, frozen=True, array_like=True, tag=5):
    pass


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """Accepts a client. `window_s`: how long a restarted server waits for the holder; a holder gives up well before."""

    version: int
    window_s: float
    features: tuple[str, ...] = ()


class Granted(msgspec.Struct, frozen=True, array_like=True, tag=34):
    grant: int


class Released(msgspec.Struct, frozen=True, array_like=True, tag=35):
    pass


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """Answers a ping. `holds`: this very connection holds the lock."""

    number: int
    holds: bool


class Owner(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """Names the holder; if its name is empty, the lock is free."""

    engine: str = ""
    pid: int = 0
    start_ticks: int = 0
    since_unix_s: float = 0.0
    waiting: int = 0


ToServer = Hello | AskLock | GiveBack | Ping | AskOwner
ToClient = Welcome | Refused | Granted | Released | Pong | Owner

decode_to_server: Callable[[memoryview], ToServer] = reader(ToServer)
decode_to_client: Callable[[memoryview], ToClient] = reader(ToClient)
