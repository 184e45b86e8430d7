"""How long streams wait for a worker, and what their clients are told when they waited in vain.

Theory. With no worker a stream is *held*: somebody is coming, and it has been promised its end, or soon will be. Where
workers are there and full nobody is coming: a new request waits a little for a place, then it is refused with a time
to come back. That is an answer, not a failure, and is counted apart; so it is where a line is full, and one of a lower
tier that waits is *pushed out*. Whoever ran before, or whose client already has part of its answer (another of its
choices), waits as if held. Suspects are tried one after the other, each for as long as its prompt takes: while one is
tried, the wait of those who ran before is not over. Nor is it while a rollout has taken their workers away: until that
is in place or undone nobody knows whether they come back. Nor while the store is away: a worker that leads may be there
and this frontend cannot know of it. Both have a bound (`HoldSettings.away_s`). A model that is *wanted* may have to be
brought up from nothing: whoever waits for its first worker, or waited when that came, may do so for longer; not where
the fleet says that none is coming. Where it says that none can come at all, a new request is refused at once. While an
engine of their set is loading, and says by when it is ready, streams are not given up: until then, and `loading_s`
longer than otherwise at most.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Protocol

from holdfast.core.errors import Code
from holdfast.routing.degradation import pushed_out
from holdfast.routing.table import Standing
from holdfast.routing.tiers import InLine
from holdfast.spec.waits import HoldSettings
from holdfast.streams.directory import Missing, ModelDirectory
from holdfast.streams.flight import Flight, WorkerSet
from holdfast.streams.lines import line_of
from holdfast.streams.loadings import Loading
from holdfast.streams.rulings import FOR_GOOD, TAKEN_AWAY, Fate
from holdfast.streams.stats import DispatchStats

log = logging.getLogger("holdfast.workers")

# An engine looks at its queue between two steps, and a step of a busy one may take that long.
ENGINE_WAIT_S_MIN = 1.0
# What the clocks of two processes may differ by over such a wait: the event loop's counts whole milliseconds.
CLOCK_S = 0.05


class Expected(Protocol):
    """What is known of workers that are not there: the directory's part of it."""

    def wants(self, name: str) -> bool:
        """Whether a model is brought up when it is asked for."""

    def missing(self, name: str) -> Missing:
        """Why it has no worker."""

    @property
    def store_lost_s(self) -> float:
        """When the store was last seen to be away; 0: never."""

    @property
    def loading(self) -> Callable[[str, str], Loading | None]:
        """An engine of a set, by its namespace and checksum, that is loading."""


class Patience:
    """Ends the waits of one frontend's streams."""

    def __init__(
        self,
        settings: HoldSettings,
        stats: DispatchStats,
        clock: Callable[[], float],
        expected: Expected,
    ) -> None:
        self._settings = settings
        self._wants, self._missing, self._expected = expected.wants, expected.missing, expected
        self._stats = stats
        self._clock = clock

    def bound_s(self, held: InLine[Flight]) -> float:
        """How long it may wait in all; for a place it waits since there were workers."""
        flight = held.item
        full_since_s = flight.workers.full_since_s
        hold_s = self._hold_s(flight.workers)
        if flight.standing is not Standing.FRESH or flight.consumer.answering:
            hold_s += self._loading_s(flight.workers, held.since_s)
        if flight.standing is not Standing.FRESH:
            away_s = max(flight.workers.away_s, self._expected.store_lost_s) - held.since_s
            away_s = min(away_s, self._settings.away_s)
            return hold_s + max(0.0, flight.workers.tried_s - held.since_s, away_s)
        if not flight.consumer.answering and not flight.workers.sessions and self._is_hopeless(flight.workers):
            return 0.0
        if flight.consumer.answering or not full_since_s:
            return hold_s
        if held.since_s < flight.workers.served_since_s and self._wants(flight.workers.card.name):
            return hold_s  # it was to wait for a worker, and so were all those before it
        since_s = _place_since_s(flight) or max(full_since_s, held.since_s)
        return since_s + self._queue_s(flight.workers) - held.since_s

    def _queue_s(self, workers: WorkerSet) -> float:
        return self._settings.queue_s * workers.table.rules.latency_factor

    def sends(self, flight: Flight, now_s: float) -> int:
        """Return for how many ms its worker may keep a request that is sent now and does not begin to run; 0: without a
        bound, for it ran before, or its client reads another part of its answer."""
        flight.place_until_s, workers = 0.0, flight.workers
        if flight.standing is not Standing.FRESH or flight.consumer.answering:
            return 0
        waited = flight.wait_mark >= 0
        if waited and flight.waits_since_s < workers.served_since_s and self._wants(workers.card.name):
            until_s = flight.waits_since_s + self._hold_s(workers)
        else:
            since_s = max(flight.waits_since_s, workers.full_since_s) if waited and workers.full_since_s else now_s
            flight.place_since_s = _place_since_s(flight) or since_s
            until_s = flight.place_since_s + self._queue_s(workers)
        flight.place_until_s = max(until_s, now_s + ENGINE_WAIT_S_MIN)
        return math.ceil((flight.place_until_s - now_s) * 1000)

    def came_back(self, flight: Flight) -> bool:
        """Refuse a request that its worker gave back because its wait is over; False: it may wait on."""
        over = flight.place_until_s and self._clock() >= flight.place_until_s - CLOCK_S
        if not over or flight.consumer.answering:
            return False
        waited_s = self._clock() - flight.place_since_s if flight.place_since_s else self._hold_s(flight.workers)
        self._refuse_full(flight, f"every worker is full, and no place came free within {waited_s:.0f} s")
        return True

    def _hold_s(self, workers: WorkerSet) -> float:
        """How long somebody may come who serves."""
        name = workers.card.name
        return self.bound_of(self._settings, wanted=self._wants(name), missing=self._missing(name))

    def _is_hopeless(self, workers: WorkerSet) -> bool:
        name = workers.card.name
        return self._wants(name) and self._missing(name).hopeless

    def _loading_s(self, workers: WorkerSet, since_s: float) -> float:
        """How much longer than otherwise one that waits since then may wait, because an engine is loading."""
        loading = self._expected.loading(workers.namespace, workers.checksum)
        if loading is None:
            return 0.0
        return min(self._settings.loading_s, max(0.0, loading.until_s - since_s - self._hold_s(workers)))

    def _why_missing(self, workers: WorkerSet) -> str:
        """Why a set has no worker, and by when one is expected, for those who wait for it."""
        loading = self._expected.loading(workers.namespace, workers.checksum)
        if loading is not None:
            left_s = min(loading.until_s - self._clock(), self._settings.loading_s)
            return f"{loading.name} is loading, and streams wait for it for {left_s:.0f} s at most"
        return self._missing(workers.card.name).why

    @staticmethod
    def bound_of(settings: HoldSettings, *, wanted: bool, missing: Missing) -> float:
        """How long a model's first worker is waited for."""
        comes = wanted and not missing.hopeless and not missing.stands
        return settings.provision_s if comes else settings.hold_s

    def is_tired_of(self, workers: WorkerSet, fate: Fate, now_s: float) -> bool:
        """Whether others are to stand in for a set. Workers that crashed come back; of those that a rollout took away
        it is known at once."""
        if fate in TAKEN_AWAY:
            workers.away_s = now_s
        after_s = 0.0 if fate in TAKEN_AWAY else self._settings.stand_in_after_s
        return workers.empty_since_s > 0.0 and now_s - workers.empty_since_s > after_s

    def is_over(self, held: InLine[Flight]) -> None:
        """It waited for as long as it may."""
        flight = held.item
        if flight.standing is Standing.FRESH and flight.workers.full_since_s:
            waited_s = self.bound_s(held)
            self._refuse_full(flight, f"every worker is full, and no place came free within {waited_s:.0f} s")
        else:
            hold_s, held_s = self._hold_s(flight.workers), round(self._clock() - held.since_s)
            waited = f"no worker could take it within {held_s if held_s > hold_s + 1 else hold_s:g} s"
            if self.bound_s(held) <= 0.0:
                waited = "no worker of it can be started"
            why = "" if flight.workers.full_since_s else self._why_missing(flight.workers)
            self.lose(flight, Code.NO_WORKER, f"{waited}: {why}" if why else waited)

    def move_to_stand_ins(self, workers: WorkerSet, sets: ModelDirectory, send: Callable[[Flight], bool]) -> None:
        """Send those that wait for a set to other sets that may go on with them."""
        for flight in [held.item for held in workers.holds]:
            if others := sets.stand_ins(flight):
                flight.goes_to(others[0])
                send(flight)  # a stand-in has a place, or it would not be one
            elif sets.has_heir(flight):
                return  # it has no place now, and holds up those behind it
            else:
                self._has_no_heir(flight, sets.fate(workers))

    def _has_no_heir(self, flight: Flight, fate: Fate) -> None:
        """No other set may go on with it: where its own is gone for good, that is its end."""
        if fate not in FOR_GOOD:
            return
        flight.workers.holds.drop(flight)
        if fate is Fate.UNWANTED:
            self.lose(flight, Code.MODEL_UNAVAILABLE, no_longer_wanted(flight.workers.card.name))
            return
        why = "its workers were replaced by others, which would go on with it in another way"
        self.lose(flight, Code.REPLACED, f"{why}; ask again, or allow it in the manifest (rollout.inexact)")

    def line_is_full(self, flight: Flight, *, waited: bool) -> None:
        """A new request that may not wait, or not any more."""
        if waited:
            self._push_out(flight)
        elif flight.workers.table.overloaded:
            self._refuse_full(flight, "every worker is full")
        else:
            why = "no worker is up and too many requests wait already"
            self.refuse(flight, Code.NO_WORKER, why, self._settings.hold_s)

    def _push_out(self, flight: Flight) -> None:
        if flight.ledger.end():
            shed = pushed_out(flight.tier, self._settings.shed_retry_s)
            self._stats.shed[flight.tier.word, shed.reason] += 1
            _tell_failed(flight, Code.PUSHED_OUT, shed.message, shed.retry_after_s)

    def _refuse_full(self, flight: Flight, message: str) -> None:
        workers = flight.workers
        again_s = workers.pace.retry_after_s(len(workers.holds), self._clock(), workers.full_since_s)
        self.refuse(flight, Code.WORKER_OVERLOADED, message, again_s)

    def refuse(self, flight: Flight, code: Code, message: str, retry_after_s: float | None = None) -> None:
        """A new request that never ran."""
        if flight.ledger.end():
            self._stats.refused[code] = self._stats.refused.get(code, 0) + 1
            _tell_failed(flight, code, message, retry_after_s)

    def lose(self, flight: Flight, code: Code, message: str) -> None:
        """A stream that was taken on ends without its end."""
        if flight.ledger.end():
            self._stats.lost[code] = self._stats.lost.get(code, 0) + 1
            if flight.failed_at_s:
                for seam in flight.failed_on:
                    seam.lost += 1
            _tell_failed(flight, code, message, self._settings.hold_s if code is Code.NO_WORKER else None)

    def remind(self, workers: WorkerSet) -> None:
        """Tell those who wait that they do."""
        if not len(workers.holds):
            return
        name = workers.card.name
        for flight, waiting in line_of(workers, wanted=self._wants(name), why=self._why_missing(workers)):
            try:
                flight.consumer.still_waiting(waiting)
            except Exception as error:
                workers.holds.drop(flight)
                self.broke(flight, error)

    def broke(self, flight: Flight, error: Exception) -> None:
        """What consumes a stream raised, perhaps at its very end: its client is told, whatever it was told before."""
        log.error("bug in what consumes %r", flight, exc_info=error)
        flight.ledger.end()
        self._stats.lost[Code.INTERNAL] = self._stats.lost.get(Code.INTERNAL, 0) + 1
        _tell_failed(flight, Code.INTERNAL, "internal error; the server's log has the details", None)


def _place_since_s(flight: Flight) -> float:
    """Return since when a new request waits for a place of the workers that are there now; 0.0: it does not yet."""
    return max(flight.place_since_s, flight.workers.served_since_s) if flight.place_since_s else 0.0


def no_longer_wanted(model: str) -> str:
    """Why whoever waits for a model does so in vain."""
    return f"the model {model!r} was taken away, and no worker of it is left"


def _tell_failed(flight: Flight, code: Code, message: str, retry_after_s: float | None) -> None:
    """Whoever tells is on its way to other streams: a consumer that raises must not keep it from them."""
    try:
        flight.consumer.failed(code, message, retry_after_s)
    except Exception:
        log.exception("bug in telling the client of %r that it failed", flight)
