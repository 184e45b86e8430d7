"""Sends streams to workers, and to other workers when those fail. Only this module moves a stream.

Every method of `Dispatcher` is synchronous and leaves each flight in exactly one of three states: on a link, held by
its set, or ended. The dispatcher sends the frames and calls the consumers. Other modules decide:
- `ledger`: resume the stream or end it
- `hold_policy`: how long a stream may wait
- `takeovers`: how long it waits for a standby
- `routing.table`: which worker it gets

A full worker has not failed: no attempt is counted and the worker stays in the route table.

`GroupWaits` decides where a stream continues when its engine is gone: at the standby of the engine's group, which has
the stream's KV, or at any worker. The set holds streams that wait for a standby apart from those that wait for any
worker. Such a wait ends when an engine of the group takes work, when its time is over, or when the group has no standby
left. If the group's next engine also fails before the stream got a token, the stream goes to any worker. Streams that
may have killed their engine (`PriorityClass.ON_TRIAL`) do not wait: they are tried alone.

`Links` holds the workers that joined a set. A slot is in a route table only while its link is in `Links`. At most one
link of a group gets work.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from holdfast.core.errors import RESUMABLE, Code, read_failure
from holdfast.health.breaker import classify_failure
from holdfast.routing.table import PriorityClass, RouteSlot, request_cost
from holdfast.spec.waits import HoldSettings
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.flight import AwaitedGroup, Flight, WorkerSet
from holdfast.streams.hold_policy import HoldPolicy
from holdfast.streams.ledger import DEATHS, EndStream, after_failure, priority_of
from holdfast.streams.link import WorkerLink
from holdfast.streams.stats import DispatchStats, StreamPlace, TokenGaps
from holdfast.streams.takeovers import LeaderEpochs, Takeovers, standby_wait_s
from holdfast.wire.frames import FrameError
from holdfast.wire.messages import Cancel, Generate

# Between two attempts of a stream on an engine that makes no token for any stream. Control needs three checks, about
# 10 seconds, to detect such an engine.
STALLED_RETRY_S = 2.0
log = logging.getLogger("holdfast.workers")
MAY_BE_WRONG = "made by a worker that failed a known-answer check, because no other could serve"


class Dispatcher:
    """Sends streams to workers."""

    def __init__(self, directory: ModelDirectory, settings: HoldSettings, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._settings = settings
        self.clock = clock
        self._numbers = itertools.count(1)
        self.links = Links()
        self.stats = DispatchStats()
        self._group_waits = GroupWaits(self.links, self._send)
        self._hold_policy = HoldPolicy(settings, self.stats, clock, directory)

    # -- from the frontend

    def launch(self, flight: Flight) -> None:
        """Send a new stream to a worker. Queue it if no worker of its set has a place; refuse it if the queue is
        full."""
        # Suspects go first: otherwise new requests would keep every worker busy, and no suspect could be tried alone.
        if flight.workers.holds.suspects or not self._send(flight):
            flight.workers = self._directory.current(flight.workers)  # it may have been forgotten since it was picked
            self._hold(flight)

    def abandon(self, flight: Flight) -> None:
        """End a stream because its client is gone, and free its resources at once."""
        if flight.ledger.end():
            flight.workers.holds.drop(flight)
            self._leave_link(flight, tell_worker=True)

    # -- from the roster

    def join(self, link: WorkerLink, workers: WorkerSet) -> None:
        """Add a connected worker to its set; it gets work once it is active and its liveness allows it (`trusted`)."""
        link.workers = workers
        link.gaps = self.stats.gaps.setdefault(workers.card.name, TokenGaps())
        self.links.enter(link)
        workers.enter(link.slot, deterministic=link.deterministic)
        workers.table.mark_young(link.slot, self.clock())
        if link.active:
            self._lead(link)

    def reroute(self, link: WorkerLink) -> None:
        """Update the worker's route after its own state, its group's leader or its liveness changed."""
        workers = link.workers
        if workers is None or link.data is None:
            return
        routable = link.trusted and not self.links.objection(link)
        admit_max, weight = (link.admit_max, link.weight) if routable else (None, 1.0)
        workers.table.update(link.slot, routable=routable, admit_max=admit_max, weight=weight)
        (workers.last_resorts.add if link.last_resort else workers.last_resorts.discard)(link.slot)
        if routable:
            self.stats.worker_serves(link.slot.name, link.epoch)
            self._group_waits.send_waiting(link, self.clock())
        self.workers_changed(workers)

    def leave(self, link: WorkerLink) -> None:
        """Remove a worker whose connection ended, and resume its streams elsewhere."""
        workers = link.workers
        assert workers is not None, link
        link.stop_routing()
        link.fail_streams(Code.DISCONNECTED, "the worker's connection ended", tell_worker=False)
        workers.leave(link.slot, deterministic=link.deterministic)
        self.links.leave(link)
        link.workers, link.trusted = None, False
        self.workers_changed(workers)

    # -- from the links

    def took_over(self, link: WorkerLink) -> None:
        """Make a standby that became active the leader; the streams that wait for it are sent before this returns."""
        self.stats.takeovers += 1
        if link.workers is None:
            return  # `join` makes it the leader
        link.workers.table.clear_faults(link.slot)
        link.workers.table.mark_young(link.slot, self.clock())
        self._lead(link)
        log.info("%s is active, epoch %d: %d streams", link.instance.name, link.epoch, len(link.streams))

    def _lead(self, link: WorkerLink) -> None:
        """Make a worker the leader of its group: the previous leader gets no more work, whether it knows it or not."""
        group = self.links.note_leader(link)
        for other in group:  # the new leader last: when it is routable, no other is
            self.reroute(other)
        for other in group:
            if why := self.links.superseded(other):
                other.fail_streams(Code.ENGINE_SHUTDOWN, why, tell_worker=True, faulty=False)

    def output_began(self, flight: Flight, cached: int) -> None:
        """Note the first output of an attempt; the worker had the KV of `cached` tokens of the stream's text."""
        ledger, slot, now_s = flight.ledger, flight.slot, self.clock()
        if ledger.emitted == ledger.mark or slot is None:
            return  # an output without a token proves nothing
        flight.first_output, flight.handed_over_by = False, None
        if self.links[slot].share.wrong:
            ledger.mark_inexact(MAY_BE_WRONG)
        computed = len(ledger.prompt) + ledger.mark - cached
        flight.workers.prefills.add(computed, now_s - flight.sent_at_s)
        flight.workers.table.mark_proven(slot, flight.priority)
        self.stats.worker_serves(slot.name, self.links[slot].epoch)
        if flight.priority is PriorityClass.ON_TRIAL or flight.workers.holds.suspects:
            self._fill(flight.workers)
        if flight.failed_at_s:
            target = self.links.place(slot)
            pause_s = flight.note_resumed(now_s, target.name, computed)
            self.stats.stream_resumed(flight.failed_on[-1].place, target, pause_s)
            flight.consumer.resumed(pause_s)

    def stream_over(self, flight: Flight, *, tell_worker: bool) -> None:
        """Close a stream that reached its end (`tell_worker`: the engine does not know it yet)."""
        flight.ledger.end()
        if (link := self._link_of(flight)) is not None:
            link.counts.succeeded += 1
            flight.workers.table.forget_failures(link.slot)
        self._leave_link(flight, tell_worker=tell_worker)

    def attempt_failed(
        self, flight: Flight, code: str, message: str, *, tell_worker: bool = False, faulty: bool = True
    ) -> None:
        """Resume or end a stream whose current attempt failed. Not `faulty`: the attempt was stopped by decision, and
        is not counted as a failure."""
        ledger = flight.ledger
        if ledger.ended:
            return
        code, message = read_failure(code, message)
        link = self._link_of(flight)
        if counted := faulty and link is not None and not link.draining:
            kind = classify_failure(code, tokens=ledger.emitted - ledger.mark, finish=None)
            link.counts.count_failure(kind, flight, link.streams.values(), self.clock())
        self._take_back(flight, died=code in DEATHS, tell_worker=tell_worker, counted=counted)
        verdict = after_failure(code, message, ledger.empty_attempts, ledger.deaths)
        if link is not None and code in RESUMABLE:
            failure = self.stats.failure_at(self.links.place(link.slot), survived=link.slot.routable)
            flight.note_failure(failure, link.counts.tokens, self.clock())
        if isinstance(verdict, EndStream):
            if verdict.no_token and self._group_waits.hold_for_standby_of_stalled(flight, link, self.clock()):
                return
            self._hold_policy.lose(flight, verdict.code, verdict.message)
            self._fill(flight.workers)
            return
        if link is not None:
            flight.workers.table.set_aside(link.slot, self.clock())
        self.stats.resumed[code] = self.stats.resumed.get(code, 0) + 1
        if not (self._group_waits.send_or_hold(flight, link, self.clock()) or self._send(flight)):
            self._hold(flight)

    def consumer_raised(self, flight: Flight, error: Exception) -> None:
        """End a stream because its consumer raised (a bug); other streams continue."""
        flight.workers.holds.drop(flight)
        self._hold_policy.consumer_raised(flight, error)
        self._leave_link(flight, tell_worker=True)

    def turned_away(self, flight: Flight) -> None:
        """Send a stream elsewhere, or queue it again, because its worker was full. It never ran there: no failure is
        counted, and it keeps its position in the queue."""
        slot = flight.slot
        assert slot is not None, flight
        self._leave_link(flight, tell_worker=False, drain=False)
        flight.ledger.void_attempt()
        if not flight.ledger.resumed:
            flight.dispatched_at_s = 0.0
        flight.workers.table.turned_away(slot, flight.bound)
        refused = self._hold_policy.refuse_if_overdue(flight)
        if not (refused or self._send(flight) or self._send(flight, self.links.way_back(flight))):
            self._hold(flight)
        self._fill(flight.workers)  # by its bound: waiting streams without a bound may fit

    def has_room(self, link: WorkerLink, places: int) -> None:
        """Fill the places that a formerly full worker reserved for this frontend, and release those not needed."""
        if (workers := link.workers) is None:
            return
        workers.table.has_room(link.slot, places)
        self._fill(workers)
        if workers.table.give_up_reservations(link.slot):
            link.give_up_reservations()

    def workers_changed(self, workers: WorkerSet, target: RouteSlot | None = None) -> None:
        """Send waiting streams after a worker came, went or got room. `target`: a draining worker, which gets only
        resumed streams."""
        workers.note_routable(self.clock())
        self._fill(workers, target)

    # -- time

    def tick(self, now_s: float) -> None:
        """Readmit avoided workers, move streams to stand-ins, end overdue waits; called every 100 ms."""
        self._directory.note_store(now_s)
        for workers in list(self._directory.sets.values()):
            if workers.table.tick(now_s):
                self.workers_changed(workers)
            workers.note_full(now_s)
            workers.note_trial(now_s)
            if not len(workers.holds):
                continue
            if self._hold_policy.needs_stand_ins(workers, self._directory.status_of(workers), now_s):
                self._hold_policy.move_to_stand_ins(workers, self._directory, self._send)
            self._group_waits.release(workers, now_s)
            for held in workers.holds.overdue(now_s, self._hold_policy.wait_s_max):
                self._hold_policy.end_wait(held)
            self._fill(workers)
        self._directory.forget_empty(now_s, linger_s=self._settings.hold_s)

    def remind_waiting(self) -> None:
        """Tell the clients of held streams that they wait, which keeps their connections open; called every second."""
        for workers in self._directory.sets.values():
            self._hold_policy.remind(workers)
            self._fill(workers)

    def hand_over(self, flight: Flight) -> bool:
        """Move a stream off a draining worker; return False if no other worker has a place or if waiting streams need
        that place."""
        if not flight.workers.can_move(flight):
            return False
        flight.handed_over_by = flight.slot
        self._take_back(flight, died=False, tell_worker=True, counted=False)
        return self._send(flight)

    # -- the moves

    def _take_back(self, flight: Flight, *, died: bool, tell_worker: bool, counted: bool) -> None:
        """Take a stream off its worker; the caller places it again."""
        ledger = flight.ledger
        self._leave_link(flight, tell_worker=tell_worker, drain=False)
        flight.waits_since_s += self.clock() - flight.sent_at_s  # time on a worker does not count as waiting
        if counted:
            ledger.fail_attempt(died=died)
        else:
            ledger.hand_back()
        flight.priority = priority_of(ledger.resumed, ledger.deaths)

    def _send(self, flight: Flight, target: RouteSlot | None = None) -> bool:
        """Send a stream to `target`, or to a worker that the table picks; return False if no worker has a place. A
        stream too long for a frame is ended; the result is True."""
        ledger, workers, limited = flight.ledger, flight.workers, flight.limited
        slot = target or workers.table.choose(ledger.prompt, flight.priority, limited=limited)
        if slot is None:
            return False
        link = self.links[slot]  # a slot is in a table only while its link is here
        flight.bound = workers.table.places_in(slot) if limited else 0
        flight.cost = request_cost(ledger.length, ledger.sampling.max_tokens - ledger.emitted)
        flight.attempt = ledger.begin_attempt()
        flight.stream = next(self._numbers)
        try:
            wait_ms = self._hold_policy.engine_wait_ms(flight, self.clock())
            link.send(Generate(flight.stream, ledger.request(), flight.bound, wait_ms))
        except FrameError as error:
            workers.holds.drop(flight)
            end = self._hold_policy.refuse if flight.attempt == 1 else self._hold_policy.lose
            end(flight, Code.INVALID_REQUEST, f"{ledger.length} tokens are too long to send: {error}")
            return True
        flight.slot, flight.sent_at_s, flight.first_output = slot, self.clock(), True
        workers.table.assign(slot, flight.cost, ledger.prompt, flight.priority)
        workers.note_trial(flight.sent_at_s)
        link.streams[flight.stream] = flight
        self._note_dispatched(flight, link)
        return True

    def _note_dispatched(self, flight: Flight, link: WorkerLink) -> None:
        flight.dispatched_at_s = flight.dispatched_at_s or flight.sent_at_s
        name = flight.workers.card.name
        self.stats.dispatched[name] = self.stats.dispatched.get(name, 0) + 1
        if not self._hold_policy.tell_dispatched(flight, link.instance.name):
            flight.workers.holds.drop(flight)
            self._leave_link(flight, tell_worker=True)

    def _fill(self, workers: WorkerSet, target: RouteSlot | None = None) -> None:
        """Send waiting streams to free places; the first that finds none blocks those behind it."""
        while len(workers.holds) and (held := workers.holds.first()) is not None:
            if (target and held.item.priority is not PriorityClass.RESUMED) or not self._send(held.item, target):
                return
            workers.holds.drop(held.item)
            workers.pace.came_free(self.clock(), workers.full_since_s)

    def _hold(self, flight: Flight) -> None:
        """Queue the stream; if the queue is full, reject the lowest-priority waiter."""
        leaves = flight.workers.holds.hold(flight, flight.tier, flight.begin_wait(self.clock()), flight.priority)
        if leaves is not None:
            self._hold_policy.on_queue_full(leaves, waited=leaves is not flight)

    def _link_of(self, flight: Flight) -> WorkerLink | None:
        return self.links[flight.slot] if flight.slot is not None else None

    def _leave_link(self, flight: Flight, *, tell_worker: bool, drain: bool = True) -> None:
        if (link := self._link_of(flight)) is not None:
            flight.slot = None
            del link.streams[flight.stream]
            if flight.first_output:
                flight.first_output = False
                flight.workers.table.mark_proven(link.slot, flight.priority)
            flight.workers.table.give_back(link.slot, flight.cost)
            if tell_worker:
                link.send(Cancel([flight.stream]))
        if drain:  # also if the stream was on no worker: in the queue it may have blocked others
            self._fill(flight.workers)


class GroupWaits:
    """The waits of one frontend's streams for standbys. `send` sends a stream to a given worker; False: it could
    not."""

    def __init__(self, links: Links, send: Callable[[Flight, RouteSlot], bool]) -> None:
        self._links = links
        self._send = send
        self._takeovers = Takeovers()

    def send_or_hold(self, flight: Flight, link: WorkerLink | None, now_s: float) -> bool:
        """Send a stream that failed on `link` to the group's current leader, or hold it for the group's standby.
        Return False if neither applies and the stream may go to any worker."""
        if link is None or not link.group or flight.priority is not PriorityClass.RESUMED or len(flight.failed_on) != 1:
            return False
        workers, leader = flight.workers, self._links.leader(link.claim.key)
        if leader is not None:
            return leader is not link and workers.table.is_ready(leader.slot) and self._send(flight, leader.slot)
        if not (link.gone and self._links.has_standby(link.claim.key)):
            return False
        outage = self._takeovers.leader_lost(link.claim, now_s, lambda: _tokens_on(link) + flight.ledger.length)
        others = max(1, workers.table.routable_count)
        prefill_s = workers.prefills.estimate_s(outage.tokens / others)
        wait_s = standby_wait_s(self._takeovers.expected_s, self._takeovers.bound_s, prefill_s)
        if now_s >= outage.since_s + wait_s:
            return False
        flight.awaits = AwaitedGroup(link.claim.key, outage.since_s + wait_s)
        workers.holds.hold_for_group(flight, flight.tier, flight.begin_wait(now_s))
        return True

    def hold_for_standby_of_stalled(self, flight: Flight, link: WorkerLink | None, now_s: float) -> bool:
        """Hold a stream whose engine has made no token for any stream since it failed: the engine is to blame, and its
        standby will take over. Meanwhile the stream tries the engine again. Return False if the request may be to
        blame."""
        if link is None or not link.group or len(flight.failed_on) != 1 or link.counts.tokens > flight.worker_tokens:
            return False
        if not self._links.has_standby(link.claim.key):
            return False
        flight.awaits = AwaitedGroup(link.claim.key, now_s + STALLED_RETRY_S)
        flight.workers.holds.hold_for_group(flight, flight.tier, flight.begin_wait(now_s))
        return True

    def send_waiting(self, link: WorkerLink, now_s: float) -> None:
        """Send the streams that waited for the group of `link`, which takes work now, in queue order."""
        workers, group = link.workers, link.claim.key
        if workers is None or not link.group:
            return
        self._takeovers.leader_found(group, now_s)
        for held in workers.holds.held_for_group():
            flight = held.item
            if flight.awaits is None or flight.awaits.group != group:
                continue
            if workers.table.is_ready(link.slot) and self._send(flight, link.slot):
                workers.holds.drop(flight)
            else:
                workers.holds.release_to_queue(flight, flight.priority)

    def release(self, workers: WorkerSet, now_s: float) -> None:
        """Release streams to any worker when their wait is over or their group has no standby left."""
        for held in workers.holds.held_for_group():
            awaits = held.item.awaits
            if awaits is None or now_s >= awaits.until_s or not self._links.has_standby(awaits.group):
                workers.holds.release_to_queue(held.item, held.item.priority)


def _tokens_on(link: WorkerLink) -> int:
    return sum(flight.ledger.length for flight in link.streams.values())


class Links:
    """Workers by slot, and by the group in which they take over from each other."""

    def __init__(self) -> None:
        self._by_slot: dict[RouteSlot, WorkerLink] = {}
        self._by_group: dict[tuple[str, str], list[WorkerLink]] = {}
        self._epochs = LeaderEpochs()

    def enter(self, link: WorkerLink) -> None:
        self._by_slot[link.slot] = link
        if link.group:
            self._by_group.setdefault(link.claim.key, []).append(link)

    def leave(self, link: WorkerLink) -> None:
        del self._by_slot[link.slot]
        if link.group:
            group = self._by_group[link.claim.key]
            group.remove(link)
            if not group:
                del self._by_group[link.claim.key]

    def __getitem__(self, slot: RouteSlot) -> WorkerLink:
        return self._by_slot[slot]

    def way_back(self, flight: Flight) -> RouteSlot | None:
        """Return the draining worker that handed the stream over, if the stream can go back to it. It must if the
        receiving worker turned out to be full. A stream goes back at most once."""
        slot, flight.handed_over_by = flight.handed_over_by, None
        link = self._by_slot.get(slot) if slot is not None else None
        if link is None or link.workers is not flight.workers or link.data is None or not link.trusted:
            return None
        if not (link.active and link.share.drains) or link.draining or link.slot.trial:
            return None
        return None if flight.priority is PriorityClass.ON_TRIAL else slot

    def place(self, slot: RouteSlot) -> StreamPlace:
        """Return the worker's identity for statistics of moved streams."""
        link = self._by_slot[slot]
        group = link.group or link.instance.name
        return StreamPlace(slot.name, link.epoch, group, link.instance.name, link.share.ejections, link.share.wrong)

    def leader(self, group: tuple[str, str]) -> WorkerLink | None:
        """Return the engine of a group that takes work, if one does."""
        return next((link for link in self._by_group.get(group, ()) if link.slot.routable), None)

    def has_standby(self, group: tuple[str, str]) -> bool:
        """Return whether an engine of a group stands by, connected and sound, to take over."""
        return any(link.stands_by for link in self._by_group.get(group, ()))

    def note_leader(self, link: WorkerLink) -> list[WorkerLink]:
        """Note that a worker claims to lead; return all links of its group, the worker's own last."""
        if not self._epochs.note(link.claim):
            log.warning("%s is not taken as active: %s", link.instance.name, self.objection(link))
        return [*(other for other in self._by_group.get(link.claim.key, ()) if other is not link), link]

    def superseded(self, link: WorkerLink) -> str:
        """Return why a worker that says it is active does not lead its group; "" if it may lead."""
        return self._epochs.objection(link.claim) if link.active else ""

    def objection(self, link: WorkerLink) -> str:
        """Return why a connected worker gets no work, apart from its liveness; "" if there is no reason."""
        return self.own_objection(link) or link.objection

    def own_objection(self, link: WorkerLink) -> str:
        """Return the same without control's verdict: only its own state, its group's leader and a rollout count."""
        if not link.active:
            return "standing by"
        if link.draining:
            return link.reason
        return self.superseded(link) or (link.share.reason if link.share.idle else "")
