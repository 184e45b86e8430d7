"""Faults of this machine's GPUs, from whatever tells of them, into the store: one record for each device that has one.

Control reads them, because it outlives the workers that a fault kills or hangs, and serving outlives control should a
driver's library take it down. Each control reads its own machine, whether it leads or not; the one that leads hears of
all machines from the store (`reign`), so a fault that came while nobody led is acted on by whoever leads next.

Always true: of a device the gravest fault stands until the driver says that it was mended, or its machine is restarted;
what is ignorable is counted, and written nowhere; while the store is away the latest `PENDING_MAX` wait, with the time
they were read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

import msgspec

from holdfast.control.metrics import ControlMetrics
from holdfast.core.ports import Clock
from holdfast.core.procfs import boot_id
from holdfast.discovery.keys import FAULTS
from holdfast.health.device_faults import Fault, Severity, Source
from holdfast.health.records import DeviceRecord, device_after, device_name
from holdfast.store.contract import Store, StoreUnavailable

log = logging.getLogger("holdfast.control")

POLL_S = 0.1  # as often as beats are judged
CALL_S = 2.0  # a store that lives answers in milliseconds
RETRY_S = 1.0
# A GPU that fails tells the same again and again; what waits already is not taken twice, so this is many GPUs at once.
PENDING_MAX = 256


class DeviceWatch:
    """What is read on this machine. `by`: who writes."""

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
        self._pending = deque[tuple[Fault, float]](maxlen=PENDING_MAX)
        self._told: dict[str, str] = {}  # what was logged of each source

    def __repr__(self) -> str:
        return f"<DeviceWatch {self.sources}, {len(self._pending)} to be written>"

    @property
    def sources(self) -> dict[str, str]:
        """By name: what it reads, or why it cannot."""
        return {source.name: source.state for source in self._sources}

    async def run(self) -> None:
        """Until cancelled."""
        for source in self._sources:
            source.start()
        try:
            while True:
                self._poll()
                rest_s = POLL_S
                try:
                    await self._write()
                except StoreUnavailable as error:
                    log.warning("cannot write down what a device told: %s; trying again", error)
                    rest_s = RETRY_S
                await asyncio.sleep(rest_s)
        finally:
            for source in self._sources:
                source.stop()

    def _poll(self) -> None:
        for source in self._sources:
            if source.state != self._told.get(source.name):
                self._told[source.name] = source.state
                log.info("GPUs' faults, %s: %s", source.name, source.state)
            for fault in source.poll():
                self._take(source, fault)

    def _take(self, source: Source, fault: Fault) -> None:
        self._metrics.device_fault(source.name, fault)
        grave = fault.severity is not Severity.IGNORABLE
        level = logging.WARNING if grave else logging.INFO
        log.log(level, "GPU %s: %s: %s", fault.device, fault.severity, fault.reason)
        waits = any(fault == other for other, _ in self._pending)
        if (grave or fault.recovery) and not waits:
            self._pending.append((fault, self._clock.unix_s()))

    async def _write(self) -> None:
        """What waits, the oldest first; StoreUnavailable leaves it where it is."""
        while self._pending:
            fault, unix_s = self._pending[0]
            key = self._prefix + device_name(self._boot_id, fault.device)
            record = device_after(_read(await self._store.get(key, CALL_S)), fault, unix_s, self._by)
            if record is not None:
                await self._store.put(key, msgspec.json.encode(record), CALL_S)
            self._pending.popleft()


def _read(value: bytes | None) -> DeviceRecord | None:
    """One that cannot be read (a newer version's) is written anew."""
    try:
        return msgspec.json.decode(value, type=DeviceRecord) if value is not None else None
    except ValueError:
        return None
