"""The store view mirrors one deployment's keys: its workers, the decisions about them, and the frontends' reports.

Always true: `whole` is set only after every prefix was read once, so that no decision is made from half of the data;
other deployments' keys are not kept; when the store becomes unavailable, that is logged and the last values stay.
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


class StoreReader(Protocol):
    """Receives the changes, once it is passed to `read_by`."""

    def on_instances(self, changes: list[Change]) -> None:
        """Handle workers that appeared or left."""

    def on_value(self, key: str, value: bytes | None) -> None:
        """Handle a changed decision or report; None: it was removed. Also called for differences after a gap."""

    def on_reread(self) -> None:
        """Handle a complete new read of one prefix, after a gap."""


class StoreView:
    """The watches of one deployment's keys, and their latest values."""

    def __init__(self, store: Store, deployment: str) -> None:
        self._store = store
        self._deployment = deployment
        self.registry = Registry(deployment)
        self.values: dict[str, bytes] = {}  # by key: decisions and reports
        self._verdicts: dict[str, HealthRecord] = {}
        self._unread: set[str] = set()  # keys of verdicts that changed since they were last decoded
        self.whole = asyncio.Event()
        self._missing = {
            *FOUND,
            HEALTH,
            LEVELS + deployment,
            f"{EXPECTED}{deployment}/",
            f"{FAULTS}{deployment}/",
            f"{REPORTS}{deployment}/",
        }
        self._reader: StoreReader | None = None
        self._tasks = Tasks("control's book", self._failed)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def open(self) -> None:
        for prefix in self._missing:
            self._tasks.spawn(self._watch(prefix), f"watch {prefix}")

    async def close(self) -> None:
        self._reader = None
        await self._tasks.stop()
        self.failed.cancel()

    def read_by(self, reader: StoreReader) -> None:
        """Pass every change from now on to the reader."""
        self._reader = reader

    def verdicts(self) -> dict[str, HealthRecord]:
        """Return the verdicts by path. This is called every second, so each value is decoded only once."""
        for key in self._unread:
            self._verdicts.pop(key.removeprefix(HEALTH), None)
            if key in self.values:
                self._verdicts |= decoded({key: self.values[key]}, HEALTH, HealthRecord)
        self._unread.clear()
        return self._verdicts

    def _failed(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)  # a bug of ours; it ends the process

    async def _watch(self, prefix: str) -> None:
        on_event = self._on_instance_event if prefix in FOUND else self._on_value_event
        async with contextlib.aclosing(self._store.watch(prefix)) as events:  # a store client may have few watches
            async for event in events:
                if isinstance(event, Lost):
                    if prefix == HEALTH:  # every watch gets this event; log it once
                        log.warning("store lost: %s; nothing is decided that cannot be written down", event.reason)
                    continue
                on_event(prefix, event)
                if isinstance(event, Snapshot) and prefix in self._missing:
                    self._missing.discard(prefix)
                    if not self._missing:
                        self.whole.set()

    def _on_instance_event(self, prefix: str, event: WatchEvent) -> None:
        registry = self.registry
        changes: list[Change] = []
        if isinstance(event, Snapshot):
            changes = registry.snapshot(prefix, event.items)
        elif isinstance(event, Put):
            changes = registry.put(event.key, event.value)
        elif isinstance(event, Deleted):
            changes = registry.deleted(event.key)
        if changes and self._reader is not None:
            self._reader.on_instances(changes)

    def _on_value_event(self, prefix: str, event: WatchEvent) -> None:
        if isinstance(event, Snapshot):
            for key in [key for key in self.values if key.startswith(prefix) and key not in event.items]:
                self._set(key, None)
            for key, value in event.items.items():
                self._set(key, value)
            if self._reader is not None:
                self._reader.on_reread()
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
            self._reader.on_value(key, value)

    def _is_ours(self, key: str) -> bool:
        """Return True for this deployment's keys: a watch on the prefix `foo` gets `foobar`'s level too."""
        if key.startswith(HEALTH):
            return admits(self._deployment, key.removeprefix(HEALTH).partition("/")[0])
        return not key.startswith(LEVELS) or key == LEVELS + self._deployment


def decoded(values: Mapping[str, bytes], prefix: str, kind: Any) -> dict[str, Any]:
    """Return the values under a prefix, by the rest of the key. Unreadable ones (of a newer version) are logged and
    left out."""
    read: dict[str, Any] = {}
    for key, value in values.items():
        if key.startswith(prefix):
            try:
                read[key.removeprefix(prefix)] = msgspec.json.decode(value, type=kind)
            except (ValueError, RecursionError) as error:
                log.warning("cannot read %s: %s", key, error)
    return read
