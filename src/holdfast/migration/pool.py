"""All workers a frontend knows: from what discovery tells to connected, judged, routable links.

Always true: a worker leaves only when its own connection is down *and* its key is gone from the store; a key's
disappearance alone means nothing; a worker gets work only once its card's text side is ready.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from holdfast.core.address import parse_address
from holdfast.core.errors import Code
from holdfast.core.ports import Network
from holdfast.discovery.card import ModelCard
from holdfast.discovery.registry import Appeared, Change, Instance, NotAdmitted, Withdrawn
from holdfast.health.liveness import TICK_S, Judge
from holdfast.health.probe import is_local, probe
from holdfast.health.verdicts import Effect, Judged, MoveStreams, StartProbe, StopProbe
from holdfast.migration.dispatcher import Dispatcher
from holdfast.migration.link import BeatConnection, DataConnection, NoticeConnection, WorkerLink
from holdfast.migration.sets import ModelDirectory, WorkerSet
from holdfast.wire.messages import ArtefactPart, GetArtefact, NotTaken, Welcome

log = logging.getLogger("holdfast.workers")

CONNECT_TIMEOUT_S = 2.0
# A tokenizer of 35 MB over a slow link; nothing waits on it but this worker's first request.
ARTEFACT_TIMEOUT_S = 30.0
ARTEFACT_BYTES_MAX = 256 * 1024 * 1024
RETRY_S_MIN = 0.05
RETRY_S_MAX = 1.0
REMIND_TICKS = 50  # every 5 s

PrepareText = Callable[[ModelCard, bytes], Awaitable[object]]


@dataclass(slots=True)
class _Watched:
    """A link with what watches it."""

    link: WorkerLink
    judge: Judge
    beat: BeatConnection | None = None
    probing: bool = False


class WorkerPool:
    """Keeps a link to every worker of the deployment."""

    def __init__(
        self,
        directory: ModelDirectory,
        dispatcher: Dispatcher,
        network: Network,
        rng: random.Random,
        prepare_text: PrepareText,
        peer: str,
    ) -> None:
        self._directory = directory
        self._dispatcher = dispatcher
        self._network = network
        self._rng = rng
        self._prepare_text = prepare_text
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[WorkerLink, asyncio.Task[None]] = {}
        self._preparing: dict[tuple[str, str], asyncio.Lock] = {}
        self._ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self.watched: dict[WorkerLink, _Watched] = {}
        self.verdicts: dict[str, int] = {}  # changes of verdict, by the new one
        self.on_models_changed: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- from discovery

    def apply(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Appeared):
                self._appeared(change.instance)
            elif isinstance(change, Withdrawn):
                self._withdrawn(change.instance)
            elif isinstance(change, NotAdmitted):
                self._not_admitted(change)

    def _appeared(self, instance: Instance) -> None:
        for link in self.watched:
            if link.instance.key == instance.key and link.instance.record == instance.record:
                link.withdrawn = False  # its key went and came back; the link never cared
                return
        link = WorkerLink(instance, self._dispatcher)
        self.watched[link] = _Watched(link, Judge(f"{instance.key.instance:x}"))
        self._tasks[link] = self._loop.create_task(self._keep(self.watched[link]))

    def _withdrawn(self, instance: Instance) -> None:
        for link in list(self.watched):
            if link.instance == instance:
                link.withdrawn = True
                if link.data is None:
                    self._tasks[link].cancel()

    def _not_admitted(self, change: NotAdmitted) -> None:
        log.warning("worker %x is not admitted: %s", change.key.instance, change.reason)
        if change.record is not None:
            task = self._loop.create_task(self._tell_not_taken(change.record.address, change.reason))
            task.add_done_callback(lambda done: done.exception() if not done.cancelled() else None)

    async def _tell_not_taken(self, address: str, reason: str) -> None:
        """A worker is never a silent zombie: it shows the reason in its health."""
        connection = NoticeConnection(self._peer)
        await self._network.connect(parse_address(address), lambda: connection, CONNECT_TIMEOUT_S)
        connection.send(NotTaken(reason))
        if connection.transport is not None:
            connection.transport.close()

    # -- one worker's life

    async def _keep(self, watched: _Watched) -> None:
        """Connect, serve, reconnect, until the worker is withdrawn and its connection is down."""
        link = watched.link
        retry_s = RETRY_S_MIN
        try:
            while True:
                began_s = self._loop.time()
                try:
                    await self._session(watched)
                except (OSError, TimeoutError, ValueError) as error:
                    link.reason = f"cannot connect: {error or type(error).__name__}"
                if link.withdrawn:
                    return
                if self._loop.time() - began_s > RETRY_S_MAX:
                    retry_s = RETRY_S_MIN
                await asyncio.sleep(retry_s * self._rng.uniform(0.8, 1.2))
                retry_s = min(RETRY_S_MAX, retry_s * 2)
        finally:
            self.watched.pop(link, None)
            self._tasks.pop(link, None)

    async def _session(self, watched: _Watched) -> None:
        """One data connection, from connect to loss."""
        link = watched.link
        data = DataConnection(link, self._peer)
        beats: asyncio.Task[None] | None = None
        try:
            await self._network.connect(parse_address(link.instance.record.address), lambda: data, CONNECT_TIMEOUT_S)
            welcome = await asyncio.wait_for(asyncio.shield(data.welcomed), CONNECT_TIMEOUT_S)
            self._check_welcome(link, welcome)
            link.data, link.welcome, link.draining = data, welcome, False
            workers = self._directory.set_for(link.instance.key.namespace, link.instance.card)
            await self._ready_text(workers, data)
            await self._open_beats(watched)
            beats = self._loop.create_task(self._keep_beats(watched))
            self._join(link, workers, welcome)
            link.reason = await data.lost
        finally:
            if beats is not None:
                beats.cancel()
                await asyncio.gather(beats, return_exceptions=True)
            self._leave(watched)
            data.close()

    def _check_welcome(self, link: WorkerLink, welcome: Welcome) -> None:
        """The process behind the address must be the one the store spoke of."""
        instance = link.instance
        expected = (instance.key.instance, instance.key.namespace, instance.record.checksum)
        if (welcome.instance, welcome.namespace, welcome.checksum) != expected:
            raise ConnectionError("another worker answers at its address")

    def _join(self, link: WorkerLink, workers: WorkerSet, welcome: Welcome) -> None:
        link.slot.capacity = welcome.concurrency + welcome.queue
        link.workers = workers
        link.reason = "serving"
        workers.links[link.slot.name] = link
        workers.table.add(link.slot)
        self._update_route(link)
        self.on_models_changed()
        log.info("worker %x serves %s (%s)", link.slot.name, workers.card.name, workers.namespace)

    def _leave(self, watched: _Watched) -> None:
        link, workers = watched.link, watched.link.workers
        link.data = None
        watched.probing = False
        if watched.beat is not None:
            watched.beat.close()
            self._beats_lost(watched)
        watched.judge = Judge(watched.judge.name)
        if workers is not None:
            link.fail_streams(Code.DISCONNECTED, "the worker's connection ended", tell_worker=False)
            workers.table.remove(link.slot)
            workers.links.pop(link.slot.name, None)
            link.workers = None
            self._dispatcher.workers_changed(workers)
            log.info("worker %x left: %s", link.slot.name, link.reason)

    # -- text artefacts

    async def _ready_text(self, workers: WorkerSet, data: DataConnection) -> None:
        if workers.text is not None:
            return
        key = (workers.namespace, workers.checksum)
        async with self._preparing.setdefault(key, asyncio.Lock()):
            if workers.text is None:
                tokenizer = await self._fetch(data, workers.card.tokenizer_sha256)
                try:
                    workers.text = await self._prepare_text(workers.card, tokenizer)
                except ValueError as error:
                    data.send(NotTaken(str(error)))
                    raise

    async def _fetch(self, data: DataConnection, sha256: str) -> bytes:
        parts: asyncio.Queue[ArtefactPart] = asyncio.Queue()
        data.artefacts[sha256] = parts
        data.send(GetArtefact(sha256))
        gathered = bytearray()
        try:
            async with asyncio.timeout(ARTEFACT_TIMEOUT_S):
                while True:
                    part = await parts.get()
                    if part.total == 0 or part.total > ARTEFACT_BYTES_MAX or part.offset != len(gathered):
                        raise ConnectionError(f"worker does not have the artefact {sha256} its card names")
                    gathered += part.data
                    if len(gathered) >= part.total:
                        break
        finally:
            del data.artefacts[sha256]
        if hashlib.sha256(gathered).hexdigest() != sha256:
            raise ConnectionError(f"artefact {sha256} arrived with other content")
        return bytes(gathered)

    # -- beats and verdicts

    async def _open_beats(self, watched: _Watched) -> None:
        beat = BeatConnection(self._peer)
        address = parse_address(watched.link.instance.record.beat_address)
        await self._network.connect(address, lambda: beat, CONNECT_TIMEOUT_S)
        try:
            welcome = await asyncio.wait_for(asyncio.shield(beat.welcomed), CONNECT_TIMEOUT_S)
        except BaseException:
            beat.close()
            raise
        watched.beat = beat
        self._perform(watched, watched.judge.on_connected(self._loop.time(), is_local(welcome.process)))

    async def _keep_beats(self, watched: _Watched) -> None:
        """Reopen a broken beat connection while the data connection stands."""
        while True:
            if watched.beat is not None:
                await asyncio.shield(watched.beat.lost)
                self._beats_lost(watched)
            await asyncio.sleep(RETRY_S_MIN * 4)
            try:
                await self._open_beats(watched)
            except (OSError, TimeoutError):
                continue

    def _beats_lost(self, watched: _Watched) -> None:
        if watched.beat is not None:
            watched.beat = None
            self._perform(watched, watched.judge.on_disconnected(self._loop.time()))

    def _tick(self) -> None:
        """Ten times a second, for all workers. What was received comes before what was not."""
        now_s = self._loop.time()
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._ticks += 1
        for watched in list(self.watched.values()):
            self._tick_one(watched, now_s)
        self._dispatcher.tick(now_s)
        if self._ticks % REMIND_TICKS == 0:
            self._dispatcher.remind_waiting()

    def _tick_one(self, watched: _Watched, now_s: float) -> None:
        link, judge = watched.link, watched.judge
        if link.heard:
            link.heard = False
            self._perform(watched, judge.on_traffic(now_s))
        if watched.beat is not None:
            for beat in watched.beat.beats:
                self._perform(watched, judge.on_beat(now_s, beat))
            watched.beat.beats.clear()
        self._perform(watched, judge.on_tick(now_s, bool(link.streams)))
        if watched.probing and link.welcome is not None:
            self._perform(watched, judge.on_probe(now_s, probe(link.welcome.process)))

    def _perform(self, watched: _Watched, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, StartProbe):
                watched.probing = True
            elif isinstance(effect, StopProbe):
                watched.probing = False
            elif isinstance(effect, MoveStreams):
                watched.link.fail_streams(Code.RESPONSE_TIMEOUT, effect.reason, tell_worker=True)
            elif isinstance(effect, Judged):
                self.verdicts[effect.after] = self.verdicts.get(effect.after, 0) + 1
                self._update_route(watched.link)
                log.info("worker %s: %s -> %s: %s", watched.judge.name, effect.before, effect.after, effect.reason)

    def _update_route(self, link: WorkerLink) -> None:
        workers = link.workers
        if workers is None:
            return
        judge = self.watched[link].judge
        routable = judge.routable and not link.draining
        workers.table.update(link.slot, routable=routable, admit_max=judge.admit_max if routable else None)
        self._dispatcher.workers_changed(workers)
