"""One stream on its way: its ledger, who consumes its tokens, and where it runs now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from holdfast.core.errors import Code
from holdfast.core.requests import Output
from holdfast.routing.table import Standing
from holdfast.streams.ledger import Ledger

if TYPE_CHECKING:
    from holdfast.streams.link import WorkerLink
    from holdfast.streams.sets import WorkerSet


class Consumer(Protocol):
    """Takes a stream's tokens; the frontend's text side. `dirty` is the link's: set between take and flush."""

    dirty: bool

    @property
    def answering(self) -> bool:
        """Whether its client has been given, or is owed, part of this answer: too late to be told to come back."""

    def take(self, output: Output) -> bool:
        """Take tokens already in the ledger; True if the consumer has seen the end by itself (a stop string)."""

    def flush(self) -> None:
        """Send on what `take` gathered; called once per received batch."""

    def failed(self, code: Code, message: str, retry_after_s: float | None) -> None:
        """The stream is over without its end."""

    def still_waiting(self) -> None:
        """The stream is held; called every few seconds."""

    def resumed(self, pause_s: float) -> None:
        """The stream moves again this long after a failure; called before the tokens that say so are taken."""


class Flight:
    """A stream from admission to its end."""

    __slots__ = (
        "attempt",
        "consumer",
        "cost",
        "failed_at_s",
        "failed_on",
        "first_output",
        "last_s",
        "ledger",
        "link",
        "sent_s",
        "standing",
        "stream",
        "wait_mark",
        "waits_since_s",
        "workers",
    )

    def __init__(self, ledger: Ledger, workers: WorkerSet, consumer: Consumer) -> None:
        self.ledger = ledger
        self.workers = workers
        self.consumer = consumer
        self.link: WorkerLink | None = None
        self.stream = 0  # its number on the link, fresh for every attempt
        self.attempt = 0
        self.cost = 0
        self.first_output = False  # the current attempt has yet to make a token
        self.standing = Standing.FRESH  # as it was placed, or is held
        self.failed_at_s = 0.0  # when it first failed since its last token, 0 once the stream moves again
        self.failed_on: tuple[tuple[int, int], ...] = ()  # workers it failed on since, and their epochs
        self.last_s = 0.0  # when its last token came, 0 before any
        self.sent_s = 0.0  # when its current attempt began
        self.waits_since_s = 0.0  # when it first had no place, later by what it ran since,
        self.wait_mark = -1  # and how many tokens it had then: the time begins anew only when there are more

    def fell(self, worker: tuple[int, int], now_s: float) -> None:
        """An attempt ended because its worker, under that epoch, failed."""
        before = self.failed_on if self.failed_at_s else ()
        self.failed_at_s = self.failed_at_s or now_s
        self.failed_on = before if worker in before else (*before, worker)

    def ran(self, now_s: float) -> None:
        """It was on a worker until now. A prompt may take longer than anybody may wait: that was no waiting."""
        self.waits_since_s += now_s - self.sent_s

    def waits(self, now_s: float) -> float:
        """It has no place; since when it waits."""
        if self.wait_mark != self.ledger.emitted:
            self.wait_mark = self.ledger.emitted
            self.waits_since_s = now_s
        return self.waits_since_s

    def __repr__(self) -> str:
        where = f"on {self.link!r}" if self.link is not None else "on no worker"
        return f"<Flight {self.ledger!r} {where}>"
