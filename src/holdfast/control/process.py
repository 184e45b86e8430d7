"""The control process waits for the lock, leads while it holds it, and serves a status page.

Always true: only the control that holds the lock probes workers and writes verdicts, and it stops at once when the lock
is lost. It begins with a complete read of the store after it acquired the lock, so that no verdict is forgotten. It
starts and kills no process. Workers serve whether control runs or not.

Device faults. Each control, leading or not, writes the faults of its machine's GPUs to the store, one record per
device. Control does this, and not a worker, because a fault may kill or hang workers; if the driver's library crashes
control, serving continues. The leader reads the faults of all machines from the store (`leadership`), so the next
leader acts on a fault that came while no control led.

Always true:
- A device's gravest fault stays until the driver reports that it was repaired, or the machine restarts.
- Ignorable faults are counted but not written.
- While the store is unavailable the latest `PENDING_MAX` faults wait, with the time they were read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from holdfast.control.event_mirror import EventMirror
from holdfast.control.fleet_loop import FleetLoop, loads_of
from holdfast.control.leadership import Leadership
from holdfast.control.metrics import ControlMetrics
from holdfast.control.redis_stream import RedisStream
from holdfast.control.status_page import ControlView, page, refuted_of
from holdfast.control.store_view import StoreView, decoded
from holdfast.core.address import parse_address
from holdfast.core.ports import Clock, World
from holdfast.core.procfs import boot_id
from holdfast.core.tasks import Tasks, beside, first
from holdfast.discovery.keys import CONTROLS, EXPECTED, FAULTS, LEVELS
from holdfast.failover.lock import FailoverLock
from holdfast.fleet.planner import ModelLoad
from holdfast.health.device_faults import DeviceFault, Severity, Source
from holdfast.health.expectations import ExpectationsRecord
from holdfast.health.records import ControlRecord, DeviceRecord, device_after, device_name
from holdfast.routing.degradation import LEVEL_MAX, LevelRecord
from holdfast.spec.launch import ControlLaunch
from holdfast.store.contract import Registration, Store, StoreUnavailable
from holdfast.wire.http.server import HttpServer
from holdfast.wire.http.status_page import StatusPage

POLL_S = 0.1  # as often as beats are judged
CALL_S = 2.0  # a live store answers in milliseconds
RETRY_S = 1.0
# A failing GPU repeats the same fault, but a fault that waits already is not queued twice: this is enough for many GPUs
# at once.
PENDING_MAX = 256


class DeviceWatch:
    """Reads the faults of this machine's devices and writes them to the store. `by` is this control's name."""

    def __init__(
        self,
        sources: Sequence[Source],
        store: Store,
        deployment: str,
        by: str,
        clock: Clock,
        metrics: ControlMetrics,
    ) -> None:
        self._sources = sources
        self._store = store
        self._prefix = f"{FAULTS}{deployment}/"
        self._by = by
        self._clock = clock
        self._metrics = metrics
        self._boot_id = boot_id()
        self._pending = deque[tuple[DeviceFault, float]](maxlen=PENDING_MAX)
        self._told: dict[str, str] = {}  # the last logged state of each source

    @property
    def sources(self) -> dict[str, str]:
        """Return, by the source's name, what it reads or why it cannot."""
        return {source.name: source.state for source in self._sources}

    async def run(self) -> None:
        """Poll the sources and write their faults until cancelled."""
        for source in self._sources:
            source.start()
        try:
            while True:
                self._poll()
                pause_s = POLL_S
                try:
                    await self._write()
                except StoreUnavailable as error:
                    log.warning("cannot write down what a device told: %s; trying again", error)
                    pause_s = RETRY_S
                await asyncio.sleep(pause_s)
        finally:
            for source in self._sources:
                source.stop()

    def _poll(self) -> None:
        for source in self._sources:
            if source.state != self._told.get(source.name):
                self._told[source.name] = source.state
                log.info("GPUs' faults, %s: %s", source.name, source.state)
            for fault in source.poll():
                self._on_fault(source, fault)

    def _on_fault(self, source: Source, fault: DeviceFault) -> None:
        self._metrics.device_fault(source.name, fault)
        grave = fault.severity is not Severity.IGNORABLE
        level = logging.WARNING if grave else logging.INFO
        log.log(level, "GPU %s: %s: %s", fault.device, fault.severity, fault.reason)
        waits = any(fault == other for other, _ in self._pending)
        if (grave or fault.recovery) and not waits:
            self._pending.append((fault, self._clock.unix_s()))

    async def _write(self) -> None:
        """Write the waiting faults, the oldest first. Raises StoreUnavailable; the rest keeps waiting."""
        while self._pending:
            fault, unix_s = self._pending[0]
            key = self._prefix + device_name(self._boot_id, fault.device)
            record = device_after(_read(await self._store.get(key, CALL_S)), fault, unix_s, self._by)
            if record is not None:
                await self._store.put(key, msgspec.json.encode(record), CALL_S)
            self._pending.popleft()


def _read(value: bytes | None) -> DeviceRecord | None:
    """Return the decoded record; None if there is none, or it is unreadable (of a newer version) and overwritten."""
    try:
        return msgspec.json.decode(value, type=DeviceRecord) if value is not None else None
    except ValueError:
        return None


log = logging.getLogger("holdfast.control")

# The pause after a leadership ended by a bug of ours; another control may acquire the lock meanwhile.
PAUSE_S = 1.0


class Control:
    """One control of a deployment; several wait for the same lock. `sources` report faults of this machine's GPUs."""

    def __init__(
        self, settings: ControlLaunch, store: Store, lock: FailoverLock, world: World, sources: Sequence[Source] = ()
    ) -> None:
        self._settings = settings
        self._store = store
        self._lock = lock
        self._world = world
        self._leadership: Leadership | None = None
        self._store_view = StoreView(store, settings.deployment)  # while another leads
        self._record = ControlRecord(name=settings.name, leads=False, pid=os.getpid())
        self._registration: Registration | None = None
        self._metrics = ControlMetrics()
        self._devices = DeviceWatch(sources, store, settings.deployment, settings.name, world.clock, self._metrics)
        self._page = StatusPage(lambda: page(self.view()), lambda: self._metrics.page(self.view()))

    @property
    def leads(self) -> bool:
        """Return True if it holds the lock and has read the records."""
        return self._leadership is not None and self._leadership.begun

    async def run(self, stop: asyncio.Event, on_ready: Callable[[dict[str, Any]], None]) -> None:
        """Run until `stop` is set, then end at once."""
        settings = self._settings
        server = HttpServer(self._page.handle, self._world.network)
        status = ""
        if settings.status_address:
            wished = parse_address(settings.status_address)
            status = str(await server.start(wished, or_any=settings.status_any))
        self._record = msgspec.structs.replace(self._record, status=status)
        # A unique key: a control on another machine may have the same name and would overwrite this one's record.
        key = f"{CONTROLS}{settings.deployment}/{settings.name}-{self._world.rng.getrandbits(32):08x}"
        self._registration = self._store.register(key, msgspec.json.encode(self._record))
        tasks = Tasks("control")
        leading = tasks.spawn(self._lead(), "leading")
        tasks.spawn(self._devices.run(), "devices")
        try:
            on_ready({"address": status, "status": status})
            await first((stop.wait(),), (leading,))
            if leading.done():
                leading.result()  # raises a bug of ours or an unusable lock, which ends the process
        finally:
            await tasks.stop()
            await self._lock.release()
            server.close()

    async def _lead(self) -> None:
        """Follow until the lock is acquired, lead until it is lost, and repeat."""
        while True:
            self._store_view = StoreView(self._store, self._settings.deployment)
            self._store_view.open()
            try:
                lost = await self._lock.acquire()
            finally:
                await self._store_view.close()
            log.info("has the lock, and leads")
            try:
                await self._lead_until(lost)
            except Exception:
                log.exception("cannot lead; giving the lock back")
                await asyncio.sleep(PAUSE_S)
            finally:
                self._leadership = None
                self._show_whether_leading()
                await self._lock.release()
            log.warning("does not lead any more")

    async def _lead_until(self, lost: asyncio.Event) -> None:
        """Lead until the lock is lost, starting again from the records whenever another control wrote a verdict. The
        fleet runs beside it."""
        settings, store, world = self._settings, self._store, self._world
        by = f"{settings.name}/{os.getpid()}/{world.rng.getrandbits(32):08x}"
        fleet = FleetLoop(store, settings.deployment, world, lost, self._metrics.fleet, by=by, loads=self._loads)
        async with beside(fleet.run(), "fleet"), self._events():
            while not lost.is_set():
                show = self._show_whether_leading
                self._leadership = Leadership(settings, store, world, lost, self._metrics, on_begin=show)
                await self._leadership.run()

    def _events(self) -> contextlib.AbstractAsyncContextManager[object]:
        """Return the context in which events are mirrored: only while leading, so that each is sent once."""
        by, deployment, world = self._settings.events, self._settings.deployment, self._world
        if not by.redis:
            return contextlib.nullcontext()
        stream = RedisStream(by.redis, deployment, by.redis_entries_max)
        unix_s, metrics = world.clock.unix_s, self._metrics.events
        mirror = EventMirror(self._store, deployment, stream, metrics, unix_s=unix_s, rng=world.rng)
        return beside(mirror.run(), "events")

    def _loads(self) -> dict[str, ModelLoad]:
        return loads_of(self._leadership.probes.values()) if self._leadership is not None else {}

    def _show_whether_leading(self) -> None:
        self._record = msgspec.structs.replace(self._record, leads=self.leads)
        if self._registration is not None:
            self._registration.update(msgspec.json.encode(self._record))

    def view(self) -> ControlView:
        """Return what this control knows now, as the leader or as a reader of the leader's records."""
        leadership = self._leadership
        store_view = leadership.store_view if leadership is not None else self._store_view
        level = decoded(store_view.values, LEVELS + self._settings.deployment, LevelRecord).get("")
        return ControlView(
            name=self._settings.name,
            leads=self.leads,
            records=store_view.verdicts(),
            members=leadership.members() if leadership is not None else {},
            level=level if level is not None and 0 <= level.level <= LEVEL_MAX else None,
            capacity=leadership.levels.capacity if leadership is not None else None,
            store=self._store.state,
            reason=leadership.reason if leadership is not None else "another leads",
            fault_sources=self._devices.sources,
            refuted=refuted_of(
                decoded(store_view.values, f"{EXPECTED}{self._settings.deployment}/", ExpectationsRecord).values()
            ),
            unix_s=self._world.clock.unix_s(),
        )
