"""All workers a frontend knows: from what discovery tells to connected, judged, routable links.

Always true: a worker leaves only when its own connection is down *and* its key is gone from the store; a key's
disappearance alone means nothing; a worker gets work only once its card's text side is ready. A standby is connected,
judged and joined to its set like any other, so that nothing but its own word is missing when it takes over.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial

from holdfast.core.address import parse_address
from holdfast.core.errors import Code
from holdfast.core.ports import Network
from holdfast.core.tasks import Tasks, beside
from holdfast.discovery.card import ModelCard
from holdfast.discovery.keys import InstanceKey
from holdfast.discovery.registry import Appeared, Change, Instance, NotAdmitted, Withdrawn
from holdfast.health.liveness import TICK_S, MoveStreams
from holdfast.health.records import Seen
from holdfast.health.watcher import CONNECT_TIMEOUT_S, BeatWatcher, Finding
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.dispatcher import Dispatcher
from holdfast.streams.flight import WorkerSet
from holdfast.streams.link import DataConnection, WorkerLink
from holdfast.streams.notices import Notices
from holdfast.streams.sightings import Sightings
from holdfast.streams.standings import Standings
from holdfast.streams.weighing import Weighing

log = logging.getLogger("holdfast.workers")

RETRY_S_MIN = 0.05
RETRY_S_MAX = 1.0
REMIND_TICKS = 10  # every second
REASON_CHARS_MAX = 500  # of a refusal, in a report

PrepareText = Callable[[ModelCard, bytes], Awaitable[object]]


class Roster:
    """Keeps a link to every worker of the deployment."""

    def __init__(
        self,
        directory: ModelDirectory,
        dispatcher: Dispatcher,
        network: Network,
        rng: random.Random,
        prepare_text: PrepareText,
        peer: str,
        standings: Standings | None = None,
    ) -> None:
        self._directory = directory
        self._dispatcher = dispatcher
        self._network = network
        self._rng = rng
        self._prepare_text = prepare_text
        self.peer = peer
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[WorkerLink, asyncio.Task[None]] = {}
        self._running = Tasks("workers")
        self._notices = Notices(network, peer)
        self._ticks = 0
        self._ticked_s = self._loop.time()
        self._sightings: defaultdict[str, Sightings] = defaultdict(Sightings)  # by deployment
        self._timer: asyncio.TimerHandle | None = None
        self.watchers: dict[WorkerLink, BeatWatcher] = {}
        self._unread: dict[InstanceKey, str] = {}  # workers whose card's text side could not be made, and why
        self._by_key: dict[InstanceKey, list[WorkerLink]] = {}  # the same: one now, and those whose record has changed
        self.weighing = Weighing(dispatcher, self._by_key, standings or Standings(), self._loop.time)
        self.verdicts: dict[str, int] = {}  # changes of verdict, by the new one
        self.on_models_changed: Callable[[], None] = lambda: None

    @property
    def standbys(self) -> list[WorkerLink]:
        """Connected and ready, and not active by their own word."""
        return [link for link in self.watchers if link.workers is not None and not link.active]

    def start(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._running.stop()
        await self._notices.stop()

    def told(self, deployment: str) -> dict[str, Seen]:
        """What is seen of each worker of a deployment, by instance, for a report to it; and so are the next two."""
        own = self._links_in(deployment)
        here = {link.slot.name: (link.streams.values(), link.share.fall) for link in own}
        return self._sightings[deployment].told(here, self._loop.time())

    def admitted(self, deployment: str) -> tuple[str, ...]:
        """Who is sent requests as soon as control's verdict allows it."""
        joined = [link for link in self._links_in(deployment) if link.workers is not None and link.trusted]
        return tuple(sorted(f"{link.slot.name:x}" for link in joined if not self._dispatcher.links.bar(link)))

    def refused(self, deployment: str) -> dict[str, str]:
        """Whose card cannot be used here, and why."""
        unread = sorted(self._unread.items(), key=str)
        return {f"{key.instance:x}": why[:REASON_CHARS_MAX] for key, why in unread if key.deployment == deployment}

    def _links_in(self, deployment: str) -> list[WorkerLink]:
        return [link for link in self.watchers if link.instance.key.deployment == deployment]

    # -- from discovery

    def apply(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Appeared):
                self._appeared(change.instance)
            elif isinstance(change, Withdrawn):
                self._withdrawn(change.instance)
            elif isinstance(change, NotAdmitted):
                self._notices.not_admitted(change)

    def heard(self, prefix: str) -> None:
        """All that stands under a part of the store was told."""
        self._directory.unread.discard(prefix)

    def store_is_lost(self, lost: bool) -> None:
        """While the store is lost, workers that come are not known here."""
        self._directory.store_lost = lost

    def _appeared(self, instance: Instance) -> None:
        known = self._by_key.setdefault(instance.key, [])
        for link in known:
            if link.instance == instance:
                link.withdrawn = False  # its key went and came back; the link never cared
                return
        self._directory.appeared(instance.key.deployment, instance.card.name, self._loop.time())
        link = WorkerLink(instance, self._dispatcher)
        link.since_s = self._loop.time()
        link.seen = self._sightings[instance.key.deployment].of(instance.key.instance)
        known.append(link)
        watcher = self.watchers[link] = BeatWatcher(
            name=instance.name,
            address=instance.record.beat_address,
            network=self._network,
            peer=self.peer,
            check=link.check,
            on_finding=partial(self._found, link),
            ask=link.ask,
        )
        link.on_word = watcher.hear
        self._tasks[link] = self._running.spawn(self._keep(link), instance.name)

    def _withdrawn(self, instance: Instance) -> None:
        for link in list(self._by_key.get(instance.key, ())):
            if link.instance == instance:
                link.withdrawn = True
                if link.data is None:
                    self._tasks[link].cancel()
                    self._forget(link)  # should its key come back at once, that is for a new link

    def _forget(self, link: WorkerLink) -> None:
        key = link.instance.key
        if self.watchers.pop(link, None) is None:
            return
        self._by_key[key].remove(link)
        if not self._by_key[key]:
            del self._by_key[key]
            self._unread.pop(key, None)

    # -- one worker's life

    async def _keep(self, link: WorkerLink) -> None:
        """Connect, serve, reconnect, until the worker is withdrawn and its connection is down; the task's root."""
        retry_s = RETRY_S_MIN
        try:
            while True:
                began_s = self._loop.time()
                try:
                    await self._session(link, self.watchers[link])
                except (OSError, ValueError) as error:
                    link.reason = f"cannot connect: {error or type(error).__name__}"
                except Exception:
                    log.exception("bug while serving through %r", link)  # costs a session, not the worker
                    link.reason = "internal error; the log has the details"
                if link.withdrawn:
                    return
                if self._loop.time() - began_s > RETRY_S_MAX:
                    retry_s = RETRY_S_MIN
                await asyncio.sleep(retry_s * self._rng.uniform(0.8, 1.2))
                retry_s = min(RETRY_S_MAX, retry_s * 2)
        finally:
            self._forget(link)
            self._tasks.pop(link, None)

    async def _session(self, link: WorkerLink, watcher: BeatWatcher) -> None:
        """One data connection, from connect to loss. It begins with a new judge."""
        data = DataConnection(link, self.peer)
        workers: WorkerSet | None = None
        try:
            await self._network.connect(parse_address(link.instance.record.address), lambda: data, CONNECT_TIMEOUT_S)
            welcome = await data.welcome(CONNECT_TIMEOUT_S)
            link.check(welcome)
            link.data, link.welcome = data, welcome
            workers = self._directory.set_for(link.instance.key.namespace, link.instance.card)
            workers.sessions += 1
            await self._ready_text(link, workers, data)
            await self._serve(link, watcher, workers, data)
        finally:
            link.data = None
            watcher.begin_anew()
            if link.workers is not None:
                self._dispatcher.leave(link)
                log.info("%s left: %s", link.instance.name, link.reason)
            data.close()
            if workers is not None:
                workers.sessions -= 1

    async def _serve(self, link: WorkerLink, watcher: BeatWatcher, workers: WorkerSet, data: DataConnection) -> None:
        """From the first beat to the data connection's end."""
        await watcher.open()
        async with beside(watcher.keep(), "beats"):
            self._join(link, workers)
            link.reason = await asyncio.shield(data.lost)

    def _join(self, link: WorkerLink, workers: WorkerSet) -> None:
        assert link.welcome is not None
        self._unread.pop(link.instance.key, None)
        older = workers.table.slots.get(link.slot.name)
        if older is not None:  # the same worker, by what its record said before
            self._retire(self._dispatcher.links[older])
        link.slot.batch = link.welcome.concurrency
        link.slot.capacity = link.welcome.concurrency + link.welcome.queue
        self._dispatcher.join(link, workers)
        self._update_route(link)
        self.on_models_changed()
        objection = self._dispatcher.links.objection(link)
        link.reason = objection or "serving"
        state = f"does not serve yet: {objection}" if objection else "serves"
        log.info("%s of %s (%s) %s", link.instance.name, workers.card.name, workers.namespace, state)

    def _retire(self, link: WorkerLink) -> None:
        data, link.data = link.data, None
        self._dispatcher.leave(link)
        if data is not None:
            data.close()  # ends its session

    async def _ready_text(self, link: WorkerLink, workers: WorkerSet, data: DataConnection) -> None:
        """Make the set's text side if no other worker has brought it yet."""
        async with workers.text_lock:
            if workers.text is not None:
                return
            tokenizer = await data.artefacts.fetch(workers.card.tokenizer_sha256)
            try:
                workers.text = await self._prepare_text(workers.card, tokenizer)
            except ValueError as error:
                log.warning("%s is not admitted: %s", link.instance.name, error)
                self._unread[link.instance.key] = str(error)
                await self._notices.tell(link.instance.record.address, str(error))
                raise

    # -- time and verdicts

    def _tick(self) -> None:
        """Ten times a second, for all workers."""
        now_s = self._loop.time()
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._ticks += 1
        for link, watcher in list(self.watchers.items()):
            heard, link.heard = link.heard, False
            watcher.tick(now_s, heard=heard, streams_open=bool(link.streams))
            link.seen.stream_s += (len(link.streams) - link.slot.unproven) * (now_s - self._ticked_s)
        self._ticked_s = now_s
        self.weighing.tick()
        self._dispatcher.tick(now_s)
        if self._ticks % REMIND_TICKS == 0:
            self._dispatcher.remind_waiting()

    def _found(self, link: WorkerLink, finding: Finding) -> None:
        """Its judge has a new verdict, or wants its streams elsewhere."""
        if isinstance(finding, MoveStreams):
            link.fail_streams(Code.RESPONSE_TIMEOUT, finding.reason, tell_worker=True)
            return
        self.verdicts[finding.after] = self.verdicts.get(finding.after, 0) + 1
        self._update_route(link)
        log.info("%s: %s -> %s: %s", link.instance.name, finding.before, finding.after, finding.reason)

    def _update_route(self, link: WorkerLink) -> None:
        if link not in self.watchers:
            return  # forgotten meanwhile
        judge = self.watchers[link].judge
        link.trusted, link.admit_max = judge.routable, judge.admit_max
        self.weighing.weigh(link)
        self._dispatcher.reroute(link)
