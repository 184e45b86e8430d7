"""Keeps a link to every worker a frontend knows: connects it, watches it, and gives it its share of traffic.

`Roster`: a worker is removed only when its own connection is down *and* its key is gone from the store. A worker gets
work only once the text side of its model card is ready. A standby is connected, watched and joined to its set like any
other worker: to take over, it only has to send its `Active` frame.

`TrafficWeights` applies control's verdicts. When a worker is ejected (control decides that it loses its streams), they
are resumed elsewhere or held; this counts as a failure neither of the stream nor of the worker. A draining worker keeps
its streams until other workers have places for them. A few move at a time, and the next ones when those have made a
token, so that the receiving workers are not swamped.

Three kinds of worker serve only while no other worker of their set can:
- a spare
- a worker that is being replaced; it gets only streams that began in its set
- a worker with a verdict against it, if the last verdicts leave its set without any other (`health.last_resort`)

Always true: a takeover waits for no verdict (`streams.verdicts`). A handed-over stream never has to wait, and never
goes ahead of waiting streams. An ejection moves a stream only when another worker of the set can take it, or when its
own worker cannot continue.

`NotAdmittedNotices` tells workers that are not admitted why; they show the reason in their health.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from holdfast.core.address import parse_address
from holdfast.core.backoff import LAST_S, Backoff
from holdfast.core.errors import Code
from holdfast.core.ports import Network
from holdfast.core.tasks import Tasks, beside
from holdfast.discovery.card import ModelCard
from holdfast.discovery.keys import InstanceKey
from holdfast.discovery.registry import Appeared, Change, Instance, NotAdmitted, Withdrawn
from holdfast.health.last_resort import SPARE_UNFITNESS, ResortCandidate, last_resorts
from holdfast.health.liveness import TICK_S, MoveLostStreams
from holdfast.health.records import WorkerSeen
from holdfast.health.watcher import CONNECT_TIMEOUT_S, BeatWatcher, Finding
from holdfast.store.contract import WatchEvent
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.dispatcher import MAY_BE_WRONG, Dispatcher
from holdfast.streams.flight import Flight, WorkerSet
from holdfast.streams.link import DataConnection, WorkerLink
from holdfast.streams.observations import AllWorkerCounts
from holdfast.streams.verdicts import WorkerVerdicts, idle_share
from holdfast.wire.messages import NotTaken
from holdfast.wire.worker_connection import WorkerConnection

# Each costs the receiving worker a prefill beside its other work.
HANDED_OVER_AT_ONCE = 4
# Workers with a verdict against them serve once their set has had no worker for so long: a present control decides
# sooner, and a takeover takes less. Much shorter than streams are held (`HoldSettings.hold_s`, 30 s).
LAST_RESORT_AFTER_S = 5.0
_ENGINE = re.compile(r"-engine-\d+$")  # follows the pod's name if the pod has several engines
Links = Mapping[InstanceKey, list[WorkerLink]]
log = logging.getLogger("holdfast.workers")
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
        verdicts: WorkerVerdicts | None = None,
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
        self._notices = NotAdmittedNotices(network, peer)
        self._ticks = 0
        self._ticked_at_s = self._loop.time()
        self._counts: defaultdict[str, AllWorkerCounts] = defaultdict(AllWorkerCounts)  # by deployment
        self._timer: asyncio.TimerHandle | None = None
        self.watchers: dict[WorkerLink, BeatWatcher] = {}
        self._unread: dict[InstanceKey, str] = {}  # workers with a card that cannot be used here, and why
        self._by_key: dict[InstanceKey, list[WorkerLink]] = {}  # including links of an older record
        self.weights = TrafficWeights(dispatcher, self._by_key, verdicts or WorkerVerdicts(), self._loop.time)
        self.verdicts: dict[str, int] = {}  # changes of verdict, by the new one
        self.on_models_changed: Callable[[], None] = lambda: None

    @property
    def standbys(self) -> list[WorkerLink]:
        """Return the connected and ready workers that say they are not active."""
        return [link for link in self.watchers if link.workers is not None and not link.active]

    def start(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._running.stop()
        await self._notices.stop()

    def observed_workers(self, deployment: str) -> dict[str, WorkerSeen]:
        """Return this frontend's observations of a deployment's workers, by instance, for its report."""
        own = self._links_in(deployment)
        here = {link.slot.name: (link.streams.values(), link.share.ejections) for link in own}
        return self._counts[deployment].report(here, self._loop.time())

    def admitted(self, deployment: str) -> tuple[str, ...]:
        """Return the workers that get requests as soon as control's verdict allows it."""
        joined = [link for link in self._links_in(deployment) if link.workers is not None and link.trusted]
        return tuple(sorted(f"{link.slot.name:x}" for link in joined if not self._dispatcher.links.own_objection(link)))

    def refused(self, deployment: str) -> dict[str, str]:
        """Return the workers with a card that cannot be used here, and why."""
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

    def _appeared(self, instance: Instance) -> None:
        known = self._by_key.setdefault(instance.key, [])
        for link in known:
            if link.instance == instance:
                link.withdrawn = False  # its key went and came back; the connection was up all the time
                return
        self._directory.appeared(instance.key.deployment, instance.card.name, self._loop.time())
        link = WorkerLink(instance, self._dispatcher)
        link.since_s = self._loop.time()
        link.counts = self._counts[instance.key.deployment].of(instance.key.instance)
        known.append(link)
        watcher = self.watchers[link] = BeatWatcher(
            name=instance.name,
            address=instance.record.beat_address,
            network=self._network,
            peer=self.peer,
            check=link.check,
            on_finding=partial(self._on_finding, link),
            ask=link.ask,
        )
        link.on_sign_of_life = watcher.note_sign_of_life
        self._tasks[link] = self._running.spawn(self._keep(link), instance.name)

    def _withdrawn(self, instance: Instance) -> None:
        for link in list(self._by_key.get(instance.key, ())):
            if link.instance == instance:
                link.withdrawn = True
                if link.data is None:
                    self._tasks[link].cancel()
                    self._forget(link)  # if its key comes back at once, it gets a new link

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
        """Connect and reconnect until the worker is withdrawn and its connection is down; the task's root."""
        backoff = Backoff(self._rng)
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
                if self._loop.time() - began_s > LAST_S:
                    backoff.reset()
                await asyncio.sleep(backoff.next_s())
        finally:
            self._forget(link)
            self._tasks.pop(link, None)

    async def _session(self, link: WorkerLink, watcher: BeatWatcher) -> None:
        """Run one data connection from connect to loss, with a new `WorkerLiveness`."""
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
            watcher.reset()
            if link.workers is not None:
                self._dispatcher.leave(link)
                log.info("%s left: %s", link.instance.name, link.reason)
            data.abort()
            if workers is not None:
                workers.sessions -= 1

    async def _serve(self, link: WorkerLink, watcher: BeatWatcher, workers: WorkerSet, data: DataConnection) -> None:
        """Wait for the first beat, join the worker to its set, and return when the data connection ends."""
        await watcher.open()
        async with beside(watcher.keep(), "beats"):
            self._join(link, workers)
            await data.closed.wait()
            link.reason = str(data.ended)

    def _join(self, link: WorkerLink, workers: WorkerSet) -> None:
        assert link.welcome is not None
        self._unread.pop(link.instance.key, None)
        older = workers.table.slots.get(link.slot.name)
        if older is not None:  # a link to the same worker, from an older record
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
            data.abort()  # ends its session

    async def _ready_text(self, link: WorkerLink, workers: WorkerSet, data: DataConnection) -> None:
        """Make the set's text side, unless it was made with another worker's artefacts."""
        async with workers.text_lock:
            if workers.text is not None:
                return
            tokenizer = await data.fetch_artefact(workers.card.tokenizer_sha256)
            try:
                workers.text = await self._prepare_text(workers.card, tokenizer)
            except ValueError as error:
                log.warning("%s is not admitted: %s", link.instance.name, error)
                self._unread[link.instance.key] = str(error)
                await self._notices.tell(link.instance.record.address, str(error))
                raise

    # -- time and verdicts

    def _tick(self) -> None:
        """Check all workers; called ten times a second."""
        now_s = self._loop.time()
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._ticks += 1
        for link, watcher in list(self.watchers.items()):
            heard, link.heard = link.heard, False
            watcher.tick(now_s, heard=heard, streams_open=bool(link.streams))
            link.counts.stream_s += (len(link.streams) - link.slot.unproven) * (now_s - self._ticked_at_s)
        self._ticked_at_s = now_s
        self.weights.tick()
        self._dispatcher.tick(now_s)
        if self._ticks % REMIND_TICKS == 0:
            self._dispatcher.remind_waiting()

    def _on_finding(self, link: WorkerLink, finding: Finding) -> None:
        """Apply a change of the worker's liveness, or move its streams because it is lost."""
        if isinstance(finding, MoveLostStreams):
            link.fail_streams(Code.RESPONSE_TIMEOUT, finding.reason, tell_worker=True)
            return
        self.verdicts[finding.after] = self.verdicts.get(finding.after, 0) + 1
        self._update_route(link)
        log.info("%s: %s -> %s: %s", link.instance.name, finding.before, finding.after, finding.reason)

    def _update_route(self, link: WorkerLink) -> None:
        if link not in self.watchers:
            return  # forgotten meanwhile
        liveness = self.watchers[link].liveness
        link.trusted, link.admit_max = liveness.routable, liveness.admit_max
        self.weights.update_share(link)
        self._dispatcher.reroute(link)


class TrafficWeights:
    """Gives each link of one frontend its share of traffic."""

    def __init__(
        self, dispatcher: Dispatcher, links: Links, verdicts: WorkerVerdicts, clock: Callable[[], float]
    ) -> None:
        self._dispatcher = dispatcher
        self._links = links
        self._verdicts = verdicts
        self._clock = clock
        self._idle: dict[str, dict[str, frozenset[str]]] = {}  # by deployment, and by what idles them: rollout or fleet
        self._under_way: set[Flight] = set()  # handed over, and no token since then

    def on_store_event(self, prefix: str, event: WatchEvent) -> None:
        """Apply an event of the store under HEALTH or CONTROLS."""
        for change in self._verdicts.on_store_event(prefix, event):
            links = self._all() if change.key is None else list(self._links.get(change.key, ()))
            for link in links:
                self.update_share(link)  # first, so that streams that leave are not sent back
                if change.ejected_for:
                    link.postponed = change.ejected_for
                    self._choose_last_resorts(link.workers)  # a spare can then take the streams at once
                    self._move(link)

    def _move(self, link: WorkerLink) -> None:
        """Move the streams of an ejected worker, if another can take them or it cannot continue them."""
        if link.share.weight > 0.0:
            link.postponed = ""  # it has recovered
            return
        workers = link.workers
        others = workers.table.routable_count - link.slot.routable if workers is not None else 0
        if not others and self._can_serve(link):
            return
        why, link.postponed = link.postponed, ""
        if link.streams:
            log.info("%s: its %d streams are moved: %s", link.instance.name, len(link.streams), why)
            link.fail_streams(Code.MOVED_BY_VERDICT, why, tell_worker=True, faulty=False)

    def set_idle(self, deployment: str, names: Collection[str], by: str = "rollout") -> None:
        """Set the replicas, by pod name, that a deployment's rollout or fleet (`by`) gives no work. `names` replaces
        the previous list."""
        idled = self._idle.setdefault(deployment, {})
        if idled.get(by, frozenset()) == frozenset(names):
            return
        idled[by] = frozenset(names)
        for link in self._all():
            self.update_share(link)

    def update_share(self, link: WorkerLink) -> None:
        """Compute the link's share of traffic and route by it."""
        key, trusted = link.instance.key, bool(link.group) or link.had_traffic
        alone = link.workers is not None and not link.workers.table.routable_count
        now_s = self._clock()
        share = self._verdicts.share(key, trusted=trusted, since_s=link.since_s, now_s=now_s, alone=alone)
        link.eligible_ignoring_rollout = share.weight > 0.0
        pod = _ENGINE.sub("", link.instance.name)
        idled_by = [by for by, names in self._idle.get(key.deployment, {}).items() if pod in names]
        if idled_by:
            share = idle_share(share, idled_by[0])
        before, link.share = link.share, share
        link.had_traffic |= share.weight > 0.0
        if share == before:
            return
        for flight in link.streams.values() if share.wrong and not before.wrong else ():
            flight.ledger.mark_inexact(MAY_BE_WRONG)
        if (share.weight, share.status) != (before.weight, before.status):
            log.info("%s: weight %g: %s", link.instance.name, share.weight, share.reason or "nothing speaks against it")
        self._dispatcher.reroute(link)

    def tick(self) -> None:
        """Admit workers that waited long enough, choose last resorts, drain workers; called every 100 ms."""
        links = self._all()
        for link in links:
            if link.share.until_s is not None:
                self.update_share(link)
        for workers in {link.workers for link in links if link.called_in or link.share.objection}:
            self._choose_last_resorts(workers)
        for link in links:
            if link.postponed:
                self._move(link)
            if link.share.drains and link.streams and not link.called_in:
                self._hand_over(link)
            if link.share.idle:
                self._send_back_begun(link)

    def _choose_last_resorts(self, workers: WorkerSet | None) -> None:
        """Let a spare serve if no other worker of the set does (control may be away, or has not noticed yet). After
        `LAST_RESORT_AFTER_S`, let the least unfit others serve: verdicts alone must not leave a set without a
        worker."""
        if workers is None:
            return
        links = [link for link in self._all() if link.workers is workers]
        called: set[WorkerLink] = set()
        if not any(link.slot.routable and not link.called_in for link in links):
            empty_s = self._clock() - workers.empty_since_s if workers.empty_since_s else 0.0
            able = [link for link in links if self._can_serve(link)]
            stay = empty_s >= LAST_RESORT_AFTER_S or any(link.called_in for link in able)
            called = last_resorts(
                ResortCandidate(link, 0.0, link.share.unfitness)
                for link in able
                if stay or link.share.unfitness == SPARE_UNFITNESS
            )
        for link in links:
            if (link in called) is not link.called_in:
                link.called_in = not link.called_in
                what = "a spare" if link.share.spare else f"without weight ({link.share.objection})"
                then = "serves, because no other does" if link.called_in else "is needed no more"
                log.info("%s: %s, %s", link.instance.name, what, then)
                self._dispatcher.reroute(link)

    def _can_serve(self, link: WorkerLink) -> bool:
        """Return whether only control's verdict keeps a worker from serving."""
        share, up = link.share, link.data is not None and link.active and link.trusted and not link.draining
        waits = share.idle or share.until_s is not None or not share.objection
        return up and not waits and share.unfitness is not None and not self._dispatcher.links.superseded(link)

    def _send_back_begun(self, link: WorkerLink) -> None:
        """Send waiting streams that began in its set to a worker that is being replaced, if no other can take them."""
        workers, eligible = link.workers, link.eligible_ignoring_rollout
        sound = eligible and link.trusted and link.active and not link.draining
        if workers is None or not sound or workers.table.routable_count or self._dispatcher.links.superseded(link):
            return
        self._dispatcher.workers_changed(workers, link.slot)

    def _hand_over(self, link: WorkerLink) -> None:
        self._under_way = {flight for flight in self._under_way if flight.first_output and not flight.ledger.ended}
        # A stream that came back (`Dispatcher.turned_away`) must make a token before it is handed over again.
        staying = [flight for flight in link.streams.values() if flight not in self._under_way]
        for flight in staying[: HANDED_OVER_AT_ONCE - len(self._under_way)]:
            if not self._dispatcher.hand_over(flight):
                return
            if flight.slot is not None:
                places = (self._dispatcher.links.place(slot) for slot in (link.slot, flight.slot))
                self._dispatcher.stats.stream_handed_over(*places, replayed=flight.ledger.mark)
            self._under_way.add(flight)

    def _all(self) -> list[WorkerLink]:
        return [link for links in self._links.values() for link in links]


class NotAdmittedNotices:
    """Tells workers that this frontend does not admit them, and why."""

    def __init__(self, network: Network, peer: str) -> None:
        self._network = network
        self._peer = peer
        self._tasks = Tasks("notices")

    def __len__(self) -> int:
        """Return how many notices are being sent."""
        return len(self._tasks)

    def not_admitted(self, change: NotAdmitted) -> None:
        """Log and tell a worker that its record or card is unreadable or invalid."""
        name = change.record.name if change.record is not None else ""
        log.warning("%s is not admitted: %s", name or f"worker {change.key.instance:x}", change.reason)
        if change.record is not None:
            self._tasks.spawn(self.tell(change.record.address, change.reason), f"to {name}")

    async def tell(self, address: str, reason: str) -> None:
        connection = WorkerConnection(self._peer)
        try:
            await self._network.connect(parse_address(address), lambda: connection, CONNECT_TIMEOUT_S)
        except (OSError, ValueError) as error:
            log.warning("cannot tell the worker at %s that it is not admitted: %s", address, error)
            return
        connection.send(connection.hello)
        connection.send(NotTaken(reason))
        connection.close()

    async def stop(self) -> None:
        await self._tasks.stop()
