"""The models that are wanted of a deployment, followed in the store: known, listed and waited for without a worker."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.discovery.models import WantedModels, models_of
from holdfast.store.contract import Deleted, Put, Snapshot, Store, WatchEvent
from holdfast.streams.directory import ModelDirectory

log = logging.getLogger("holdfast.frontend")


class Wanted:
    """Follows the records of one deployment. `changed` is told when others are wanted than before."""

    def __init__(self, deployment: str, directory: ModelDirectory, changed: Callable[[], None]) -> None:
        self._deployment = deployment
        self._directory = directory
        self._changed = changed
        self._models = WantedModels()

    async def follow(self, store: Store) -> None:
        """Runs for ever."""
        async for event in store.watch(models_of(self._deployment)):
            self.hear(event)

    def hear(self, event: WatchEvent) -> None:
        """What the store says; a store that is lost changes nothing."""
        wrong: list[str] = []
        if isinstance(event, Snapshot):
            wrong = self._models.snapshot(event.items)
        elif isinstance(event, Put):
            wrong = self._models.put(event.key, event.value)
        elif isinstance(event, Deleted):
            self._models.deleted(event.key)
        for words in wrong:
            log.warning("a wanted model in the store cannot be read: %s", words)
        if self._models.names != self._directory.wanted(self._deployment):
            self._directory.want(self._deployment, self._models.names)
            self._changed()
