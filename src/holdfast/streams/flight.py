"""One stream on its way, and the set of workers that it belongs to: the set holds its streams, a stream knows its set.

Always true: a request stays with its set; two checksums never share a set (facts 19), so a stream is never replayed
onto other weights without being flagged.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass
from typing import Protocol

from holdfast.core.errors import Code
from holdfast.core.requests import Output
from holdfast.core.tiers import Tier
from holdfast.discovery.card import ModelCard
from holdfast.discovery.keys import deployment_of
from holdfast.routing.slots import Slot
from holdfast.routing.table import RouteTable, Standing
from holdfast.streams.holds import HoldQueue, Pace
from holdfast.streams.ledger import Ledger, standing_of
from holdfast.streams.states import Waiting
from holdfast.streams.stats import Seam
from holdfast.streams.takeovers import Prefills

_ages = itertools.count()


class Consumer(Protocol):
    """Takes a stream's tokens; the frontend's text side. `dirty` is the link's: set between take and flush."""

    dirty: bool

    @property
    def asker(self) -> object:
        """What it is part of: streams of one request are one in line."""

    @property
    def answering(self) -> bool:
        """Whether its client has been given, or is owed, part of this answer: too late to be told to come back."""

    def take(self, output: Output) -> bool:
        """Take tokens already in the ledger; True if the consumer has seen the end by itself (a stop string)."""

    def flush(self) -> None:
        """Send on what `take` gathered; called once per received batch."""

    def failed(self, code: Code, message: str, retry_after_s: float | None) -> None:
        """The stream is over without its end."""

    def still_waiting(self, waiting: Waiting) -> None:
        """The stream is held; called every second."""

    def resumed(self, pause_s: float) -> None:
        """The stream moves again this long after a failure; called before the tokens that say so are taken."""


class Excusable(Protocol):
    """Counts a worker's failures (`sightings.Sighting`)."""

    excused: int


@dataclass(frozen=True, slots=True)
class Awaited:
    """The group whose next leader a stream waits for, and for how long at most."""

    group: tuple[str, str]
    until_s: float


class Flight:
    """A stream from admission to its end."""

    __slots__ = (
        "age",
        "attempt",
        "awaits",
        "blamed",
        "bound",
        "consumer",
        "cost",
        "excused",
        "failed_at_s",
        "failed_on",
        "first_output",
        "home",
        "last_s",
        "ledger",
        "place_since_s",
        "place_until_s",
        "sent_s",
        "slot",
        "standing",
        "stream",
        "wait_mark",
        "waits_since_s",
        "worker_tokens",
        "workers",
    )

    def __init__(self, ledger: Ledger, workers: WorkerSet, consumer: Consumer) -> None:
        self.ledger = ledger
        self.workers = workers
        self.consumer = consumer
        self.age = next(_ages)  # smaller: it was asked for earlier
        self.slot: Slot | None = None  # the worker that it runs on
        self.awaits: Awaited | None = None  # while it is held apart
        self.home: Slot | None = None  # the one that handed it over by plan, until it has a token elsewhere
        self.stream = 0  # its number there, fresh for every attempt
        self.attempt = 0
        self.cost = 0
        self.bound = 0  # of streams there, with which it was sent; 0: none
        self.first_output = False  # the current attempt has yet to make a token
        self.standing = Standing.FRESH  # as it was placed, or is held
        self.failed_at_s = 0.0  # when it first failed since its last token, 0 once the stream moves again
        self.failed_on: tuple[Seam, ...] = ()  # the failures it met since
        self.worker_tokens = 0  # that the worker of the first of them had made by then, for all
        self.blamed: Excusable | None = None  # the worker that its last failure was counted against,
        self.excused = False  # or taken back from, because it failed elsewhere too
        self.last_s = 0.0  # when its last token came, 0 before any
        self.sent_s = 0.0  # when its current attempt began
        self.place_since_s = 0.0  # when it began to wait for a worker's place, also in an engine's queue; 0: it has not
        self.place_until_s = 0.0  # until when its worker keeps it if it has not begun to run; 0: without a bound
        self.waits_since_s = 0.0  # when it first had no place, later by what it ran since,
        self.wait_mark = -1  # and how many tokens it had then: the time begins anew only when there are more

    def fell(self, seam: Seam, worker_tokens: int, now_s: float) -> None:
        """An attempt ended because its worker failed, which has made so many tokens by now for all streams. What it
        showed of one whose answers are wrong stays in it."""
        if seam.place.wrong and self.ledger.emitted:
            self.ledger.doubt("begun by a worker that failed a known-answer check")
        before = self.failed_on if self.failed_at_s else ()
        self.worker_tokens = self.worker_tokens if self.failed_at_s else worker_tokens
        self.failed_at_s = self.failed_at_s or now_s
        self.failed_on = before if seam in before else (*before, seam)

    def went_on(self, now_s: float, to: str, recomputed: int) -> float:
        """It has a token again, of the worker `to`, which computed so many tokens of its text: how long its client saw
        none. A stopped worker's streams stand still long before anybody calls it failed."""
        pause_s = now_s - (self.last_s or self.failed_at_s)
        self.failed_at_s = 0.0
        for seam in self.failed_on:
            seam.went_on(pause_s, self.ledger.mark, to, recomputed)
        return pause_s

    def goes_to(self, other: WorkerSet) -> None:
        """A stand-in for its set, in whose line it stands no more, takes it up."""
        self.workers.holds.drop(self)
        if self.changes_in(other):
            self.ledger.doubt("continued by workers of another version")
        self.workers = other

    def changes_in(self, other: WorkerSet) -> bool:
        """Whether its answer would be another in a stand-in than if it had been asked there: it has begun, or its
        prompt was made by another template."""
        return bool(self.ledger.emitted) or other.card.chat_template != self.workers.card.chat_template

    def ran(self, now_s: float) -> None:
        """It was on a worker until now. A prompt may take longer than anybody may wait: that was no waiting."""
        self.waits_since_s += now_s - self.sent_s

    def waited(self, since_s: float) -> None:
        """It has waited since then, before it had a set to wait for."""
        self.wait_mark, self.waits_since_s = self.ledger.emitted, since_s

    def waits(self, now_s: float) -> float:
        """It has no place; since when it waits."""
        if self.wait_mark != self.ledger.emitted:
            self.wait_mark = self.ledger.emitted
            self.waits_since_s = now_s
        return self.waits_since_s

    @property
    def tier(self) -> Tier:
        return Tier(self.ledger.tier)

    @property
    def limited(self) -> bool:
        """While capacity is short it may not have every place: it is new, and not premium."""
        return self.standing is Standing.FRESH and self.ledger.tier > Tier.PREMIUM

    def __repr__(self) -> str:
        where = f"on {self.slot!r}" if self.slot is not None else "on no worker"
        return f"<Flight {self.ledger!r} {where}>"


class WorkerSet:
    """One set, with its routes and its held streams."""

    def __init__(self, namespace: str, card: ModelCard, rng: random.Random, fresh_holds_max: int) -> None:
        self.namespace = namespace
        self.deployment = deployment_of(namespace)
        self.card = card
        self.checksum = card.checksum()
        self.table = RouteTable(rng)
        self.holds: HoldQueue[Flight] = HoldQueue(fresh_holds_max, stays=lambda flight: flight.consumer.answering)
        self.last_resorts: set[Slot] = set()  # workers that serve only because too few others of it can
        self._inexact = 0  # workers among them whose answers differ from one time to the next
        self.sessions = 0  # data connections to its workers, with those that are not ready for work yet
        self.text_lock = asyncio.Lock()  # whoever makes the text side; others wait for it
        self.text: object | None = None  # what the frontend made of the card's tokenizer and template
        self.empty_since_s = 0.0  # when the last routable worker went, 0 while there is one
        self.served_since_s = 0.0  # when the first of those came that are routable now, or were last
        self.full_since_s = 0.0  # when its workers were first seen to be full, 0 while they are not
        self.tried_s = 0.0  # when one of its workers was last seen to be kept for a suspect
        self.away_s = 0.0  # when a rollout was last seen to have taken all of them away
        self.withheld = False  # workers are up, none serves, and no other comes (`Missing.stands`)
        self.pace = Pace()  # of the places that came free for those who waited
        self.prefills = Prefills()  # of its workers

    @property
    def weight(self) -> float:
        """How much of its model's traffic it should get: the places of its routable workers, by their weight; nothing
        where all of them serve as a last resort, so that another set of the model comes first."""
        resorts = sum(slot.routable for slot in self.last_resorts)
        return self.table.places if resorts < self.table.routable_count else 0.0

    @property
    def held(self) -> int:
        """Streams that had begun, and wait for one of its workers."""
        return sum(1 for one in self.holds if one.item.standing is Standing.RESUMED)

    @property
    def deterministic(self) -> bool:
        """Whether every worker of it, asked again, would answer the same."""
        return self._inexact == 0

    def enter(self, slot: Slot, *, deterministic: bool) -> None:
        """A worker of it is connected."""
        self.table.add(slot)
        self._inexact += not deterministic

    def leave(self, slot: Slot, *, deterministic: bool) -> None:
        self.table.remove(slot)
        self.last_resorts.discard(slot)
        self._inexact -= not deterministic

    def can_move(self, flight: Flight) -> bool:
        """Whether there is a place for one that is to leave its worker by plan, and nobody waits who might have it:
        those who may not have every place wait for none of the others."""
        waiting, ledger = self.holds.first(), flight.ledger
        if waiting is not None and not waiting.item.limited:
            return False
        return self.table.has_place(standing_of(ledger.resumed + 1, ledger.deaths))

    def note_routable(self, now_s: float) -> None:
        """Keep `empty_since_s` true after any change of its workers."""
        if self.table.routable_count:
            if self.empty_since_s or not self.served_since_s:
                self.served_since_s = now_s
            self.empty_since_s = 0.0
        elif self.empty_since_s == 0.0:
            self.empty_since_s = now_s

    def note_full(self, now_s: float) -> None:
        """Keep `full_since_s` true, looked at from time to time."""
        if not self.table.overloaded:
            self.full_since_s = 0.0
        elif self.full_since_s == 0.0:
            self.full_since_s = now_s

    def note_trial(self, now_s: float) -> None:
        """Keep `tried_s` true, looked at from time to time."""
        if self.table.trials:
            self.tried_s = now_s

    def can_stand_in_for(self, other: WorkerSet) -> bool:
        """Same model, same tokens, so a stream of `other` may go on here, though not exactly. Never in another
        deployment: a frontend that serves both mixes nothing of them."""
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
