"""What stands in the store under some prefixes, as it was last heard.

Always true: it is whole before anybody goes by it; what was read stands while the store is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from holdfast.store.contract import Deleted, Lost, Put, Snapshot, Store, WatchEvent


class Mirror:
    """Keys and values. `run` it in a task; `news` is set at every change."""

    def __init__(self, store: Store, prefixes: Sequence[str]) -> None:
        self._store = store
        self._prefixes = prefixes
        self._missing = set(prefixes)
        self.values: dict[str, bytes] = {}
        self.away: set[str] = set()  # prefixes of which nothing is heard, for the store is lost
        self.outages = 0
        self.whole = asyncio.Event()
        self.news = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for prefix in self._prefixes:
                tasks.create_task(self._watch(prefix))

    async def _watch(self, prefix: str) -> None:
        async with contextlib.aclosing(self._store.watch(prefix)) as events:  # a client may have few of them
            async for event in events:
                self._hear(prefix, event)

    def _hear(self, prefix: str, event: WatchEvent) -> None:
        match event:
            case Snapshot(items):
                kept = {key: value for key, value in self.values.items() if not key.startswith(prefix)}
                self.values = kept | items
                self._missing.discard(prefix)
                self.away.discard(prefix)
                if not self._missing:
                    self.whole.set()
            case Put(key, value):
                self.values[key] = value
            case Deleted(key):
                self.values.pop(key, None)
            case Lost():
                self.away.add(prefix)
                self.outages += 1
                return
        self.news.set()
