"""The worker process: load an engine, be found, serve, and leave without losing a stream.

Order, always: listen → engine loads → beats and welcome are ready → register. And at the end: tell frontends in-band,
hand streams back, withdraw the keys, flush, stop. Leaving takes at most `WorkerSettings.drain_s`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.core.address import Address
from holdfast.core.ports import Network
from holdfast.discovery.card import ModelCard, encode_card
from holdfast.discovery.keys import CARDS, INSTANCES, InstanceKey, InstanceRecord, encode_record
from holdfast.engines.contract import Engine
from holdfast.store.contract import Registration, Store
from holdfast.wire.http_server import HttpServer
from holdfast.wire.messages import VERSION, Welcome
from holdfast.worker.beat import BeatThread
from holdfast.worker.identity import own_identity
from holdfast.worker.sessions import Sessions
from holdfast.worker.status import StatusPage

log = logging.getLogger("holdfast.worker")

COMPONENT = "worker"
ENDPOINT = "generate"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How one worker is placed."""

    namespace: str
    data_address: Address
    beat_address: Address
    status_address: Address
    drain_s: float = 5.0  # SIGTERM to exit, at most


class Worker:
    """One engine, served."""

    def __init__(
        self,
        engine: Engine,
        card: ModelCard,
        tokenizer: bytes,
        settings: WorkerSettings,
        store: Store,
        network: Network,
        rng: random.Random,
    ) -> None:
        self._engine = engine
        self._card = card
        self._settings = settings
        self._store = store
        self._network = network
        # 48 random bits: unique without coordination, and short enough to read aloud.
        self.key = InstanceKey(settings.namespace, COMPONENT, ENDPOINT, rng.getrandbits(48))
        self.welcome: Welcome | None = None
        self.artefacts = {hashlib.sha256(tokenizer).hexdigest(): tokenizer}
        self.draining = ""
        self.not_taken = ""
        self.sessions = Sessions(engine, self)
        self._registrations: list[Registration] = []
        self._status = HttpServer(StatusPage(self.facts).handle, network)

    async def run(self, stop: asyncio.Event, on_ready: Callable[[dict[str, Any]], None]) -> None:
        """Serve until `stop` is set, then drain."""
        settings = self._settings
        status_address = await self._status.start(settings.status_address)
        listener = await self._network.listen(settings.data_address, self.sessions.connection)
        await self._engine.start(self.sessions.take_step, self.sessions.take_closed)
        beats = BeatThread(settings.beat_address, self._engine.progress)
        beats.start()
        try:
            self._introduce(beats)
            record = InstanceRecord(str(listener.address), str(beats.address), self._card.checksum(), self._pid())
            self._registrations = [
                self._store.register(CARDS + self.key.path, encode_card(self._card)),
                self._store.register(INSTANCES + self.key.path, encode_record(record)),
            ]
            where = {"address": str(listener.address), "status": str(status_address)}
            on_ready(where | {"instance": f"{self.key.instance:x}"})
            log.info("%r", self)
            await stop.wait()
            await self._drain()
        finally:
            listener.close()
            await self._engine.stop()
            beats.stop()
            self._status.close()

    def _introduce(self, beats: BeatThread) -> None:
        limits = self._engine.limits
        self.welcome = Welcome(
            VERSION,
            self.key.instance,
            self.key.namespace,
            self._card.checksum(),
            limits.concurrency,
            limits.queue,
            self._engine.deterministic,
            own_identity(beats.native_id),
        )
        beats.set_welcome(self.welcome)

    def _pid(self) -> int:
        assert self.welcome is not None
        return self.welcome.process.pid

    async def _drain(self) -> None:
        streams = self.sessions.streams
        self.draining = "asked to stop"
        self.sessions.hand_back(self.draining)
        log.info("draining: handed back %d streams", streams)
        try:
            async with asyncio.timeout(self._settings.drain_s / 2):
                for registration in self._registrations:
                    await registration.withdraw()
        except TimeoutError:
            log.warning("the store did not take our withdrawal in time; its lease will end")
        if not await self.sessions.flushed(self._settings.drain_s / 2):
            log.warning("a frontend did not take the handed-back streams in time; it will see the connection end")

    def facts(self) -> dict[str, Any]:
        """What the status page shows."""
        progress = self._engine.progress()
        return {
            "status": self.status,
            "reason": self.draining or self.not_taken or None,
            "role": "worker",
            "instance": f"{self.key.instance:x}",
            "namespace": self.key.namespace,
            "model": self._card.name,
            "checksum": self._card.checksum(),
            "store": self._store.state,
            "streams": self.sessions.streams,
            "running": progress.running,
            "waiting": progress.waiting,
            "steps_total": progress.steps,
            "step_ms_p99": progress.step_ms_p99,
            "tokens_total": self.sessions.tokens_total,
            "requests_total": self.sessions.requests_total,
        }

    @property
    def status(self) -> str:
        if self.draining:
            return "draining"
        if self.welcome is None:
            return "starting"
        return "not_admitted" if self.not_taken else "ready"

    def __repr__(self) -> str:
        return f"<Worker {self.key.instance:x} {self._card.name} {self.status}, {self.sessions.streams} streams>"
