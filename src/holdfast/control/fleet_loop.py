"""The fleet loop of the leading control: from what changes in the store to the orders that are written for agents.

A shell around `fleet.planner.FleetController`. Always true: nothing is decided before everything was read after the
lock was acquired; every write is a swap from what was read, and where another control has written this one stops and
begins again from what is stored; while the store is away nothing is decided and nothing is lost; once the lock is lost
nothing more is written. Without desired models and nodes nothing is written at all. A bug here costs the fleet's loop a
pause, and no verdict waits for it.
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
from holdfast.fleet.planner import FleetWrites, ModelLoad
from holdfast.fleet.records import Orders
from holdfast.store.contract import Store, StoreUnavailable
from holdfast.store.mirror import Mirror

log = logging.getLogger("holdfast.control")

SWAP_S = 2.0  # of one call: a store that lives answers in milliseconds
RETRY_S_MIN, RETRY_S_MAX = 0.1, 1.0  # when the store is back, writes wait a second at most
# After another control's write, or a bug of ours. With jitter, so that two leaders at once do not collide for ever.
REST_S = 0.5
UNREAD_REST_S = 10.0  # after a record that cannot be read: an operator must repair it
# Between two looks at the load: as often as workers report it.
LOOK_S = 1.0
AT_ONCE = 16  # orders that are written concurrently: a store lets one client wait for its disk with some more
QUIET_S = 60.0  # if nothing is due: an event that was missed is noticed after this
NEXT_S_MIN = 0.05  # a deadline that has passed is met by the next pass


class FleetLoop:
    """The loop of one deployment. `loads`: what workers' beats report, by the name that clients use for a model.
    `lost`: set when this control no longer leads."""

    def __init__(
        self,
        store: Store,
        deployment: str,
        world: World,
        lost: asyncio.Event,
        metrics: FleetMetrics,
        *,
        by: str,
        loads: Callable[[], Mapping[str, ModelLoad]],
    ) -> None:
        self._store = store
        self._deployment = deployment
        self._world = world
        self._lost = lost
        self._metrics = metrics
        self._by = by
        self._loads = loads
        self._begun = 0  # how often it has begun
        self._outages = 0
        # Wall time that never goes back nor jumps: from now on it follows the monotonic clock.
        self._ahead_s = world.clock.unix_s() - world.clock.monotonic_s()
        self._feed = FleetFeed(deployment, by)
        self._mirror = Mirror(store, self._feed.prefixes)

    def __repr__(self) -> str:
        return f"<FleetLoop {self._feed.controller!r}>"

    @property
    def now_s(self) -> float:
        return self._world.clock.monotonic_s() + self._ahead_s

    async def run(self) -> None:
        """Run until cancelled or the lock is lost; after each failure begin again from what is stored."""
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
        """Run one controller until something ends it."""
        self._begun += 1
        # A new name each time: earlier orders are another controller's.
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
        """Feed what changed, decide, and write; return whether there was anything to write."""
        mirror, feed, controller = self._mirror, self._feed, self._feed.controller
        if mirror.outages != self._outages:
            self._outages = mirror.outages
            controller.on_store_back(self.now_s)
        feed.feed(mirror.values, self.now_s)
        if controller.is_idle:
            return False
        controller.set_loads(self._loads())
        began_s = self._world.clock.monotonic_s()
        writes = controller.step(self.now_s)
        self._metrics.passed(self._world.clock.monotonic_s() - began_s)
        if writes:
            await self._write(writes)
            controller.written(self.now_s)
        self._log_events()
        return bool(writes)

    async def _rest(self) -> None:
        """Wait until something changes or is due."""
        controller = self._feed.controller
        due_s, rest_s = controller.next_deadline_s(), LOOK_S if controller.is_autoscaled else QUIET_S
        if due_s is not None:
            rest_s = min(rest_s, max(NEXT_S_MIN, due_s - self.now_s))
        if self._mirror.away:
            rest_s = LOOK_S
        await done_within(self._mirror.news.wait(), rest_s)

    # -- writes

    async def _write(self, writes: FleetWrites) -> None:
        """Return when everything is stored. Overtaken, if another control has written there."""
        if writes.record is not None:
            await self._write_all({self._feed.record_key: msgspec.json.encode(writes.record)})
        orders = [(self._feed.orders + name, _encoded(one)) for name, one in writes.orders.items()]
        for begin in range(0, len(orders), AT_ONCE):
            await self._write_all(dict(orders[begin : begin + AT_ONCE]))
        for name, desired in writes.desired.items():
            await self._write_desired(self._feed.desired + name, msgspec.json.encode(desired))

    async def _write_all(self, values: Mapping[str, bytes | None]) -> None:
        """Swap all values; None: the key is to be removed."""
        held = self._feed.held
        async with asyncio.TaskGroup() as tasks:
            asked = {key: tasks.create_task(self._swap(key, value, held.get(key))) for key, value in values.items()}
        for key, task in asked.items():
            if not task.result():
                raise Overtaken(f"{key} was written by another")
            self._feed.hold(key, values[key])

    async def _write_desired(self, key: str, value: bytes) -> None:
        """Write a desired model, unless an operator changed it meanwhile."""
        values = self._mirror.values
        expected = self._feed.last_fed(key)
        if expected is not None and await self._swap(key, value, expected) and values.get(key) == expected:
            values[key] = value  # as the store will report

    async def _swap(self, key: str, value: bytes | None, expected: bytes | None) -> bool:
        """Return whether the key has the new value. Wait for a store that is away: an earlier call may have
        succeeded."""
        failures = 0
        while not self._lost.is_set():
            try:
                return await self._store.swap(key, value, expected, SWAP_S)
            except StoreUnavailable as error:
                log.debug("fleet: %s is not written yet: %s", key, error)
                failures += 1
                await asyncio.sleep(backoff_s(failures, RETRY_S_MIN, RETRY_S_MAX))
        return False

    def _log_events(self) -> None:
        for one in self._feed.controller.take_events():
            self._metrics.on_event(one)
            log.log(logging.WARNING if one.what in FAILURES else logging.INFO, "fleet: %s", one.text)


def _encoded(orders: Orders | None) -> bytes | None:
    return None if orders is None else msgspec.json.encode(orders)


def loads_of(probes: Iterable[WorkerProbe]) -> dict[str, ModelLoad]:
    """Return the load of all serving workers, by the names of their models."""
    sums = dict[str, list[int]]()
    for probe in probes:
        beat = probe.beats.last
        if beat is not None and probe.facts is not None and probe.facts.active:
            own = sums.setdefault(probe.instance.card.name, [0, 0, 0])
            for place, more in enumerate((beat.running + beat.waiting, beat.blocks - beat.blocks_free, beat.blocks)):
                own[place] += more
    return {
        name: ModelLoad(running, used / blocks if blocks else 0.0) for name, (running, used, blocks) in sums.items()
    }
