"""The pool in the keeper: what a restarted vault must know of it.

Two records: who owns it changes in the middle of a failover and is a few bytes; its pages are many descriptors, put
once.
Always true: a record that says the pool is complete counts only beside its pages.
"""

from __future__ import annotations

import msgspec

from holdfast.memory.vault.pool_state import Pages, Pool

KEY = "pool"
PAGES_KEY = "pool/pages"


class PoolRecord(msgspec.Struct, frozen=True, array_like=True):
    last_epoch: int = 0
    geometry: str | None = None
    made_epoch: int = 0  # 0: not complete
    owner: int | None = None

    def pages(self) -> Pages | None:
        return None if self.geometry is None else Pages(self.geometry, self.made_epoch)


class PagesRecord(msgspec.Struct, frozen=True, array_like=True):
    """The descriptors beside it are the index's and then the pages'."""

    made_epoch: int
    sizes: list[int]


decode_pool = msgspec.msgpack.Decoder(PoolRecord).decode
decode_pages = msgspec.msgpack.Decoder(PagesRecord).decode


def record_of(state: Pool) -> PoolRecord:
    pages = state.pages
    if pages is None:
        return PoolRecord(state.last_epoch, owner=state.owner)
    return PoolRecord(state.last_epoch, pages.geometry_hash, pages.made_epoch, state.owner)
