"""One reign: from what is written down, over what happens, to what is decided, until the lock is lost.

Always true: nothing is decided before the whole book was read after the lock was got.
"""

from __future__ import annotations

import asyncio

from holdfast.control.book import Book
from holdfast.core.ports import World
from holdfast.core.tasks import first
from holdfast.spec.launch import ControlLaunch
from holdfast.store.contract import Store


class Reign:
    """What one control does while it has the lock. `lost` is set when it has it no longer."""

    def __init__(self, settings: ControlLaunch, store: Store, world: World, lost: asyncio.Event) -> None:
        self._lost = lost
        self.book = Book(store, settings.deployment)

    async def run(self) -> None:
        """Until the lock is lost."""
        self.book.open()
        try:
            await first((self._lost.wait(), self.book.whole.wait()), (self.book.failed,))
            await first((self._lost.wait(),), (self.book.failed,))
        finally:
            await self.book.close()
