"""The pool in the keeper: what a restarted vault must know of it.

Two records: who owns it changes in the middle of a failover and is a few bytes; its pages are many descriptors, put
once, ahead of the record that says the pool is complete, and dropped after the one that says there is none.
Always true: a record that says the pool is complete counts only beside its pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.memory.vault.kept import nothing
from holdfast.memory.vault.pool_machine import Pages, Pool
from holdfast.memory.vault.uploads import Upload

if TYPE_CHECKING:
    from holdfast.memory.vault.kept import KeptRecords
    from holdfast.memory.vault.sessions import Session

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


_decode_pool = msgspec.msgpack.Decoder(PoolRecord).decode
_decode_pages = msgspec.msgpack.Decoder(PagesRecord).decode


class KeptPool:
    """Both records."""

    def __init__(self, kept: KeptRecords) -> None:
        self._kept = kept
        self.sizes: list[int] = []  # the index, then the pages

    @property
    def fds(self) -> list[int]:
        return self._kept.records[PAGES_KEY].fds

    def load(self) -> PoolRecord | None:
        """What the keeper knows, if it knows all of it."""
        kept, pages = self._kept.records.get(KEY), self._kept.records.get(PAGES_KEY)
        record = _decode_pool(kept.blob) if kept is not None else None
        if record is None or not record.made_epoch:
            return record
        known = _decode_pages(pages.blob) if pages is not None else None
        if known is None or known.made_epoch != record.made_epoch:
            return None
        self.sizes = known.sizes
        return record

    def put(self, state: Pool, session: Session | None = None) -> None:
        """What `session` is told next waits until the keeper has it."""
        pages = state.pages
        record = PoolRecord(state.last_epoch, owner=state.owner)
        if pages is not None:
            record = PoolRecord(state.last_epoch, pages.geometry_hash, pages.made_epoch, state.owner)
        if session is not None:
            session.wait_for_keeper()
        then = session.acknowledge if session is not None else nothing
        self._kept.put(KEY, msgspec.msgpack.encode(record), [], then)

    def put_pages(self, upload: Upload, made_epoch: int) -> None:
        self.sizes = upload.sizes
        record = PagesRecord(made_epoch, upload.sizes)
        self._kept.put(PAGES_KEY, msgspec.msgpack.encode(record), upload.fds, nothing)

    def drop_pages(self) -> None:
        self.sizes = []
        self._kept.drop(PAGES_KEY)
