"""The models that are wanted of a deployment, followed in the store: known, listed and waited for without a worker; and
why one of them has none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.discovery.models import WantedModels, models_of
from holdfast.fleet.records import Book
from holdfast.store.contract import Deleted, Put, Snapshot, Store, WatchEvent
from holdfast.streams.directory import Missing, ModelDirectory

log = logging.getLogger("holdfast.frontend")


class Wanted:
    """Follows the records of one deployment. `changed` is told when others are wanted than before."""

    def __init__(self, deployment: str, directory: ModelDirectory, changed: Callable[[], None]) -> None:
        self._deployment = deployment
        self._directory = directory
        self._changed = changed
        self._models = WantedModels()
        self._book = Book()

    async def follow(self, store: Store) -> None:
        """Runs for ever."""
        async for event in store.watch(models_of(self._deployment)):
            self.hear(event)

    def hear(self, event: WatchEvent) -> None:
        """What the store says; a store that is lost changes nothing."""
        wrong: list[str] = []
        if isinstance(event, Snapshot):
            wrong = self._models.snapshot(event.items)
            self._directory.unread.discard(models_of(self._deployment))
        elif isinstance(event, Put):
            wrong = self._models.put(event.key, event.value)
        elif isinstance(event, Deleted):
            self._models.deleted(event.key)
        for words in wrong:
            log.warning("a wanted model in the store cannot be read: %s", words)
        news = self._models.names != self._directory.wanted(self._deployment)
        if news:
            self._directory.want(self._deployment, self._models.names)
        if self._miss() or news:
            self._changed()

    def lacks(self, book: Book) -> None:
        """What the fleet's controller says of those that miss somebody."""
        self._book = book
        if self._miss():
            self._changed()

    def _miss(self) -> bool:
        names = {key: self._models.name_of(models_of(self._deployment) + key) for key in self._book.unmet}
        hopeless, stands = frozenset(self._book.hopeless), frozenset(self._book.stands)
        said = {
            name: Missing(self._book.unmet[key], key in hopeless, key in stands) for key, name in names.items() if name
        }
        return self._directory.miss(self._deployment, said)
