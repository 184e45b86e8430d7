"""The worker process: loads an engine, registers in the store, serves, and exits without losing a stream.

Always true:

- Start: listen → load the engine → prepare beats and welcome → register.
- Exit, within `drain_s`: tell the frontends on their connections, hand streams back, delete the keys, flush, stop.

`worker.failover_worker` runs a worker that has a standby, with the same parts in another order.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

import msgspec

from holdfast import __version__
from holdfast.core.address import parse_address
from holdfast.core.errors import UserError
from holdfast.core.log_files import UNWRITTEN
from holdfast.core.ports import Listener, Network, World
from holdfast.core.tasks import Tasks
from holdfast.core.text import printable
from holdfast.discovery.card import ModelCard
from holdfast.discovery.keys import (
    CARDS,
    INSTANCES,
    LOADINGS,
    STANDBYS,
    InstanceKey,
    InstanceRecord,
    LoadingRecord,
    decode_record,
    parse_key,
)
from holdfast.engines.contract import Engine, Progress
from holdfast.failover import lifecycle
from holdfast.failover.lifecycle import Ended, EndpointProblem, Lifecycle, Loaded, StandDown, State
from holdfast.spec.launch import WorkerLaunch
from holdfast.store.contract import Registration, Snapshot, Store
from holdfast.wire.http.server import HttpServer
from holdfast.wire.messages import VERSION, ProcessIdentity, Reload, Reloaded, StepDown, Welcome
from holdfast.wire.worker_connection import WorkerConnection
from holdfast.worker.admin_actions import Actions, AdminActions, admin_refusal
from holdfast.worker.beat import Beats, MakeBeats
from holdfast.worker.sessions import Sessions
from holdfast.worker.status import WorkerStatusPage

LOOK_S = 2.0  # for the store and for all standbys together; streams may be waiting
CONNECT_S = 0.5  # a standby is idle, so it answers quickly
# An admin action must answer within its bound (60 s), even if a load takes longer.
ANSWER_S = 50.0
RIGHT = (
    "the weights are as they were written: if its answers are wrong, its process or its device computes wrongly; "
    "restart the engine, and if the next process is wrong too, replace the device"
)
ENDPOINT = "generate"

log = logging.getLogger("holdfast.worker")


async def has_standby(store: Store, network: Network, me: InstanceKey, group: str) -> bool:
    """Return whether an engine of this group, other than `me`, is ready to take over; within `LOOK_S`.

    The store lists the standbys, but a key can outlive its process by a lease. So each is asked over a connection, and
    counts only if it answers that it is a standby of this group. Return False if time runs out: an engine that may
    answer wrongly then continues to serve, which does less harm than exiting without a successor."""
    try:
        async with asyncio.timeout(LOOK_S):
            for key, record in await _listed(store, me, group):
                if await _stands_by(network, key, record, group):
                    return True
    except TimeoutError:
        pass
    return False


async def _listed(store: Store, me: InstanceKey, group: str) -> list[tuple[InstanceKey, InstanceRecord]]:
    """Return the standbys of this group in the store, except `me`."""
    found: list[tuple[InstanceKey, InstanceRecord]] = []
    async with contextlib.aclosing(store.watch(f"{STANDBYS}{me.namespace}/")) as watch:
        async for event in watch:
            if not isinstance(event, Snapshot):
                continue
            for path, value in event.items.items():
                key = parse_key(STANDBYS, path)
                with contextlib.suppress(ValueError):
                    record = decode_record(value)
                    if key is not None and key != me and record.group == group:
                        found.append((key, record))
            break
    return found


async def _stands_by(network: Network, key: InstanceKey, record: InstanceRecord, group: str) -> bool:
    connection = WorkerConnection("a leader of its group")
    try:
        await network.connect(parse_address(record.address), lambda: connection, CONNECT_S)
        welcome = await connection.welcome(CONNECT_S)
    except (OSError, ValueError):
        return False
    finally:
        connection.abort()
    return (welcome.instance, welcome.group) == (key.instance, group) and not (welcome.active or welcome.asleep)


class Renewal:
    """Verifies the weights of an engine that may answer wrongly, and loads them again if they are damaged.

    The control process quarantines a worker that answered wrongly, together with its weights:

    - If the weights differ from what was written, a new load with a larger number makes the worker usable again.
    - If they do not, the process or its device computes wrongly and a load would not help. The control process learns
      this from the answer, clears the weights of suspicion and lets the standby take over.

    Always true: only `reload` loads intact weights again; one renewal runs at a time, and further callers wait for it.

    `renew(reason)` loads the engine's weights again and returns when it serves; `refusing` returns why that is not
    possible now."""

    def __init__(self, engine: Engine, renew: Callable[[str], Awaitable[None]], refusing: Callable[[], str]) -> None:
        self._engine = engine
        self.renew = renew
        self._refusing = refusing
        self._tasks = Tasks("renewal")
        self._under_way: asyncio.Task[str] | None = None

    @property
    def load(self) -> int:
        return self._engine.progress().load

    async def verify(self, load: int = 0) -> str:
        """Verify the weights and load them again if they differ; do nothing if the load number is above `load`."""
        if load and self.load > load:
            return f"they were loaded again before: load {self.load}"
        return await self._once(always=False)

    async def reload(self) -> str:
        """Load the weights again, damaged or not."""
        return await self._once(always=True)

    async def close(self) -> None:
        await self._tasks.stop()

    async def _once(self, *, always: bool) -> str:
        under_way = self._under_way
        if under_way is None or under_way.done():
            if why := self._refusing():
                raise UserError(f"{why}; weights are verified and loaded by the one of its group that serves")
            under_way = self._under_way = self._tasks.spawn(self._work(always=always), "renew")
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.shield(under_way)
        except TimeoutError:
            return f"still under way after {ANSWER_S:g} s"

    async def _work(self, *, always: bool) -> str:
        wrong = await self._engine.verify()
        if not (wrong or always):
            log.warning("asked to verify: %s", RIGHT)
            return RIGHT
        why = f"the weights are damaged: {wrong}" if wrong else "asked to load the weights again"
        log.warning("%s; loading them again", why)
        before = self.load
        await self.renew(why)
        return f"{why}; loaded again, load {before} -> {self.load}"


class Worker:
    """A process that serves one engine."""

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
        self._group = settings.group if settings.lock else ""  # without a lock there is no takeover
        self._store = store
        self._network = world.network
        self.clock = world.clock
        self._make_beats = make_beats
        self._loop = asyncio.get_running_loop()
        # 48 random bits: unique without coordination, and short enough to read aloud.
        self.key = InstanceKey(settings.namespace(), settings.component, ENDPOINT, world.rng.getrandbits(48))
        self.welcome: Welcome | None = None
        self.inexact_reason = ""  # why its answers may be wrong while it serves
        self.is_asleep: Callable[[], bool] = lambda: False
        self.is_proving: Callable[[], bool] = lambda: False
        self.artefacts = {hashlib.sha256(tokenizer).hexdigest(): tokenizer}
        self.life = Lifecycle(failover=bool(self._group), wake_s=settings.failover.wake_s, entered_s=self._loop.time())
        self.sessions = Sessions(engine, self)
        self._registrations: dict[str, Registration] = {}
        self._listener: Listener | None = None
        self._beats: Beats | None = None
        self._not_taken = ""
        self.more_facts: Callable[[], dict[str, Any]] = dict
        self.step_down: Callable[[str, bool], None] | None = None  # set if the worker has a group
        self.admin = AdminActions()
        self.renewal = Renewal(engine, self._renew_alone, lambda: self.refusing)
        self.actions: Actions = {"verify": self.renewal.verify, "reload": self.renewal.reload}
        clocks = self._loop.time, world.clock.unix_s
        self.page = WorkerStatusPage(
            self.facts, lambda: self.life, *clocks, settings=settings, actions=self.actions, admin=self.admin
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
            address, or_any = parse_address(self.settings.status_address), self.settings.status_any
            self._status_at = str(await self._status.start(address, or_any=or_any))
        self._listener = await self._network.listen(parse_address(self.settings.address), self.sessions.connection)
        try:
            yield
        finally:
            self._listener.close()
            await self._engine.stop()
            if self._beats is not None:
                self._beats.stop()
            await self.admin.close()
            await self.renewal.close()
            self._status.close()

    def step(self, event: lifecycle.Event) -> None:
        """Step the lifecycle; log and count every transition."""
        self.life, effects = lifecycle.step(self.life, event, self._loop.time())
        for effect in effects:
            why = f": {effect.reason}" if effect.reason else ""
            log.info("%s -> %s after %.3f s%s", effect.before, effect.after, effect.duration_s, why)
            self.page.entered()

    def introduce(self, *, active: bool, epoch: int = 0) -> None:
        """Set the welcome that a peer gets when it connects."""
        if self._beats is None:
            self._beats = self._make_beats(parse_address(self.settings.beat_address), self._progress)
            self._beats.start()
            self.sessions.say_last = self._beats.say_last
        if self.welcome is None or self.welcome.load != self._engine.progress().load:
            self.welcome = self._introduction(self._beats.identity)
        said = {"active": active, "epoch": epoch, "doubt": self.inexact_reason, "asleep": self.is_asleep()}
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
        """Send beats late: a chaos fault."""
        if self._beats is not None:
            self._beats.late_s = late_s

    def _progress(self) -> Progress:
        return replace(self._engine.progress(), tokens=self.sessions.made_total)

    def register(self, prefix: str) -> None:
        """Register in the store under `prefix` (an instance, or a standby), with the card."""
        assert self.welcome is not None, "introduce before register"
        assert self._listener is not None
        assert self._beats is not None
        reached_at = self.settings.reached_at
        addresses = str(reached_at(self._listener.address)), str(reached_at(self._beats.address))
        process, name = self.welcome.process.pid, self.settings.name
        record = InstanceRecord(*addresses, self._card.checksum(), process, name, self._group)
        self._list({CARDS: msgspec.json.encode(self._card), prefix: msgspec.json.encode(record)})

    def list_loading(self) -> None:
        """Register in the store as loading, until `withdraw`: streams for its model wait for it meanwhile."""
        within_s = self.settings.failover.load_s
        self._list({LOADINGS: msgspec.json.encode(LoadingRecord(self.settings.name, self._card.checksum(), within_s))})

    def _list(self, values: dict[str, bytes]) -> None:
        for where, value in values.items():
            if where not in self._registrations:
                self._registrations[where] = self._store.register(where + self.key.path, value)

    async def has_standby(self) -> bool:
        return bool(self._group) and await has_standby(self._store, self._network, self.key, self._group)

    async def withdraw(self, prefix: str) -> None:
        """Delete a registration; if the store does not answer in time, the key ends with its lease."""
        registration = self._registrations.pop(prefix, None)
        if registration is None:
            return
        try:
            async with asyncio.timeout(self.settings.drain_s / 2):
                await registration.withdraw()
        except TimeoutError:
            log.warning("the store did not take our withdrawal in time; its lease will end")

    def hand_back(self, reason: str) -> None:
        streams = self.sessions.streams
        self.sessions.hand_back(reason)
        log.info("handed back %d streams: %s", streams, reason)

    async def _renew_alone(self, why: str) -> None:
        """Hand the streams back, load the weights again and serve on: the renewal of a worker without a group."""
        self.sessions.hand_back(why, drains=False)
        await self._engine.renew()
        self.introduce(active=True)

    async def leave(self) -> None:
        """Withdraw all registrations, send what is still queued for frontends, and end."""
        await asyncio.gather(*map(self.withdraw, list(self._registrations)))  # concurrent: a store may be frozen
        if not await self.sessions.flushed(self.settings.drain_s / 2):
            log.warning("a frontend did not take the handed-back streams in time; it will see the connection end")
        self.step(Ended("left as asked"))

    # -- what sessions ask, and what the status page shows

    def asked_to_reload(self, message: Reload, uid: int | None, answer: Callable[[Reloaded], None]) -> None:
        """Verify the weights for the control process, as `POST /engine/verify` does."""

        def reply(status: int, word: str, outcome: str) -> None:
            answer(Reloaded(self.renewal.load, outcome, outcome == RIGHT))

        reason = printable(message.reason)  # its sender is not checked yet
        if why := admin_refusal(message.token.encode() or None, uid, self.settings.engine_token):
            log.warning("asked to verify the weights (%s), by one that may not: %s", reason, why)
            reply(403, "error", why)
            return
        log.warning("asked to verify the weights: %s", reason)
        self.admin.start("verify", lambda: self.renewal.verify(message.load), reply)

    def asked_to_step_down(self, message: StepDown, uid: int | None) -> None:
        """Hand over to the standby, on the control process's request: this process fails or answers wrongly."""
        reason = printable(message.reason)
        why = admin_refusal(message.token.encode() or None, uid, self.settings.engine_token)
        if why or self.step_down is None:
            log.warning("asked to hand over (%s), and does not: %s", reason, why or "it has no standby")
            return
        log.warning("asked to hand over to its standby: %s", reason)
        self.step_down(reason, message.believed)

    @property
    def refusing(self) -> str:
        """Return why the worker accepts no work now; "" if it does."""
        return "" if self.life.state is State.ACTIVE else f"it is {self.life.state} {self.life.reason}".rstrip()

    @property
    def proving(self) -> bool:
        """Return True after a takeover, while the engine proves with a known question that what it took over is
        right."""
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
        """Return the addresses at which this process can be reached, and its instance."""
        assert self._listener is not None
        address = str(self._listener.address)
        return {"address": address, "status": self._status_at, "instance": f"{self.key.instance:x}"}

    def facts(self) -> dict[str, Any]:
        progress = self._engine.progress()
        return {
            "status": self.status,
            "reason": self.life.reason or self.life.memory_problem or self.life.endpoint_problem or None,
            "exact": not self.inexact_reason,
            "doubt": self.inexact_reason or None,
            "role": "worker",
            "name": self.settings.name,
            "instance": f"{self.key.instance:x}",
            "namespace": self.key.namespace,
            "group": self._group,
            "engine_id": self.settings.failover.engine_id,
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
            "unwritten": UNWRITTEN.summary,
            **self.more_facts(),
        }

    @property
    def status(self) -> str:
        """Return the status as one word: a normal worker is "ready", a worker of a group has its lifecycle's state."""
        state = self.life.state
        if state is State.INIT:
            return "starting"
        if state is State.ACTIVE:
            problem = "not_admitted" if self._not_taken else "unhealthy" if self.life.endpoint_problem else ""
            return problem or ("active" if self._group else "ready")
        return str(state)

    def __repr__(self) -> str:
        return f"<Worker {self.key.instance:x} {self._card.name} {self.status}, {self.sessions.streams} streams>"
