"""The pool in the keeper: what a restarted vault must know of it."""

from __future__ import annotations

import msgspec

from holdfast.memory.pool_state import Pool

KEY = "pool"


class PoolRecord(msgspec.Struct, frozen=True, array_like=True):
    """The descriptors beside it are the index's and then the pages'."""

    last_epoch: int
    geometry: str | None
    made: bool
    owner: int | None
    sizes: list[int]


decode_pool = msgspec.msgpack.Decoder(PoolRecord).decode


def record_of(state: Pool, sizes: list[int]) -> PoolRecord:
    """A pool that is not complete has no pages yet."""
    pages = state.pages
    if pages is None:
        return PoolRecord(state.last_epoch, None, False, state.owner, [])
    return PoolRecord(state.last_epoch, pages.geometry_hash, pages.made, state.owner, sizes if pages.made else [])
