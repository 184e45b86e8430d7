"""Keeps a copy of the keys under some prefixes of the store up to date, by watches.

Always true: `whole` is set once every prefix has been read; the copy is kept while the store is unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from holdfast.store.contract import Deleted, Lost, Put, Snapshot, Store, WatchEvent


class Mirror:
    """A copy of keys and values. `run` it in a task; it sets `news` at every change."""

    def __init__(self, store: Store, prefixes: Sequence[str]) -> None:
        self._store = store
        self._prefixes = prefixes
        self._missing = set(prefixes)
        self.values: dict[str, bytes] = {}
        self.away: set[str] = set()  # prefixes whose watch is interrupted: the store is unreachable
        self.outages = 0
        self.whole = asyncio.Event()
        self.news = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for prefix in self._prefixes:
                tasks.create_task(self._watch(prefix))

    async def _watch(self, prefix: str) -> None:
        async with contextlib.aclosing(self._store.watch(prefix)) as events:  # closed at once: a client has few watches
            async for event in events:
                self._on_event(prefix, event)

    def _on_event(self, prefix: str, event: WatchEvent) -> None:
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
