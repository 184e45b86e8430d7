"""One model's requests and the replicas that take them: who waits where, and who is given what. Pure.

Theory. Requests stand in one bounded line by tier and arrival (`routing.tiers`); those that a replica had and lost
stand before all others, where they stood, and need no place in it. A replica takes part by its *seat*: a lease, until
when it is believed to be well, and credit, how many requests it may have at once. Work is given, never pulled, to
whoever has least to do or knows the prefix (`routing.table`), and only while its lease is fresh and it has credit.

A replica that fails a request loses its seat at once: else it would be free soonest and so get every request next, a
black hole (facts 20). It gets another only by a lease of a later *term*, which whoever checks replicas gives.

Always true: a request is in the line, on one replica, or over; a replica never has more than its credit; nobody waits
while a replica with a fresh lease has credit left, once `dispatch` was called; whoever is taken away hands on all that
it had, and the first replica that is ready serves at once, whoever else is still coming.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.core.tiers import TIER_DEFAULT, Tier
from holdfast.routing.slots import Slot
from holdfast.routing.table import RouteTable, Standing, request_cost
from holdfast.routing.tiers import TierLine


class State(StrEnum):
    """Of a request, as its user sees it."""

    PROVISIONING = "PROVISIONING"  # it waits, and no replica serves yet
    QUEUED = "QUEUED"  # it waits for a place
    DISPATCHED = "DISPATCHED"  # a replica has it
    RUNNING = "RUNNING"  # and has made a token


@dataclass(slots=True)
class Request:
    """One that waits or runs."""

    id: str
    tier: Tier
    since_s: float
    tokens: list[int] = field(default_factory=list)
    cost: int = 0
    seat: Seat | None = None
    began: bool = False  # it made a token where it is


@dataclass(slots=True)
class Seat:
    """A replica's right to be given work."""

    replica: str
    slot: Slot
    term: int
    until_s: float
    lost: bool = False  # it failed a request of this term
    requests: dict[str, Request] = field(default_factory=dict)

    def is_fresh(self, now_s: float) -> bool:
        return not self.lost and now_s < self.until_s


@dataclass(frozen=True, slots=True)
class Given:
    """A request for a replica."""

    request: str
    replica: str


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What a user is told of a request: `place` in the line from 1, 0 where it does not wait."""

    state: State
    place: int = 0
    replica: str = ""


class Line:
    """One model's."""

    def __init__(self, waiting_max: int, rng: random.Random) -> None:
        self._fresh: TierLine[str] = TierLine(waiting_max)
        self._again: TierLine[str] = TierLine(None)  # were bounded when they came
        self._table = RouteTable(rng)
        self._numbers = itertools.count(1)
        self._requests: dict[str, Request] = {}
        self._seats: dict[str, Seat] = {}
        self._by_slot: dict[int, Seat] = {}
        self._ends: list[tuple[float, str]] = []  # of leases, and perhaps of some that were renewed

    def __repr__(self) -> str:
        return f"<Line {self.waiting} wait, {len(self._requests) - self.waiting} are on {len(self._seats)} replicas>"

    @property
    def waiting(self) -> int:
        return len(self._fresh) + len(self._again)

    def first_since_s(self) -> float | None:
        """When the one who waits for longest came; None: nobody waits."""
        return min((one.since_s for line in (self._again, self._fresh) for one in line), default=None)

    # -- requests

    def join(
        self, request: str, now_s: float, tier: Tier = TIER_DEFAULT, tokens: list[int] | None = None, output: int = 0
    ) -> str | None:
        """Let it wait. Whoever has no place any more is returned: itself, or one that stood last, and is over."""
        assert request not in self._requests, "one asks once"
        tokens = tokens or []
        self._requests[request] = Request(request, tier, now_s, tokens, request_cost(len(tokens), output))
        refused = self._fresh.join(request, tier, now_s)
        if refused is not None:
            del self._requests[refused]
        return refused

    def began(self, request: str) -> None:
        """It made its first token where it is."""
        one = self._requests[request]
        assert one.seat is not None, one
        if not one.began:
            one.began = True
            self._table.settle(one.seat.slot, Standing.FRESH)

    def ended(self, request: str) -> None:
        """It has its answer, or its client left."""
        one = self._requests.pop(request, None)
        if one is not None:
            self._leave_seat(one)
            self._fresh.leave(request)
            self._again.leave(request)

    def failed(self, request: str, now_s: float) -> None:
        """Its replica failed it: it waits again, and that replica is given nothing more in this term."""
        one = self._requests[request]
        assert one.seat is not None, one
        one.seat.lost = True
        self._update(one.seat, now_s)
        self._hand_on(one)

    # -- replicas

    def lease(self, replica: str, *, term: int, until_s: float, credit: int, now_s: float) -> None:
        """A replica is well until then, and may have so many requests at once. A term that is over, or was lost, is not
        renewed."""
        seat = self._seats.get(replica)
        if seat is None:
            slot = Slot(next(self._numbers), credit)
            seat = self._seats[replica] = self._by_slot[slot.name] = Seat(replica, slot, term, until_s)
            self._table.add(slot)
        elif term < seat.term:
            return
        seat.lost = seat.lost and term == seat.term
        seat.term, seat.until_s, seat.slot.capacity = term, until_s, credit
        heapq.heappush(self._ends, (until_s, replica))
        self._update(seat, now_s)

    def remove(self, replica: str) -> list[str]:
        """It leaves, or is gone: whatever it had waits again, and is returned."""
        seat = self._seats.pop(replica, None)
        if seat is None:
            return []
        del self._by_slot[seat.slot.name]
        self._table.remove(seat.slot)
        theirs = list(seat.requests.values())
        for one in theirs:
            self._hand_on(one)
        return [one.id for one in theirs]

    def dispatch(self, now_s: float) -> list[Given]:
        """Give those who stand first to whoever may have them."""
        while self._ends and self._ends[0][0] <= now_s:
            seat = self._seats.get(heapq.heappop(self._ends)[1])
            if seat is not None:
                self._update(seat, now_s)
        given = []
        while (first := self._again.first() or self._fresh.first()) is not None:
            one = self._requests[first.item]
            slot = self._table.choose(one.tokens)
            if slot is None:
                break
            seat = self._by_slot[slot.name]
            assert seat.is_fresh(now_s), seat
            self._fresh.leave(one.id)
            self._again.leave(one.id)
            one.seat, seat.requests[one.id] = seat, one
            self._table.take(slot, one.cost, one.tokens)
            given.append(Given(one.id, seat.replica))
        return given

    # -- what people are told

    def whereabouts(self, request: str, now_s: float) -> Whereabouts | None:
        """Of one request; None: it is not here, or is over."""
        one = self._requests.get(request)
        if one is None:
            return None
        if one.seat is not None:
            return Whereabouts(State.RUNNING if one.began else State.DISPATCHED, 0, one.seat.replica)
        return self.waiters(now_s)[request]

    def waiters(self, now_s: float) -> dict[str, Whereabouts]:
        """All who wait, in order."""
        serves = any(seat.is_fresh(now_s) for seat in self._seats.values())
        state = State.QUEUED if serves else State.PROVISIONING
        order = itertools.chain(self._again, self._fresh)
        return {one.item: Whereabouts(state, place) for place, one in enumerate(order, 1)}

    # -- the moves

    def _update(self, seat: Seat, now_s: float) -> None:
        self._table.update(seat.slot, routable=seat.is_fresh(now_s))

    def _hand_on(self, one: Request) -> None:
        self._leave_seat(one)
        self._again.join(one.id, one.tier, one.since_s)

    def _leave_seat(self, one: Request) -> None:
        seat, one.seat = one.seat, None
        if seat is not None:
            del seat.requests[one.id]
            if not one.began:
                self._table.settle(seat.slot, Standing.FRESH)
            one.began = False
            self._table.give_back(seat.slot, one.cost)
