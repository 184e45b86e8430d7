"""Follows a deployment's wanted models in the store: they are known by name even while they have no worker.

A frontend reads only the name from a model's record. Always true: an unreadable record leaves the key's previous value
in force; a lost store changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated

import msgspec

from holdfast.discovery.keys import MODELS
from holdfast.fleet.records import FleetRecord
from holdfast.store.contract import Snapshot, Store, WatchEvent, changes
from holdfast.streams.directory import MissingWorkers, ModelDirectory

NAME_CHARS_MAX = 512  # of a name that clients ask for
WANTED_MAX = 10_000  # of one deployment: ten times what a large fleet has; further models are ignored

log = logging.getLogger("holdfast.frontend")


class WantedModel(msgspec.Struct, frozen=True):
    """The part of a model's record that a frontend reads."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]  # that clients ask for


_decode = msgspec.json.Decoder(WantedModel).decode


def models_of(deployment: str) -> str:
    """Return the prefix of a deployment's wanted models in the store."""
    return f"{MODELS}{deployment}/"


class WantedModels:
    """Tells the directory which models of one deployment are wanted, and why one has no worker. `changed` is called
    when either changes."""

    def __init__(self, deployment: str, directory: ModelDirectory, changed: Callable[[], None]) -> None:
        self._deployment = deployment
        self._prefix = models_of(deployment)
        self._directory = directory
        self._changed = changed
        self._names: dict[str, str] = {}  # by key
        self._record = FleetRecord()

    async def follow(self, store: Store) -> None:
        """Follow the models in the store, until cancelled."""
        async for event in store.watch(self._prefix):
            self.on_store_event(event)

    def on_store_event(self, event: WatchEvent) -> None:
        if isinstance(event, Snapshot):
            self._directory.unread.discard(self._prefix)
        put, removed = changes(event, self._names)
        for key in removed:
            self._names.pop(key, None)
        for key, value in put.items():
            self._put(key, value)
        names = frozenset(self._names.values())
        news = names != self._directory.wanted(self._deployment)
        if news:
            self._directory.set_wanted(self._deployment, names)
        if self._set_missing() or news:
            self._changed()

    def _put(self, key: str, value: bytes) -> None:
        try:
            if key not in self._names and len(self._names) >= WANTED_MAX:
                raise ValueError(f"more than {WANTED_MAX} models are wanted")
            self._names[key] = _decode(value).name
        except (ValueError, RecursionError) as error:
            log.warning("a wanted model in the store cannot be read: %s: %s", key, error)

    def on_fleet_record(self, record: FleetRecord) -> None:
        """Apply the fleet's record of models without enough replicas."""
        self._record = record
        if self._set_missing():
            self._changed()

    def _set_missing(self) -> bool:
        hopeless, stands = frozenset(self._record.hopeless), frozenset(self._record.stands)
        missing = {
            self._names[self._prefix + key]: MissingWorkers(why, unplaceable=key in hopeless, none_serves=key in stands)
            for key, why in self._record.unmet.items()
            if self._prefix + key in self._names
        }
        return self._directory.set_missing(self._deployment, missing)
