"""Puts streams on workers, and puts them on others when those fail: the one place where a stream changes hands.

Every method is synchronous and leaves each flight in exactly one of three places: on a link, held by its set, or
over. Policy is in `ledger`, `holds`, `patience`, `groups` and `routing.table`; this shell sends frames and tells
consumers. A worker that is full has not failed: no attempt is counted and nobody is set aside.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from holdfast.core.errors import RESUMABLE, Code
from holdfast.health.breaker import blame
from holdfast.routing.slots import Slot
from holdfast.routing.table import Standing, request_cost
from holdfast.spec.waits import HoldSettings
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.flight import Flight, WorkerSet
from holdfast.streams.group_waits import GroupWaits
from holdfast.streams.ledger import DEATHS, Fail, after_failure, standing_of
from holdfast.streams.link import WorkerLink
from holdfast.streams.links import Links
from holdfast.streams.patience import Patience
from holdfast.streams.stats import DispatchStats, TokenGaps
from holdfast.wire.frames import FrameError
from holdfast.wire.messages import Cancel, Generate

log = logging.getLogger("holdfast.workers")

MAY_BE_WRONG = "made by a worker that failed a known-answer check, because no other could serve"


class Dispatcher:
    """Streams to workers."""

    def __init__(self, directory: ModelDirectory, settings: HoldSettings, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._settings = settings
        self.clock = clock
        self._numbers = itertools.count(1)
        self.links = Links()
        self.stats = DispatchStats()
        self._group_waits = GroupWaits(self.links, self._send)
        self._patience = Patience(settings, self.stats, clock, directory)

    # -- from the frontend

    def launch(self, flight: Flight) -> None:
        """A new stream: onto a worker; in line if its set has none that can take it; refused if too many wait."""
        # Suspects go first: else a stream of new requests would never leave them a worker to be tried alone on.
        if flight.workers.holds.suspects or not self._send(flight):
            flight.workers = self._directory.current(flight.workers)  # it may have been forgotten since it was picked
            self._hold(flight)

    def abandon(self, flight: Flight) -> None:
        """The client is gone: free everything the stream has, at once."""
        if flight.ledger.end():
            flight.workers.holds.drop(flight)
            self._leave_link(flight, tell_worker=True)

    # -- from the roster

    def join(self, link: WorkerLink, workers: WorkerSet) -> None:
        """A worker is connected; it gets work once it is active and its judge trusts it."""
        link.workers = workers
        link.gaps = self.stats.gaps.setdefault(workers.card.name, TokenGaps())
        self.links.enter(link)
        workers.enter(link.slot, deterministic=link.deterministic)
        workers.table.begins(link.slot, self.clock())
        if link.active:
            self._lead(link)

    def reroute(self, link: WorkerLink) -> None:
        """What it, its group or its judge says has changed."""
        workers = link.workers
        if workers is None or link.data is None:
            return
        routable = link.trusted and not self.links.objection(link)
        admit_max, weight = (link.admit_max, link.weight) if routable else (None, 1.0)
        workers.table.update(link.slot, routable=routable, admit_max=admit_max, weight=weight)
        (workers.last_resorts.add if link.last_resort else workers.last_resorts.discard)(link.slot)
        if routable:
            self.stats.serves(link.slot.name, link.epoch)
            self._group_waits.bring_back(link, self.clock())
        self.workers_changed(workers)

    def leave(self, link: WorkerLink) -> None:
        """Its connection is over: its streams go elsewhere."""
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
        """It says that it is active now: what waits is on its way to it when this returns."""
        self.stats.takeovers += 1
        if link.workers is None:
            return  # it is told as active when it joins
        link.workers.table.forgive(link.slot)
        link.workers.table.begins(link.slot, self.clock())
        self._lead(link)
        log.info("%s is active, epoch %d: %d streams", link.instance.name, link.epoch, len(link.streams))

    def _lead(self, link: WorkerLink) -> None:
        """Whoever led its group before is over, whether it knows it or not."""
        group = self.links.lead(link)
        for other in group:  # the new leader last: when it is routable, nobody else is
            self.reroute(other)
        for other in group:
            if why := self.links.superseded(other):
                other.fail_streams(Code.ENGINE_SHUTDOWN, why, tell_worker=True, faulty=False)

    def output_began(self, flight: Flight, cached: int) -> None:
        """The first output of an attempt has come; of so many tokens of its text the KV was there."""
        ledger, slot, now_s = flight.ledger, flight.slot, self.clock()
        if ledger.emitted == ledger.mark or slot is None:
            return  # no token in it: nothing is proved yet
        flight.first_output, flight.home = False, None
        if self.links[slot].share.wrong:
            ledger.doubt(MAY_BE_WRONG)
        computed = len(ledger.prompt) + ledger.mark - cached
        flight.workers.prefills.saw(computed, now_s - flight.sent_s)
        flight.workers.table.settle(slot, flight.standing)
        self.stats.serves(slot.name, self.links[slot].epoch)
        if flight.standing is Standing.SUSPECT or flight.workers.holds.suspects:
            self._fill(flight.workers)
        if flight.failed_at_s:
            target = self.links.place(slot)
            pause_s = flight.went_on(now_s, target.name, computed)
            self.stats.went_on(flight.failed_on[-1].place, target, pause_s)
            flight.consumer.resumed(pause_s)

    def stream_over(self, flight: Flight, *, tell_worker: bool) -> None:
        """The stream reached its end (`tell_worker`: before the engine knew it)."""
        flight.ledger.end()
        if (link := self._link_of(flight)) is not None:
            link.seen.succeeded += 1
            flight.workers.table.praise(link.slot)
        self._leave_link(flight, tell_worker=tell_worker)

    def attempt_failed(
        self, flight: Flight, code: str, message: str, *, tell_worker: bool = False, faulty: bool = True
    ) -> None:
        """The current attempt is over without the stream's end; not `faulty`: that was decided, and is not counted."""
        ledger = flight.ledger
        if ledger.ended:
            return
        link = self._link_of(flight)
        if counted := faulty and link is not None and not link.draining:
            kind = blame(code, tokens=ledger.emitted - ledger.mark, finish=None)
            link.seen.fails(kind, flight, link.streams.values(), self.clock())
        self._take_back(flight, died=code in DEATHS, tell_worker=tell_worker, counted=counted)
        verdict = after_failure(code, message, ledger.barren, ledger.deaths)
        if link is not None and code in RESUMABLE:
            seam = self.stats.seam(self.links.place(link.slot), survived=link.slot.routable)
            flight.fell(seam, link.seen.tokens, self.clock())
        if isinstance(verdict, Fail):
            if verdict.barren and self._group_waits.keep_barren(flight, link, self.clock()):
                return
            self._patience.lose(flight, verdict.code, verdict.message)
            self._fill(flight.workers)
            return
        if verdict.avoid_worker and link is not None:
            flight.workers.table.set_aside(link.slot, self.clock())
        self.stats.resumed[code] = self.stats.resumed.get(code, 0) + 1
        if not (self._group_waits.keep(flight, link, self.clock()) or self._send(flight)):
            self._hold(flight)

    def broke(self, flight: Flight, error: Exception) -> None:
        """What consumes the stream has a bug: it costs this stream, and no other."""
        flight.workers.holds.drop(flight)
        self._patience.broke(flight, error)
        self._leave_link(flight, tell_worker=True)

    def turned_away(self, flight: Flight) -> None:
        """The worker had no place for it: it never ran there, so nothing failed, and it stands where it stood."""
        slot = flight.slot
        assert slot is not None, flight
        self._leave_link(flight, tell_worker=False, drain=False)
        flight.ledger.void_attempt()
        flight.workers.table.turned_away(slot, flight.bound)
        if not (self._patience.came_back(flight) or self._send(flight) or self._send(flight, self.links.home(flight))):
            self._hold(flight)
        self._fill(flight.workers)  # by its bound: then those who wait and have none are to ask again

    def has_room(self, link: WorkerLink, places: int) -> None:
        """A worker that was full keeps places for us: what waits takes them, and what is left it may give to others."""
        if (workers := link.workers) is None:
            return
        workers.table.has_room(link.slot, places)
        self._fill(workers)
        if workers.table.passes(link.slot):
            link.leave_line()

    def workers_changed(self, workers: WorkerSet, home: Slot | None = None) -> None:
        """A worker came, went, or has room: give it what waits; to `home`, which only drains, what had begun."""
        workers.note_routable(self.clock())
        self._fill(workers, home)

    # -- time

    def tick(self, now_s: float) -> None:
        """Every 100 ms: bring back set-aside workers, let stand-ins help, end what waited too long."""
        self._directory.note_store(now_s)
        for workers in list(self._directory.sets.values()):
            if workers.table.tick(now_s):
                self.workers_changed(workers)
            workers.note_full(now_s)
            workers.note_trial(now_s)
            if not len(workers.holds):
                continue
            if self._patience.is_tired_of(workers, self._directory.fate(workers), now_s):
                self._patience.move_to_stand_ins(workers, self._directory, self._send)
            self._group_waits.release(workers, now_s)
            for held in workers.holds.overdue(now_s, self._patience.bound_s):
                self._patience.is_over(held)
            self._fill(workers)
        self._directory.forget_empty(now_s, linger_s=self._settings.hold_s)

    def remind_waiting(self) -> None:
        """Every second: held streams keep their clients' connections warm."""
        for workers in self._directory.sets.values():
            self._patience.remind(workers)
            self._fill(workers)

    def hand_over(self, flight: Flight) -> bool:
        """By plan, onto a worker that has a place; False: nobody has, or others wait for it."""
        if not flight.workers.can_move(flight):
            return False
        flight.home = flight.slot
        self._take_back(flight, died=False, tell_worker=True, counted=False)
        return self._send(flight)

    # -- the moves

    def _take_back(self, flight: Flight, *, died: bool, tell_worker: bool, counted: bool) -> None:
        """Off its worker, to be placed anew."""
        ledger = flight.ledger
        self._leave_link(flight, tell_worker=tell_worker, drain=False)
        flight.ran(self.clock())
        if counted:
            ledger.fail_attempt(died=died)
        else:
            ledger.hand_back()
        flight.standing = standing_of(ledger.resumed, ledger.deaths)

    def _send(self, flight: Flight, home: Slot | None = None) -> bool:
        """Onto a worker, or back; False: none has a place. One that no message can hold is over, and waits for none."""
        ledger, workers, limited = flight.ledger, flight.workers, flight.limited
        slot = home or workers.table.choose(ledger.prompt, flight.standing, limited=limited)
        if slot is None:
            return False
        link = self.links[slot]  # a slot is in a table only while its link is here
        flight.bound = workers.table.places_in(slot) if limited else 0
        flight.cost = request_cost(ledger.length, ledger.sampling.max_tokens - ledger.emitted)
        flight.attempt = ledger.begin_attempt()
        flight.stream = next(self._numbers)
        try:
            wait_ms = self._patience.sends(flight, self.clock())
            link.send(Generate(flight.stream, ledger.request(), flight.bound, wait_ms))
        except FrameError as error:
            workers.holds.drop(flight)
            end = self._patience.refuse if flight.attempt == 1 else self._patience.lose
            end(flight, Code.INVALID_REQUEST, f"{ledger.length} tokens are too long to send: {error}")
            return True
        flight.slot, flight.sent_s, flight.first_output = slot, self.clock(), True
        workers.table.take(slot, flight.cost, ledger.prompt, flight.standing)
        workers.note_trial(flight.sent_s)
        link.streams[flight.stream] = flight
        return True

    def _fill(self, workers: WorkerSet, home: Slot | None = None) -> None:
        """What waits takes the places that are free; who has no place now holds up those behind it."""
        while len(workers.holds) and (held := workers.holds.first()) is not None:
            if (home and held.item.standing is not Standing.RESUMED) or not self._send(held.item, home):
                return
            workers.holds.drop(held.item)
            workers.pace.came_free(self.clock(), workers.full_since_s)

    def _hold(self, flight: Flight) -> None:
        """Stand in line; where too many new requests do, one who does not stay there hears so."""
        leaves = flight.workers.holds.hold(flight, flight.tier, flight.waits(self.clock()), flight.standing)
        if leaves is not None:
            self._patience.line_is_full(leaves, waited=leaves is not flight)

    def _link_of(self, flight: Flight) -> WorkerLink | None:
        return self.links[flight.slot] if flight.slot is not None else None

    def _leave_link(self, flight: Flight, *, tell_worker: bool, drain: bool = True) -> None:
        if (link := self._link_of(flight)) is not None:
            flight.slot = None
            del link.streams[flight.stream]
            if flight.first_output:
                flight.first_output = False
                flight.workers.table.settle(link.slot, flight.standing)
            flight.workers.table.give_back(link.slot, flight.cost)
            if tell_worker:
                link.send(Cancel([flight.stream]))
        if drain:  # also where it was on no worker: who was held may have held others up
            self._fill(flight.workers)
