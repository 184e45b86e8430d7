"""The fleet's loop of the control that leads: from what changes in the store to what is written for agents to do.

A shell around `fleet.controller`. Always true: nothing is decided before all of it was read after the lock was got;
everything is swapped in from what was read, and where another's words stand this one asks for nothing more and begins
anew from what is written; while the store is away nothing is decided and nothing is lost; once the lock is lost nothing
more is written. Without wishes and nodes nothing is written at all. A bug here costs the fleet's loop a rest, and no
verdict waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

import msgspec

from holdfast.control.fleet_feed import FleetFeed, Overtaken
from holdfast.control.fleet_metrics import FAILURES, FleetMetrics
from holdfast.control.worker_probe import WorkerProbe
from holdfast.core.backoff import backoff_s
from holdfast.core.errors import UserError
from holdfast.core.ports import World
from holdfast.core.tasks import beside, done_within, first
from holdfast.fleet.controller import Writes
from holdfast.fleet.records import Orders
from holdfast.fleet.traffic import Load
from holdfast.store.contract import Store, StoreUnavailable
from holdfast.store.mirror import Mirror

log = logging.getLogger("holdfast.control")

SWAP_S = 2.0  # of one call: a store that lives answers in milliseconds
RETRY_S_MIN, RETRY_S_MAX = 0.1, 1.0  # when it is back what is decided waits a second at most
# After another's words, or a bug of ours. With chance, so that two who lead at once do not meet for ever.
REST_S = 0.5
UNREAD_REST_S = 10.0  # after a book that cannot be read: somebody must mend it
# So often it is looked at what those carry that serve: as often as they say so.
LOOK_S = 1.0
AT_ONCE = 16  # orders that are written side by side: a store lets one client wait for its disk with some more
QUIET_S = 60.0  # nothing is due before something changes: whatever was forgotten is found after this
NEXT_S_MIN = 0.05  # a deadline that came already is met by the next pass


class FleetLoop:
    """Of one deployment. `loads`: what workers' beats say, by the name that clients know a model by. `lost`: it does
    not lead any more."""

    def __init__(
        self,
        store: Store,
        deployment: str,
        world: World,
        lost: asyncio.Event,
        metrics: FleetMetrics,
        *,
        by: str,
        loads: Callable[[], Mapping[str, Load]],
    ) -> None:
        self._store = store
        self._deployment = deployment
        self._world = world
        self._lost = lost
        self._metrics = metrics
        self._by = by
        self._loads = loads
        self._begun = 0  # how often
        self._outages = 0
        # Wall time that never goes back nor leaps: from this moment on it is the machine's own clock.
        self._ahead_s = world.clock.unix_s() - world.clock.monotonic_s()
        self._feed = FleetFeed(deployment, by)
        self._mirror = Mirror(store, self._feed.prefixes)

    def __repr__(self) -> str:
        return f"<FleetLoop {self._feed.controller!r}>"

    @property
    def now_s(self) -> float:
        return self._world.clock.monotonic_s() + self._ahead_s

    async def run(self) -> None:
        """Until cancelled, or the lock is lost: again and again from what is written."""
        while not self._lost.is_set():
            rest_s = REST_S
            try:
                await self._keep()
            except Overtaken as overtaken:
                log.warning("fleet: %s meanwhile; beginning anew from what is written", overtaken)
            except UserError as error:
                log.error("fleet: %s; everything stays as it is", error)
                rest_s = UNREAD_REST_S
            except Exception:
                log.exception("bug in the fleet's loop; beginning anew from what is written")
            await asyncio.sleep(rest_s * self._world.rng.uniform(0.5, 1.5))

    async def _keep(self) -> None:
        """From one beginning to whatever ends it."""
        self._begun += 1
        # A name of its own each time: what was asked for before is another's.
        self._feed = FleetFeed(self._deployment, f"{self._by}/{self._begun}")
        self._mirror = mirror = Mirror(self._store, self._feed.prefixes)
        async with beside(mirror.run(), "fleet's mirror") as watching, beside(self._decide(), "fleet") as deciding:
            await first((self._lost.wait(),), (watching, deciding))
            for task in (deciding, watching):
                if task.done():
                    task.result()

    async def _decide(self) -> None:
        mirror, feed = self._mirror, self._feed
        await mirror.whole.wait()
        feed.begin(mirror.values, self.now_s)
        self._metrics.controller = feed.controller
        if not feed.controller.is_idle:
            log.info("fleet: goes on from what is written: %r", feed.controller)
        self._outages = mirror.outages
        while True:
            mirror.news.clear()
            while not mirror.away and await self._pass():
                pass
            await self._rest()

    async def _pass(self) -> bool:
        """Take in what changed, decide, and write it down; whether there was anything to write."""
        mirror, feed, controller = self._mirror, self._feed, self._feed.controller
        if mirror.outages != self._outages:
            self._outages = mirror.outages
            controller.away(self.now_s)
        feed.feed(mirror.values, self.now_s)
        if controller.is_idle:
            return False
        controller.carry(self._loads())
        began_s = self._world.clock.monotonic_s()
        writes = controller.step(self.now_s)
        self._metrics.passed(self._world.clock.monotonic_s() - began_s)
        if writes:
            await self._write(writes)
            controller.written(self.now_s)
        self._say()
        return bool(writes)

    async def _rest(self) -> None:
        """Until something changes or is due."""
        controller = self._feed.controller
        due_s, rest_s = controller.next_deadline_s(), LOOK_S if controller.is_elastic else QUIET_S
        if due_s is not None:
            rest_s = min(rest_s, max(NEXT_S_MIN, due_s - self.now_s))
        if self._mirror.away:
            rest_s = LOOK_S
        await done_within(self._mirror.news.wait(), rest_s)

    # -- what is written

    async def _write(self, writes: Writes) -> None:
        """Returns when it stands. Overtaken, if another's words stand there."""
        if writes.book is not None:
            await self._write_all({self._feed.book: msgspec.json.encode(writes.book)})
        orders = [(self._feed.orders + name, _encoded(one)) for name, one in writes.orders.items()]
        for begin in range(0, len(orders), AT_ONCE):
            await self._write_all(dict(orders[begin : begin + AT_ONCE]))
        for name, wish in writes.wishes.items():
            await self._write_wish(self._feed.wishes + name, msgspec.json.encode(wish))

    async def _write_all(self, values: Mapping[str, bytes | None]) -> None:
        """None: it is to be removed."""
        held = self._feed.held
        async with asyncio.TaskGroup() as tasks:
            asked = {key: tasks.create_task(self._swap(key, value, held.get(key))) for key, value in values.items()}
        for key, task in asked.items():
            if not task.result():
                raise Overtaken(f"{key} was written by another")
            self._feed.hold(key, values[key])

    async def _write_wish(self, key: str, value: bytes) -> None:
        """One that a person changed meanwhile is left as it is."""
        values = self._mirror.values
        expected = self._feed.told(key)
        if expected is not None and await self._swap(key, value, expected) and values.get(key) == expected:
            values[key] = value  # as the store will tell

    async def _swap(self, key: str, value: bytes | None, expected: bytes | None) -> bool:
        """Whether it has the new value. A store that is away is waited for: what was asked may stand already."""
        failures = 0
        while not self._lost.is_set():
            try:
                return await self._store.swap(key, value, expected, SWAP_S)
            except StoreUnavailable as error:
                log.debug("fleet: %s is not written yet: %s", key, error)
                failures += 1
                await asyncio.sleep(backoff_s(failures, RETRY_S_MIN, RETRY_S_MAX))
        return False

    def _say(self) -> None:
        for one in self._feed.controller.take_told():
            self._metrics.told(one)
            log.log(logging.WARNING if one.what in FAILURES else logging.INFO, "fleet: %s", one.text)


def _encoded(orders: Orders | None) -> bytes | None:
    return None if orders is None else msgspec.json.encode(orders)


def loads_of(contacts: Iterable[WorkerProbe]) -> dict[str, Load]:
    """What those carry that serve, by the names of their models."""
    sums = dict[str, list[int]]()
    for contact in contacts:
        beat = contact.beats.last
        if beat is not None and contact.facts is not None and contact.facts.active:
            own = sums.setdefault(contact.instance.card.name, [0, 0, 0])
            for place, more in enumerate((beat.running + beat.waiting, beat.blocks - beat.blocks_free, beat.blocks)):
                own[place] += more
    return {name: Load(running, used / blocks if blocks else 0.0) for name, (running, used, blocks) in sums.items()}
