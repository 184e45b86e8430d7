"""A stream in flight, the set of workers it belongs to, and the queue in which the set's streams wait.

`Flight`, `WorkerSet`: a request stays with its set. Two checksums never share a set (facts 19), so a stream is never
replayed onto other weights without being flagged.

`HoldQueue` (pure): resumed streams first, then suspects, then new ones; within each, higher tiers first. Streams that
wait for one group's next leader are held apart: they block no other stream, and `first` does not return them. Always
true:
- The queue never refuses a stream that ran before.
- New streams have `fresh_max` places, which the first in line keep (`routing.tiers`).
- Every held stream leaves by being sent, cancelled, pushed out or overdue.
- A stream that a full worker turned away returns to its old position.

`queue_positions`, `state_of`: the queue position and the state of a request. Always true: a request's state is derived
from its streams and stored nowhere; the stream that got furthest decides; a position counts requests, not streams, from
1.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

from holdfast.core.errors import Code
from holdfast.core.requests import Output
from holdfast.core.tiers import Tier
from holdfast.discovery.card import ModelCard
from holdfast.discovery.keys import deployment_of
from holdfast.routing.table import PriorityClass, RouteSlot, RouteTable
from holdfast.routing.tiers import QueueEntry, TierQueue
from holdfast.streams.ledger import Ledger, priority_of
from holdfast.streams.stats import WorkerFailure
from holdfast.streams.takeovers import Prefills


class RequestState(StrEnum):
    """Where a request is."""

    QUEUED = "QUEUED"  # it waits for a place, behind others or alone
    PROVISIONING = "PROVISIONING"  # no worker of its model serves
    HELD = "HELD"  # workers of its model are up, none serves, and no other is expected
    DISPATCHED = "DISPATCHED"  # it is on a worker and has no token yet
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"  # its client left, or it was ended on request


WAITS = (RequestState.QUEUED, RequestState.PROVISIONING, RequestState.HELD)


class WaitStatus(NamedTuple):
    """How a request waits."""

    state: RequestState  # one of `WAITS`
    place: int
    since_s: float
    wanted: bool  # its model is started on request, which may take minutes
    why: str = ""  # the fleet's reason why its model has no worker yet


Stream = TypeVar("Stream", bound=Hashable)
# Clients obey this hint: retries within a second would be a burden, and after half a minute a client gives up.
RETRY_AFTER_S_MIN = 1.0
RETRY_AFTER_S_MAX = 30.0
# How much one gap counts against those before it: about the last ten matter.
WEIGHT = 0.1
_ages = itertools.count()


class Consumer(Protocol):
    """Takes a stream's tokens; the frontend's text side. Only the link uses `dirty`: it is set between
    `on_output` and `flush`."""

    dirty: bool

    @property
    def request(self) -> object:
        """Return the request it belongs to; all streams of a request count as one in the queue."""

    @property
    def answering(self) -> bool:
        """Return whether its client got, or must get, part of this answer: it can no longer be asked to retry."""

    def on_output(self, output: Output) -> bool:
        """Take tokens already in the ledger; return True if the consumer found the end itself (a stop string)."""

    def flush(self) -> None:
        """Send what `on_output` gathered to the client; called once per received batch."""

    def failed(self, code: Code, message: str, retry_after_s: float | None) -> None:
        """End the answer with an error: the stream failed."""

    def still_waiting(self, waiting: WaitStatus) -> None:
        """Tell the client how its stream waits; called every second while it is held."""

    def dispatched(self, worker: str) -> None:
        """Note that the stream was sent to a worker of this name; called for every attempt."""

    def resumed(self, pause_s: float) -> None:
        """Note that the stream resumed after a pause of `pause_s`; called before the first token after it is taken."""


class Excusable(Protocol):
    """Counts a worker's failures (`observations.WorkerCounts`)."""

    excused: int


@dataclass(frozen=True, slots=True)
class AwaitedGroup:
    """The group whose next leader a stream waits for, and the end of that wait."""

    group: tuple[str, str]
    until_s: float


@dataclass(slots=True, eq=False, repr=False)
class Flight:
    """A stream from admission to its end."""

    ledger: Ledger
    workers: WorkerSet
    consumer: Consumer
    age: int = field(default_factory=_ages.__next__)  # smaller: requested earlier
    slot: RouteSlot | None = None  # the worker that it runs on
    awaits: AwaitedGroup | None = None  # the group it waits for, or waited for last
    handed_over_by: RouteSlot | None = None  # the draining worker it left, until it has a token elsewhere
    stream: int = 0  # its number on that worker, new for every attempt
    attempt: int = 0
    cost: int = 0
    bound: int = 0  # limit on the worker's streams that was sent with it; 0: none
    first_output: bool = False  # the current attempt has yet to make a token
    priority: PriorityClass = PriorityClass.FRESH  # with which it was placed or queued
    failed_at_s: float = 0.0  # when it first failed since its last token; 0 once it has resumed
    failed_on: tuple[WorkerFailure, ...] = ()  # the failures since then
    worker_tokens: int = 0  # made for all streams by the first failed worker, at the time of that failure
    blamed: Excusable | None = None  # the worker that its last failure was counted against
    excused: bool = False  # that count was taken back, because the stream failed elsewhere too
    last_token_at_s: float = 0.0  # when its last token came, 0 before any
    sent_at_s: float = 0.0  # when its current attempt began
    dispatched_at_s: float = 0.0  # when it was first sent to a worker that took it, 0 before
    place_since_s: float = 0.0  # when it began to wait for a free place, here or in an engine's queue; 0: it did not
    place_until_s: float = 0.0  # until when its worker keeps it queued; 0: without a bound
    waits_since_s: float = 0.0  # when it first had no place, plus the time it has run since
    wait_mark: int = -1  # its tokens at that time: a new wait begins only when it has more

    def note_failure(self, failure: WorkerFailure, worker_tokens: int, now_s: float) -> None:
        """Note that an attempt ended because its worker failed. `worker_tokens`: made by that worker for all streams.
        Tokens from a worker with wrong answers stay in the stream, so it is flagged."""
        if failure.place.wrong and self.ledger.emitted:
            self.ledger.mark_inexact("begun by a worker that failed a known-answer check")
        before = self.failed_on if self.failed_at_s else ()
        self.worker_tokens = self.worker_tokens if self.failed_at_s else worker_tokens
        self.failed_at_s = self.failed_at_s or now_s
        self.failed_on = before if failure in before else (*before, failure)

    def note_resumed(self, now_s: float, to: str, recomputed: int) -> float:
        """Note the first token after a failure, from the worker `to`. Return how long the client saw no token; this
        counts from the last token, because a stopped worker is detected late."""
        pause_s = now_s - (self.last_token_at_s or self.failed_at_s)
        self.failed_at_s = 0.0
        for failure in self.failed_on:
            failure.stream_resumed(pause_s, self.ledger.mark, to, recomputed)
        return pause_s

    def move_to(self, other: WorkerSet) -> None:
        """Move it to a stand-in for its set, and out of its own set's queue."""
        self.workers.holds.drop(self)
        if self.would_change_in(other):
            self.ledger.mark_inexact("continued by workers of another version")
        self.workers = other

    def would_change_in(self, other: WorkerSet) -> bool:
        """Return whether its answer would differ from that of a request that began in `other`: it has tokens, or its
        prompt was made with another template."""
        return bool(self.ledger.emitted) or other.card.chat_template != self.workers.card.chat_template

    def set_wait_start(self, since_s: float) -> None:
        """Count the wait from `since_s`, before its model had a set."""
        self.wait_mark, self.waits_since_s = self.ledger.emitted, since_s

    def begin_wait(self, now_s: float) -> float:
        """Note that it has no place; return since when it waits."""
        if self.wait_mark != self.ledger.emitted:
            self.wait_mark = self.ledger.emitted
            self.waits_since_s = now_s
        return self.waits_since_s

    @property
    def tier(self) -> Tier:
        return Tier(self.ledger.tier)

    @property
    def limited(self) -> bool:
        """Return whether some places are closed to it while capacity is short: it is new, and not premium."""
        return self.priority is PriorityClass.FRESH and self.ledger.tier > Tier.PREMIUM

    def __repr__(self) -> str:
        where = f"on {self.slot!r}" if self.slot is not None else "on no worker"
        return f"<Flight {self.ledger!r} {where}>"


class WorkerSet:
    """The workers of one model in one namespace with one card checksum: their routes and the held streams."""

    def __init__(self, namespace: str, card: ModelCard, rng: random.Random, fresh_holds_max: int) -> None:
        self.namespace = namespace
        self.deployment = deployment_of(namespace)
        self.card = card
        self.checksum = card.checksum()
        self.table = RouteTable(rng)
        self.holds: HoldQueue[Flight] = HoldQueue(fresh_holds_max, stays=lambda flight: flight.consumer.answering)
        self.last_resorts: set[RouteSlot] = set()  # workers that serve only because too few others can
        self._nondeterministic = 0  # workers that may answer the same request differently each time
        self.sessions = 0  # data connections to its workers, including workers not ready for work yet
        self.text_lock = asyncio.Lock()  # held while the text side is made
        self.text: object | None = None  # what the frontend made of the card's tokenizer and template
        self.empty_since_s = 0.0  # when the last routable worker went, 0 while there is one
        self.served_since_s = 0.0  # when the current, or else the last, period with a routable worker began
        self.full_since_s = 0.0  # when its workers were first seen to be full, 0 while they are not
        self.trial_seen_at_s = 0.0  # when a worker was last seen to be reserved for a suspect
        self.taken_away_at_s = 0.0  # when a rollout was last seen to have taken all workers away
        self.none_serves = False  # workers are up, none serves, no other is expected (`MissingWorkers.none_serves`)
        self.pace = RetryAdvice()  # from the places that came free for waiting streams
        self.prefills = Prefills()  # of its workers

    @property
    def weight(self) -> float:
        """Return its share of its model's traffic: the weighted places of its routable workers. It is 0 if all of them
        are last resorts, so that another set of the model comes first."""
        resorts = sum(slot.routable for slot in self.last_resorts)
        return self.table.places if resorts < self.table.routable_count else 0.0

    @property
    def held(self) -> int:
        """Return how many resumed streams wait for one of its workers."""
        return sum(1 for one in self.holds if one.item.priority is PriorityClass.RESUMED)

    @property
    def deterministic(self) -> bool:
        """Return whether all its workers give the same answer to the same request."""
        return self._nondeterministic == 0

    def enter(self, slot: RouteSlot, *, deterministic: bool) -> None:
        """Add a connected worker."""
        self.table.add(slot)
        self._nondeterministic += not deterministic

    def leave(self, slot: RouteSlot, *, deterministic: bool) -> None:
        self.table.remove(slot)
        self.last_resorts.discard(slot)
        self._nondeterministic -= not deterministic

    def can_move(self, flight: Flight) -> bool:
        """Return whether there is a place for a stream that leaves a draining worker, and no waiting stream needs it.
        A waiting `limited` stream does not block the move."""
        waiting, ledger = self.holds.first(), flight.ledger
        if waiting is not None and not waiting.item.limited:
            return False
        return self.table.has_place(priority_of(ledger.resumed + 1, ledger.deaths))

    def note_routable(self, now_s: float) -> None:
        """Update `empty_since_s` and `served_since_s` after a change of its workers."""
        if self.table.routable_count:
            if self.empty_since_s or not self.served_since_s:
                self.served_since_s = now_s
            self.empty_since_s = 0.0
        elif self.empty_since_s == 0.0:
            self.empty_since_s = now_s

    def note_full(self, now_s: float) -> None:
        """Update `full_since_s`; called at every tick."""
        if not self.table.overloaded:
            self.full_since_s = 0.0
        elif self.full_since_s == 0.0:
            self.full_since_s = now_s

    def note_trial(self, now_s: float) -> None:
        """Update `trial_seen_at_s`; called at every tick and after each send."""
        if self.table.trials:
            self.trial_seen_at_s = now_s

    def can_stand_in_for(self, other: WorkerSet) -> bool:
        """Return whether a stream of `other` may continue here, though not exactly: same deployment, model and
        tokenizer."""
        return (
            self is not other
            and self.deployment == other.deployment
            and self.card.name == other.card.name
            and self.card.tokenizer_sha256 == other.card.tokenizer_sha256
            and self.text is not None
        )

    def __repr__(self) -> str:
        return (
            f"<WorkerSet {self.card.name} {self.namespace}/{self.checksum[:8]} "
            f"{self.table.routable_count}/{len(self.table.slots)} workers, {len(self.holds)} held>"
        )


def waiting_state(workers: WorkerSet) -> RequestState:
    """Return the state of requests that wait for a place in this set."""
    if workers.table.routable_count:
        return RequestState.QUEUED
    return RequestState.HELD if workers.none_serves else RequestState.PROVISIONING


def queue_positions(workers: WorkerSet, *, wanted: bool, why: str = "") -> Iterator[tuple[Flight, WaitStatus]]:
    """Yield all held streams in order, each with its request's position. `why`: the reason why there is no worker. A
    request that came when its wanted model already had a worker waits like any other, and may be refused."""
    state, places = waiting_state(workers), dict[int, int]()
    for held in workers.holds:
        place = places.setdefault(id(held.item.consumer.request), len(places) + 1)
        waits_for_its_model = state is not RequestState.QUEUED or held.since_s < workers.served_since_s
        reason = why if state is not RequestState.QUEUED else ""
        yield held.item, WaitStatus(state, place, held.since_s, wanted and waits_for_its_model, reason)


def state_of(flights: Iterable[Flight]) -> RequestState:
    """Return the state of an open request; if all its streams have ended, its client is still reading."""
    open_ones = [flight for flight in flights if not flight.ledger.ended]
    placed = [flight for flight in open_ones if flight.slot is not None]
    if not open_ones or any(flight.ledger.emitted for flight in placed):
        return RequestState.RUNNING
    return RequestState.DISPATCHED if placed else waiting_state(open_ones[0].workers)


class HoldQueue(Generic[Stream]):
    """The held streams of one worker set, in the order in which they will be sent. `stays`: whether a new stream may
    no longer be pushed out."""

    def __init__(self, fresh_max: int, stays: Callable[[Stream], bool] = lambda stream: False) -> None:
        self._by_priority: dict[PriorityClass, TierQueue[Stream]] = {
            priority: TierQueue(fresh_max if priority is PriorityClass.FRESH else None, stays)
            for priority in PriorityClass
        }
        self._for_group: TierQueue[Stream] = TierQueue(None)

    @property
    def _queues(self) -> list[TierQueue[Stream]]:
        return [self._for_group, *self._by_priority.values()]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, stream: Stream) -> bool:
        return any(stream in line for line in self._queues)

    def hold(self, stream: Stream, tier: Tier, since_s: float, priority: PriorityClass) -> Stream | None:
        """Queue a stream that has waited since `since_s`. Return the stream that must leave a full queue: this one, or
        the last of the new ones."""
        assert stream not in self, "a stream is held once"
        return self._by_priority[priority].join(stream, tier, since_s)

    def hold_for_group(self, stream: Stream, tier: Tier, since_s: float) -> None:
        """Queue a stream that waits for the next leader of one group."""
        assert stream not in self, "a stream is held once"
        self._for_group.join(stream, tier, since_s)

    def held_for_group(self) -> list[QueueEntry[Stream]]:
        """Return the streams that wait for one group's next leader, in order."""
        return list(self._for_group)

    def release_to_queue(self, stream: Stream, priority: PriorityClass) -> None:
        """Let a stream that waited for a group wait for any worker, at the position its waiting time gives it."""
        held = next(held for held in self._for_group if held.item == stream)
        self._for_group.leave(stream)
        self._by_priority[priority].join(stream, held.tier, held.since_s)

    def drop(self, stream: Stream) -> None:
        for line in self._queues:
            line.leave(stream)

    def first(self) -> QueueEntry[Stream] | None:
        """Return the stream that is next."""
        return next((line.first() for line in self._by_priority.values() if len(line)), None)

    @property
    def suspects(self) -> int:
        return len(self._by_priority[PriorityClass.ON_TRIAL])

    def overdue(self, now_s: float, wait_s_max: Callable[[QueueEntry[Stream]], float]) -> list[QueueEntry[Stream]]:
        """Remove and return all streams that have waited as long as they may."""
        late = [held for held in self if now_s - held.since_s >= wait_s_max(held)]
        for held in late:
            self.drop(held.item)
        return late

    def __iter__(self) -> Iterator[QueueEntry[Stream]]:
        for line in self._queues:
            yield from line


class RetryAdvice:
    """Estimates the Retry-After of a refusal from the time between places that came free. `full_since_s`: when the
    workers were first seen to be full; 0: they are not, so a place that is taken did not come free."""

    __slots__ = ("_gap_s", "_last_s", "_seen")

    def __init__(self) -> None:
        self._last_s = 0.0
        self._gap_s = RETRY_AFTER_S_MIN  # until the first was seen; it is multiplied by the queue's length
        self._seen = 0

    def came_free(self, now_s: float, full_since_s: float) -> None:
        if full_since_s:
            self._seen += 1  # the first ones are averaged with full weight
            gap_s = min(self._waited_s(now_s, full_since_s), RETRY_AFTER_S_MAX)
            self._gap_s += max(WEIGHT, 1 / self._seen) * (gap_s - self._gap_s)
        self._last_s = now_s

    def retry_after_s(self, waiting: int, now_s: float, full_since_s: float) -> float:
        """Return the time until a new request behind `waiting` others could have a place. If none came free for a
        while, the next may take as long again."""
        gap_s = max(self._gap_s, self._waited_s(now_s, full_since_s))
        return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, gap_s * (waiting + 1)))

    def _waited_s(self, now_s: float, full_since_s: float) -> float:
        """Return for how long no place has come free."""
        return now_s - max(self._last_s, full_since_s) if full_since_s else 0.0
