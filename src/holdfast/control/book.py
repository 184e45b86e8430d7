"""What the store says of one deployment: its workers, what was decided about them, and what frontends report.

Always true: a reader is told nothing before all of it has been read once, so that nobody decides by half of it; what is
another deployment's is not kept. A lost store is told, and what was read stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from holdfast.core.tasks import Tasks
from holdfast.discovery.keys import CARDS, EXPECTED, FAULTS, HEALTH, INSTANCES, LEVELS, REPORTS, STANDBYS, admits
from holdfast.discovery.registry import Change, Registry
from holdfast.health.records import HealthRecord
from holdfast.store.contract import Deleted, Lost, Put, Snapshot, Store, WatchEvent

log = logging.getLogger("holdfast.control")

FOUND = (CARDS, INSTANCES, STANDBYS)


class Reader(Protocol):
    """Who is told of changes, once the book is whole."""

    def found(self, changes: list[Change]) -> None:
        """Workers came or left."""

    def wrote(self, key: str, value: bytes | None) -> None:
        """Somebody wrote or removed a key of what is decided or reported; also after a gap, if it is another then."""

    def reread(self) -> None:
        """All that stands under one prefix was read anew, after a gap."""


class Book:
    """Watches of one deployment's keys, and what they have told."""

    def __init__(self, store: Store, deployment: str) -> None:
        self._store = store
        self._deployment = deployment
        self.registry = Registry(deployment)
        self.values: dict[str, bytes] = {}  # by key: what was decided, and reports
        self._verdicts: dict[str, HealthRecord] = {}
        self._unread: set[str] = set()  # keys of verdicts that have changed since
        self.whole = asyncio.Event()
        self._missing = {
            *FOUND,
            HEALTH,
            LEVELS + deployment,
            f"{EXPECTED}{deployment}/",
            f"{FAULTS}{deployment}/",
            f"{REPORTS}{deployment}/",
        }
        self._reader: Reader | None = None
        self._tasks = Tasks("control's book", self._failed)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def open(self) -> None:
        for prefix in self._missing:
            self._tasks.spawn(self._watch(prefix), f"watch {prefix}")

    async def close(self) -> None:
        self._reader = None
        await self._tasks.stop()
        self.failed.cancel()

    def read_by(self, reader: Reader) -> None:
        """Tell the reader of every change from now on."""
        self._reader = reader

    def verdicts(self) -> dict[str, HealthRecord]:
        """By path. Whoever probes asks for them each second, so each is read once."""
        for key in self._unread:
            self._verdicts.pop(key.removeprefix(HEALTH), None)
            if key in self.values:
                self._verdicts |= decoded({key: self.values[key]}, HEALTH, HealthRecord)
        self._unread.clear()
        return self._verdicts

    def _failed(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)  # our own bug, which ends the process

    async def _watch(self, prefix: str) -> None:
        take = self._take_found if prefix in FOUND else self._take_value
        async with contextlib.aclosing(self._store.watch(prefix)) as events:  # a client may have few of them
            async for event in events:
                if isinstance(event, Lost):
                    if prefix == HEALTH:  # every watch is told of it; people are told once
                        log.warning("store lost: %s; nothing is decided that cannot be written down", event.reason)
                    continue
                take(prefix, event)
                if isinstance(event, Snapshot) and prefix in self._missing:
                    self._missing.discard(prefix)
                    if not self._missing:
                        self.whole.set()

    def _take_found(self, prefix: str, event: WatchEvent) -> None:
        registry = self.registry
        changes: list[Change] = []
        if isinstance(event, Snapshot):
            changes = registry.snapshot(prefix, event.items)
        elif isinstance(event, Put):
            changes = registry.put(event.key, event.value)
        elif isinstance(event, Deleted):
            changes = registry.deleted(event.key)
        if changes and self._reader is not None:
            self._reader.found(changes)

    def _take_value(self, prefix: str, event: WatchEvent) -> None:
        if isinstance(event, Snapshot):
            for key in [key for key in self.values if key.startswith(prefix) and key not in event.items]:
                self._set(key, None)
            for key, value in event.items.items():
                self._set(key, value)
            if self._reader is not None:
                self._reader.reread()
        elif isinstance(event, Put):
            self._set(event.key, event.value)
        elif isinstance(event, Deleted):
            self._set(event.key, None)

    def _set(self, key: str, value: bytes | None) -> None:
        if not self._is_ours(key) or self.values.get(key) == value:
            return
        if value is None:
            del self.values[key]
        else:
            self.values[key] = value
        if key.startswith(HEALTH):
            self._unread.add(key)
        if self._reader is not None:
            self._reader.wrote(key, value)

    def _is_ours(self, key: str) -> bool:
        """A prefix of the store is a string's: `foo` would have `foobar`'s level too."""
        if key.startswith(HEALTH):
            return admits(self._deployment, key.removeprefix(HEALTH).partition("/")[0])
        return not key.startswith(LEVELS) or key == LEVELS + self._deployment


def decoded(values: Mapping[str, bytes], prefix: str, kind: Any) -> dict[str, Any]:
    """What stands under a prefix, by the rest of the key; what cannot be read (a newer version's) is left out, and
    told."""
    read: dict[str, Any] = {}
    for key, value in values.items():
        if key.startswith(prefix):
            try:
                read[key.removeprefix(prefix)] = msgspec.json.decode(value, type=kind)
            except (ValueError, RecursionError) as error:
                log.warning("cannot read %s: %s", key, error)
    return read


