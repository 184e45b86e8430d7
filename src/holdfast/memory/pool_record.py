"""The pool in the keeper: what a restarted vault must know of it."""

from __future__ import annotations

import msgspec

KEY = "pool"


class PoolRecord(msgspec.Struct, frozen=True, array_like=True):
    """The descriptors beside it are the index's and then the pages'."""

    last_epoch: int
    geometry: str | None
    made: bool
    owner: int | None
    sizes: list[int]


decode_pool = msgspec.msgpack.Decoder(PoolRecord).decode
