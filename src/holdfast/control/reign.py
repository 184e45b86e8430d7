"""One reign: from what is written down, over what happens, to what is decided, until the lock is lost.

Always true: nothing is decided before the whole book was read after the lock was got.
"""

from __future__ import annotations

import asyncio

from holdfast.control.book import Book
from holdfast.control.ward import Limits
from holdfast.control.wards import Wards
from holdfast.core.ports import World
from holdfast.core.tasks import first
from holdfast.health import breaker, canary
from holdfast.spec.health import HealthSettings
from holdfast.spec.launch import ControlLaunch
from holdfast.store.contract import Store


def limits_of(settings: HealthSettings) -> Limits:
    asked = canary.Limits(interval_s=settings.canary_interval_s, share=settings.canary_share)
    failed = breaker.Limits(settings.breaker_failures, settings.breaker_open_s, settings.breaker_canaries)
    return Limits(asked, failed)


class Reign:
    """What one control does while it has the lock. `lost` is set when it has it no longer."""

    def __init__(self, settings: ControlLaunch, store: Store, world: World, lost: asyncio.Event) -> None:
        self._lost = lost
        self.book = Book(store, settings.deployment)
        self.wards = Wards(settings.name, world.rng.random, limits_of(settings.health))

    async def run(self) -> None:
        """Until the lock is lost."""
        self.book.open()
        try:
            await first((self._lost.wait(), self.book.whole.wait()), (self.book.failed,))
            await first((self._lost.wait(),), (self.book.failed,))
        finally:
            await self.book.close()
