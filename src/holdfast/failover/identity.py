"""What a lock's holder says of itself, in JSON, for people. It stays behind after a release, and proves nothing."""

from __future__ import annotations

import os

import msgspec

from holdfast.core.procfs import read_process
from holdfast.failover.lock import Holder

UNSIGNED = Holder("somebody who has not signed yet")


def signature(who: str, unix_s: float) -> bytes:
    """This process, as a lock's holder from now on."""
    me = read_process(os.getpid())
    return msgspec.json.encode(Holder(who, os.getpid(), me.start_ticks if me else 0, round(unix_s, 3))) + b"\n"


def read_holder(text: bytes) -> Holder:
    """Who signed; what cannot be read is somebody all the same."""
    try:
        return msgspec.json.decode(text, type=Holder)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return UNSIGNED
