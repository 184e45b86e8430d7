"""The control process: wait for the lock, lead while it is held, and show what is decided.

Always true: only who holds the lock asks workers and writes verdicts; who loses it stops at once. (What GPUs of its own
machine say, each control writes down.) It begins with what the store says after it got the lock, whole, so that nobody
is revived by forgetting; it starts nothing and kills nothing. Whether it runs or not, workers serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from holdfast.control.book import Book, decoded
from holdfast.control.device_watch import DeviceWatch
from holdfast.control.event_mirror import EventMirror
from holdfast.control.fleet_loop import FleetLoop, loads_of
from holdfast.control.metrics import ControlMetrics
from holdfast.control.redis_stream import RedisStream
from holdfast.control.reign import Reign
from holdfast.control.showing import View, page, refuted_of
from holdfast.core.address import parse_address
from holdfast.core.ports import World
from holdfast.core.tasks import Tasks, beside, first
from holdfast.discovery.keys import CONTROLS, EXPECTED, LEVELS
from holdfast.failover.lock import FailoverLock
from holdfast.fleet.traffic import Load
from holdfast.health.device_faults import Source
from holdfast.health.expectations import Record
from holdfast.health.records import ControlRecord
from holdfast.routing.degradation import LEVEL_MAX, LevelRecord
from holdfast.spec.launch import ControlLaunch
from holdfast.store.contract import Registration, Store
from holdfast.wire.http.server import HttpServer
from holdfast.wire.http.status_page import StatusPage

log = logging.getLogger("holdfast.control")

# A reign that ended by a bug of ours begins again after this, if no other control has taken the lock by then.
REST_S = 1.0


class Control:
    """One control of a deployment; several wait for the same lock. `sources` tell of this machine's GPUs."""

    def __init__(
        self, settings: ControlLaunch, store: Store, lock: FailoverLock, world: World, sources: Sequence[Source] = ()
    ) -> None:
        self._settings = settings
        self._store = store
        self._lock = lock
        self._world = world
        self._reign: Reign | None = None
        self._book = Book(store, settings.deployment)  # while another leads
        self._record = ControlRecord(name=settings.name, leads=False, pid=os.getpid())
        self._registration: Registration | None = None
        self._metrics = ControlMetrics()
        self._devices = DeviceWatch(sources, store, settings.deployment, settings.name, world.clock, self._metrics)
        self._page = StatusPage(lambda: page(self.view()), lambda: self._metrics.page(self.view()))

    @property
    def leads(self) -> bool:
        """It has the lock, and has read what is written down."""
        return self._reign is not None and self._reign.begun

    def __repr__(self) -> str:
        return f"<Control {self._settings.name} {'leads' if self.leads else 'follows'}, {self._store!r}>"

    async def run(self, stop: asyncio.Event, on_ready: Callable[[dict[str, Any]], None]) -> None:
        """Until `stop` is set; then it leaves at once."""
        settings = self._settings
        server = HttpServer(self._page.handle, self._world.network)
        status = ""
        if settings.status_address:
            wished = parse_address(settings.status_address)
            status = str(await server.start(wished, or_any=settings.status_any))
        self._record = msgspec.structs.replace(self._record, status=status)
        # A key of its own: on another machine one may have the same name, and would say for both that it follows.
        key = f"{CONTROLS}{settings.deployment}/{settings.name}-{self._world.rng.getrandbits(32):08x}"
        self._registration = self._store.register(key, msgspec.json.encode(self._record))
        tasks = Tasks("control")
        leading = tasks.spawn(self._lead(), "leading")
        tasks.spawn(self._devices.run(), "devices")
        try:
            on_ready({"address": status, "status": status})
            await first((stop.wait(),), (leading,))
            if leading.done():
                leading.result()  # our own bug, or a lock that cannot be had: it ends the process
        finally:
            await tasks.stop()
            await self._lock.release()
            server.close()

    async def _lead(self) -> None:
        """Follow until the lock is ours, lead until it is lost; for ever."""
        while True:
            self._book = Book(self._store, self._settings.deployment)
            self._book.open()
            try:
                lost = await self._lock.acquire()
            finally:
                await self._book.close()
            log.info("has the lock, and leads")
            try:
                await self._lead_until(lost)
            except Exception:
                log.exception("cannot lead; giving the lock back")
                await asyncio.sleep(REST_S)
            finally:
                self._reign = None
                self._show_whether_leading()
                await self._lock.release()
            log.warning("does not lead any more")

    async def _lead_until(self, lost: asyncio.Event) -> None:
        """Reign after reign, each from what is written down; one ends when somebody else wrote into it. Beside them
        the fleet."""
        settings, store, world = self._settings, self._store, self._world
        by = f"{settings.name}/{os.getpid()}/{world.rng.getrandbits(32):08x}"
        fleet = FleetLoop(store, settings.deployment, world, lost, self._metrics.fleet, by=by, loads=self._loads)
        async with beside(fleet.run(), "fleet"), self._events():
            while not lost.is_set():
                show = self._show_whether_leading
                self._reign = Reign(settings, store, world, lost, self._metrics, on_begin=show)
                await self._reign.run()

    def _events(self) -> contextlib.AbstractAsyncContextManager[object]:
        """As long as it leads, so that each is told once."""
        by, deployment, world = self._settings.events, self._settings.deployment, self._world
        if not by.redis:
            return contextlib.nullcontext()
        stream = RedisStream(by.redis, deployment, by.redis_entries_max)
        unix_s, metrics = world.clock.unix_s, self._metrics.events
        mirror = EventMirror(self._store, deployment, stream, metrics, unix_s=unix_s, rng=world.rng)
        return beside(mirror.run(), "events")

    def _loads(self) -> dict[str, Load]:
        return loads_of(self._reign.contacts.values()) if self._reign is not None else {}

    def _show_whether_leading(self) -> None:
        self._record = msgspec.structs.replace(self._record, leads=self.leads)
        if self._registration is not None:
            self._registration.update(msgspec.json.encode(self._record))

    def view(self) -> View:
        """What is known in this moment: by whoever leads, or by who reads what the leader writes."""
        reign = self._reign
        book = reign.book if reign is not None else self._book
        level = decoded(book.values, LEVELS + self._settings.deployment, LevelRecord).get("")
        return View(
            name=self._settings.name,
            leads=self.leads,
            records=book.verdicts(),
            members=reign.members() if reign is not None else {},
            level=level if level is not None and 0 <= level.level <= LEVEL_MAX else None,
            capacity=reign.levels.capacity if reign is not None else None,
            store=self._store.state,
            reason=reign.reason if reign is not None else "another leads",
            fault_sources=self._devices.sources,
            refuted=refuted_of(decoded(book.values, f"{EXPECTED}{self._settings.deployment}/", Record).values()),
            unix_s=self._world.clock.unix_s(),
        )
