"""The worker process: load an engine, be found, serve, and leave without losing a stream.

Order, always: listen → engine loads → beats and welcome are ready → register. And at the end: tell frontends in-band,
hand streams back, withdraw the keys, flush, stop. Leaving takes at most its `drain_s`. A worker with a
standby lives by `worker.shadow`, which uses the same parts in another order.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from holdfast import __version__
from holdfast.core.address import parse_address
from holdfast.core.ports import Listener, World
from holdfast.core.unwritten import UNWRITTEN
from holdfast.discovery.card import ModelCard, encode_card
from holdfast.discovery.keys import (
    CARDS,
    INSTANCES,
    LOADINGS,
    InstanceKey,
    InstanceRecord,
    LoadingRecord,
    encode_loading,
    encode_record,
)
from holdfast.engines.contract import Engine, Progress
from holdfast.failover import lifecycle
from holdfast.failover.lifecycle import Ended, EndpointProblem, Lifecycle, Loaded, StandDown, State
from holdfast.spec.launch import WorkerLaunch
from holdfast.store.contract import Registration, Store
from holdfast.wire.http.server import HttpServer
from holdfast.wire.messages import VERSION, ProcessIdentity, Reload, Reloaded, StepDown, Welcome
from holdfast.worker.beat import Beats, MakeBeats
from holdfast.worker.levers import Actions, Levers, refusal
from holdfast.worker.renewal import RIGHT, Renewal
from holdfast.worker.session import SHOWN_CHARS_MAX
from holdfast.worker.sessions import Sessions
from holdfast.worker.standbys import has_standby
from holdfast.worker.status import StatusPage

log = logging.getLogger("holdfast.worker")

ENDPOINT = "generate"


class Worker:
    """One engine, served."""

    def __init__(
        self,
        engine: Engine,
        card: ModelCard,
        tokenizer: bytes,
        settings: WorkerLaunch,
        *,
        store: Store,
        world: World,
        make_beats: MakeBeats,
    ) -> None:
        self._engine = engine
        self._card = card
        self.settings = settings
        self._group = settings.group if settings.lock else ""  # without a lock nobody takes over
        self._store = store
        self._network = world.network
        self.clock = world.clock
        self._make_beats = make_beats
        self._loop = asyncio.get_running_loop()
        # 48 random bits: unique without coordination, and short enough to read aloud.
        self.key = InstanceKey(settings.namespace(), settings.component, ENDPOINT, world.rng.getrandbits(48))
        self.welcome: Welcome | None = None
        self.doubt = ""  # why its answers may be wrong, though it serves
        self.is_asleep: Callable[[], bool] = lambda: False
        self.is_proving: Callable[[], bool] = lambda: False
        self.artefacts = {hashlib.sha256(tokenizer).hexdigest(): tokenizer}
        self.life = Lifecycle(shadow=bool(self._group), wake_s=settings.place.wake_s, entered_s=self._loop.time())
        self.sessions = Sessions(engine, self)
        self._registrations: dict[str, Registration] = {}
        self._listener: Listener | None = None
        self._beats: Beats | None = None
        self._not_taken = ""
        self.more_facts: Callable[[], dict[str, Any]] = dict
        self.step_down: Callable[[str, bool], None] | None = None  # of one that has a standby
        self.levers = Levers()
        self.renewal = Renewal(engine, self._renew_alone, lambda: self.refusing)
        self.actions: Actions = {"verify": self.renewal.verify, "reload": self.renewal.reload}
        clocks = self._loop.time, world.clock.unix_s
        self.page = StatusPage(
            self.facts, lambda: self.life, *clocks, settings=settings, actions=self.actions, levers=self.levers
        )
        self._status = HttpServer(self.page.handle, world.network)
        self._status_at = ""

    async def run(self, stop: asyncio.Event, on_ready: Callable[[dict[str, Any]], None]) -> None:
        """Serve until `stop` is set, then drain."""
        async with self.opened():
            self.list_loading()
            await self._engine.load(self.sessions)
            self.introduce(active=True)
            self.step(Loaded())
            self.register(INSTANCES)
            on_ready(self.where)
            await self.withdraw(LOADINGS)
            log.info("%r", self)
            await stop.wait()
            self.step(StandDown("asked to stop"))
            self.hand_back("asked to stop")
            await self.leave()

    # -- the parts, in the order they are used

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Listen for probes and frontends; close everything at the end."""
        if self.settings.status_address:
            wished, or_any = parse_address(self.settings.status_address), self.settings.status_any
            self._status_at = str(await self._status.start(wished, or_any=or_any))
        self._listener = await self._network.listen(parse_address(self.settings.address), self.sessions.connection)
        try:
            yield
        finally:
            self._listener.close()
            await self._engine.stop()
            if self._beats is not None:
                self._beats.stop()
            await self.levers.close()
            await self.renewal.close()
            self._status.close()

    def step(self, event: lifecycle.Event) -> None:
        """The lifecycle goes on; every transition is logged and counted."""
        self.life, effects = lifecycle.step(self.life, event, self._loop.time())
        for effect in effects:
            why = f": {effect.reason}" if effect.reason else ""
            log.info("%s -> %s after %.3f s%s", effect.before, effect.after, effect.duration_s, why)
            self.page.entered(effect)

    def introduce(self, *, active: bool, epoch: int = 0) -> None:
        """What whoever connects is told from now on."""
        if self._beats is None:
            self._beats = self._make_beats(parse_address(self.settings.beat_address), self._progress)
            self._beats.start()
            self.sessions.say_last = self._beats.say_last
        if self.welcome is None or self.welcome.load != self._engine.progress().load:
            self.welcome = self._introduction(self._beats.identity)
        said = {"active": active, "epoch": epoch, "doubt": self.doubt, "asleep": self.is_asleep()}
        self.welcome = msgspec.structs.replace(self.welcome, **said)
        self._beats.set_welcome(self.welcome)

    def _introduction(self, process: ProcessIdentity) -> Welcome:
        limits, said = self._engine.limits, self._engine.capabilities
        return Welcome(
            VERSION,
            self.key.instance,
            self.key.namespace,
            self._card.checksum(),
            limits.concurrency,
            limits.queue,
            said.deterministic,
            process,
            group=self._group,
            build=f"{__version__} {said.build}",
            dtype=said.dtype,
            device=said.device,
            weights=said.weights or f"{self.key.instance:x}",
            load=self._engine.progress().load,
            vocabulary=said.vocabulary,
            gpus=self.settings.gpus,
        )

    def delay_beats(self, late_s: float) -> None:
        """A chaos fault."""
        if self._beats is not None:
            self._beats.late_s = late_s

    def _progress(self) -> Progress:
        return replace(self._engine.progress(), tokens=self.sessions.made_total)

    def register(self, prefix: str) -> None:
        """Stand in the store under `prefix` (an instance, or a standby), with the card."""
        assert self.welcome is not None, "introduce before register"
        assert self._listener is not None
        assert self._beats is not None
        reached_at = self.settings.reached_at
        addresses = str(reached_at(self._listener.address)), str(reached_at(self._beats.address))
        process, name = self.welcome.process.pid, self.settings.name
        record = InstanceRecord(*addresses, self._card.checksum(), process, name, self._group)
        self._list({CARDS: encode_card(self._card), prefix: encode_record(record)})

    def list_loading(self) -> None:
        """Stand in the store as an engine that is loading, until `withdraw`: streams of its set wait for it."""
        within_s = self.settings.place.load_s
        self._list({LOADINGS: encode_loading(LoadingRecord(self.settings.name, self._card.checksum(), within_s))})

    def _list(self, values: dict[str, bytes]) -> None:
        for where, value in values.items():
            if where not in self._registrations:
                self._registrations[where] = self._store.register(where + self.key.path, value)

    async def has_standby(self) -> bool:
        """Return whether another engine of this group is ready to take over, as far as can be found out within
        `standbys.LOOK_S`."""
        return bool(self._group) and await has_standby(self._store, self._network, self.key, self._group)

    async def withdraw(self, prefix: str) -> None:
        """Stand there no longer; what the store does not take in time ends with its lease."""
        registration = self._registrations.pop(prefix, None)
        if registration is None:
            return
        try:
            async with asyncio.timeout(self.settings.drain_s / 2):
                await registration.withdraw()
        except TimeoutError:
            log.warning("the store did not take our withdrawal in time; its lease will end")

    def hand_back(self, reason: str) -> None:
        """Every stream goes back to its frontend, in-band and at once."""
        streams = self.sessions.streams
        self.sessions.hand_back(reason)
        log.info("handed back %d streams: %s", streams, reason)

    async def _renew_alone(self, why: str) -> None:
        """Of a worker without a group: its streams go back, and it goes on with weights of another load."""
        self.sessions.hand_back(why, drains=False)
        await self._engine.renew()
        self.introduce(active=True)

    async def leave(self) -> None:
        """Withdraw, flush, and be over."""
        await asyncio.gather(*map(self.withdraw, list(self._registrations)))  # at once: a store may be frozen
        if not await self.sessions.flushed(self.settings.drain_s / 2):
            log.warning("a frontend did not take the handed-back streams in time; it will see the connection end")
        self.step(Ended("left as asked"))

    # -- what sessions ask, and what the status page shows

    def asked_to_reload(self, message: Reload, uid: int | None, answer: Callable[[Reloaded], None]) -> None:
        """As `POST /engine/verify`, by control."""
        told = _Told(lambda outcome: answer(Reloaded(self.renewal.load, outcome, outcome == RIGHT)))
        reason = message.reason[:SHOWN_CHARS_MAX]  # of anybody, as yet
        if why := refusal(message.token.encode() or None, uid, self.settings.engine_token):
            log.warning("asked to verify the weights (%s), by one who may not: %s", reason, why)
            told.give(403, "error", why)
            return
        log.warning("asked to verify the weights: %s", reason)
        self.levers.pull("verify", lambda: self.renewal.verify(message.load), told)

    def asked_to_step_down(self, message: StepDown, uid: int | None) -> None:
        """By control: this process fails or answers wrongly, and its standby is ready."""
        reason = message.reason[:SHOWN_CHARS_MAX]
        why = refusal(message.token.encode() or None, uid, self.settings.engine_token)
        if why or self.step_down is None:
            log.warning("asked to hand over (%s), and does not: %s", reason, why or "it has no standby")
            return
        log.warning("asked to hand over to its standby: %s", reason)
        self.step_down(reason, message.believed)

    @property
    def refusing(self) -> str:
        """Why no work is taken now; empty: it is."""
        return "" if self.life.state is State.ACTIVE else f"it is {self.life.state} {self.life.reason}".rstrip()

    @property
    def proving(self) -> bool:
        """Whether it has just taken over, and is about to show that what it took over is right."""
        return self.is_proving()

    @property
    def not_taken(self) -> str:
        return self._not_taken

    @not_taken.setter
    def not_taken(self, reason: str) -> None:
        if reason != self._not_taken:
            self._not_taken = reason
            self.step(EndpointProblem(f"not admitted: {reason}" if reason else ""))

    @property
    def where(self) -> dict[str, Any]:
        """What is written down for those who look for this process."""
        assert self._listener is not None
        address = str(self._listener.address)
        return {"address": address, "status": self._status_at, "instance": f"{self.key.instance:x}"}

    def facts(self) -> dict[str, Any]:
        """What the status page shows."""
        progress = self._engine.progress()
        return {
            "status": self.status,
            "reason": self.life.reason or self.life.memory_problem or self.life.endpoint_problem or None,
            "exact": not self.doubt,
            "doubt": self.doubt or None,
            "role": "worker",
            "name": self.settings.name,
            "instance": f"{self.key.instance:x}",
            "namespace": self.key.namespace,
            "group": self._group,
            "engine_id": self.settings.place.engine_id,
            "model": self._card.name,
            "checksum": self._card.checksum(),
            "store": self._store.state,
            "streams": self.sessions.streams,
            "running": progress.running,
            "waiting": progress.waiting,
            "steps_total": progress.steps,
            "step_ms_p99": progress.step_ms_p99,
            "kv": asdict(progress.kv),
            "load": progress.load,
            "tokens_total": self.sessions.tokens_total,
            "requests_total": self.sessions.requests_total,
            "unwritten": UNWRITTEN.words,
            **self.more_facts(),
        }

    @property
    def status(self) -> str:
        """One word for people: a normal worker is "ready", one of a group says which part it has."""
        state = self.life.state
        if state is State.INIT:
            return "starting"
        if state is State.ACTIVE:
            problem = "not_admitted" if self._not_taken else "unhealthy" if self.life.endpoint_problem else ""
            return problem or ("active" if self._group else "ready")
        return str(state)

    def __repr__(self) -> str:
        return f"<Worker {self.key.instance:x} {self._card.name} {self.status}, {self.sessions.streams} streams>"


@dataclass(frozen=True, slots=True)
class _Told:
    """What came of a lever that was pulled over the wire, in words."""

    tell: Callable[[str], None]

    def give(self, status: int, word: str, message: str) -> None:
        self.tell(message)
