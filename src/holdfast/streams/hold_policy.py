"""Decides how long streams wait for a worker, and which error their clients get when the wait is over.

- No worker: the stream is *held* for `hold_s`, because a worker is expected and its client was promised an answer.
- All workers are full: a new request waits `queue_s` for a place and is then refused with a time to retry. A refusal is
  counted apart from failures.
- The queue is full: a waiting request of a lower tier is *pushed out*.
- A stream that ran before waits as if held; so does one whose client already reads another choice of the answer.

The wait is longer than `hold_s` in these cases:
- A request that may have killed engines is tried alone (`ON_TRIAL`): streams that ran before wait until the trial ends.
- A rollout has taken the workers away, or the store is lost: up to `away_s`. The workers may come back, or exist
  without this frontend's knowledge.
- An engine of the set is loading: until the time it gave, at most `loading_s` longer.
- The model starts on request: `provision_s` for its first worker, unless the fleet says that none is coming. If it says
  that none can come, a new request is refused at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from holdfast.core.errors import Code
from holdfast.routing.degradation import pushed_out
from holdfast.routing.table import PriorityClass
from holdfast.routing.tiers import QueueEntry
from holdfast.spec.waits import HoldSettings
from holdfast.streams.directory import FOR_GOOD, TAKEN_AWAY, MissingWorkers, ModelDirectory, SetStatus
from holdfast.streams.flight import Flight, WorkerSet, queue_positions
from holdfast.streams.stats import DispatchStats

log = logging.getLogger("holdfast.workers")

# An engine looks at its queue between two steps; a step of a busy engine may take that long.
ENGINE_WAIT_S_MIN = 1.0
# When to ask again for a model whose first worker is missing: an engine takes about as long to load.
FIRST_WORKER_S = 10.0
NO_WORKER_QUEUE_FULL = "no worker is up and too many requests wait already"
# How much the clocks of two processes may drift apart during such a wait: the event loop's counts whole milliseconds.
CLOCK_S = 0.05


def no_worker(why: str, *, model: str = "", retry_after_s: float = FIRST_WORKER_S) -> tuple[Code, str, float]:
    """Return code, message and Retry-After of the 503 for a missing worker. `HoldPolicy` uses it for streams of a set,
    whose worker is expected back within `HoldSettings.hold_s`; `frontend.pending_models` for requests that wait for the
    first worker of their `model`."""
    return Code.NO_WORKER, f"the model {model!r} has no worker now: {why}" if model else why, retry_after_s


class HoldPolicy:
    """Bounds and ends the waits of one frontend's streams."""

    def __init__(
        self, settings: HoldSettings, stats: DispatchStats, clock: Callable[[], float], directory: ModelDirectory
    ) -> None:
        self._settings = settings
        self._wants, self._missing, self._directory = directory.wants, directory.missing, directory
        self._stats = stats
        self._clock = clock

    def wait_s_max(self, held: QueueEntry[Flight]) -> float:
        """Return how long a held stream may wait in all."""
        flight = held.item
        full_since_s = flight.workers.full_since_s
        hold_s = self._hold_s(flight.workers)
        if flight.priority is not PriorityClass.FRESH or flight.consumer.answering:
            hold_s += self._loading_s(flight.workers, held.since_s)
        if flight.priority is not PriorityClass.FRESH:
            away_at_s = max(flight.workers.taken_away_at_s, self._directory.store_lost_at_s)
            away_s = min(away_at_s - held.since_s, self._settings.away_s)
            return hold_s + max(0.0, flight.workers.trial_seen_at_s - held.since_s, away_s)
        name = flight.workers.card.name
        unplaceable = self._wants(name) and self._missing(name).unplaceable
        if unplaceable and not flight.consumer.answering and not flight.workers.sessions:
            return 0.0
        if flight.consumer.answering or not full_since_s:
            return hold_s
        if held.since_s < flight.workers.served_since_s and self._wants(name):
            return hold_s  # it came before the model's first worker, as did all requests ahead of it
        since_s = _place_since_s(flight) or max(full_since_s, held.since_s)
        return since_s + self._queue_s(flight.workers) - held.since_s

    def _queue_s(self, workers: WorkerSet) -> float:
        return self._settings.queue_s * workers.table.rules.latency_factor

    def engine_wait_ms(self, flight: Flight, now_s: float) -> int:
        """Return for how many ms a worker may keep a request that is sent now in its queue. 0 means no bound: the
        request ran before, or its client reads another part of its answer."""
        flight.place_until_s, workers = 0.0, flight.workers
        if flight.priority is not PriorityClass.FRESH or flight.consumer.answering:
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

    def refuse_if_overdue(self, flight: Flight) -> bool:
        """Refuse a request that its worker gave back, if its wait is over; return False if it may wait longer."""
        over = flight.place_until_s and self._clock() >= flight.place_until_s - CLOCK_S
        if not over or flight.consumer.answering:
            return False
        waited_s = self._clock() - flight.place_since_s if flight.place_since_s else self._hold_s(flight.workers)
        self._refuse_full(flight, f"every worker is full, and no place came free within {waited_s:.0f} s")
        return True

    def _hold_s(self, workers: WorkerSet) -> float:
        """Return how long a stream waits for a worker of this set."""
        name = workers.card.name
        return self.first_worker_wait_s(self._settings, wanted=self._wants(name), missing=self._missing(name))

    def _loading_s(self, workers: WorkerSet, since_s: float) -> float:
        """Return how much longer a stream that waits since `since_s` may wait because an engine is loading."""
        loading = self._directory.loading(workers.namespace, workers.checksum)
        if loading is None:
            return 0.0
        return min(self._settings.loading_s, max(0.0, loading.until_s - since_s - self._hold_s(workers)))

    def _why_missing(self, workers: WorkerSet) -> str:
        """Return why a set has no worker, and when one is expected, as text for waiting clients."""
        loading = self._directory.loading(workers.namespace, workers.checksum)
        if loading is not None:
            left_s = min(loading.until_s - self._clock(), self._settings.loading_s)
            return f"{loading.name} is loading, and streams wait for it for {left_s:.0f} s at most"
        return self._missing(workers.card.name).why

    @staticmethod
    def first_worker_wait_s(settings: HoldSettings, *, wanted: bool, missing: MissingWorkers) -> float:
        """Return how long a request waits for its model's first worker."""
        comes = wanted and not missing.unplaceable and not missing.none_serves
        return settings.provision_s if comes else settings.hold_s

    def needs_stand_ins(self, workers: WorkerSet, status: SetStatus, now_s: float) -> bool:
        """Return whether other sets are to stand in for this one: at once if a rollout took its workers away; else
        after `stand_in_after_s`, because crashed workers come back."""
        if status in TAKEN_AWAY:
            workers.taken_away_at_s = now_s
        after_s = 0.0 if status in TAKEN_AWAY else self._settings.stand_in_after_s
        return workers.empty_since_s > 0.0 and now_s - workers.empty_since_s > after_s

    def end_wait(self, held: QueueEntry[Flight]) -> None:
        """End a stream that has waited as long as it may."""
        flight = held.item
        if flight.priority is PriorityClass.FRESH and flight.workers.full_since_s:
            waited_s = self.wait_s_max(held)
            self._refuse_full(flight, f"every worker is full, and no place came free within {waited_s:.0f} s")
        else:
            hold_s, held_s = self._hold_s(flight.workers), round(self._clock() - held.since_s)
            waited = f"no worker could take it within {held_s if held_s > hold_s + 1 else hold_s:g} s"
            if self.wait_s_max(held) <= 0.0:
                waited = "no worker of it can be started"
            why = "" if flight.workers.full_since_s else self._why_missing(flight.workers)
            self.lose(flight, Code.NO_WORKER, f"{waited}: {why}" if why else waited)

    def move_to_stand_ins(self, workers: WorkerSet, sets: ModelDirectory, send: Callable[[Flight], bool]) -> None:
        """Send streams that wait for a set to other sets that may continue them."""
        for flight in [held.item for held in workers.holds]:
            if others := sets.stand_ins(flight):
                flight.move_to(others[0])
                send(flight)  # `stand_ins` returns only sets with a place
            elif sets.has_possible_stand_in(flight):
                return  # the stand-in is full: this stream blocks those behind it
            else:
                self._end_if_gone(flight, sets.status_of(workers))

    def _end_if_gone(self, flight: Flight, status: SetStatus) -> None:
        """End a stream that no other set may continue, if its own set is gone for good."""
        if status not in FOR_GOOD:
            return
        flight.workers.holds.drop(flight)
        if status is SetStatus.UNWANTED:
            self.lose(flight, Code.MODEL_UNAVAILABLE, no_longer_wanted(flight.workers.card.name))
            return
        why = "its workers were replaced by others, which would go on with it in another way"
        self.lose(flight, Code.REPLACED, f"{why}; ask again, or allow it in the manifest (rollout.inexact)")

    def on_queue_full(self, flight: Flight, *, waited: bool) -> None:
        """Refuse a new request because the queue is full, or push a waiting one out (`waited`)."""
        if waited:
            self._push_out(flight)
        elif flight.workers.table.overloaded:
            self._refuse_full(flight, "every worker is full")
        else:
            self.refuse(flight, *no_worker(NO_WORKER_QUEUE_FULL, retry_after_s=self._settings.hold_s))

    def _push_out(self, flight: Flight) -> None:
        if flight.ledger.end():
            shed = pushed_out(flight.tier, self._settings.shed_retry_s)
            self._stats.shed[flight.tier.label, shed.reason] += 1
            _tell_failed(flight, Code.PUSHED_OUT, shed.message, shed.retry_after_s)

    def _refuse_full(self, flight: Flight, message: str) -> None:
        workers = flight.workers
        again_s = workers.pace.retry_after_s(len(workers.holds), self._clock(), workers.full_since_s)
        self.refuse(flight, Code.WORKER_OVERLOADED, message, again_s)

    def refuse(self, flight: Flight, code: Code, message: str, retry_after_s: float | None = None) -> None:
        """Refuse a new request that never ran."""
        if flight.ledger.end():
            self._stats.refused[code] = self._stats.refused.get(code, 0) + 1
            _tell_failed(flight, code, message, retry_after_s)

    def lose(self, flight: Flight, code: Code, message: str) -> None:
        """End an accepted stream with a failure."""
        if flight.ledger.end():
            self._stats.lost[code] = self._stats.lost.get(code, 0) + 1
            if flight.failed_at_s:
                for failure in flight.failed_on:
                    failure.lost += 1
            if code is Code.NO_WORKER:
                _tell_failed(flight, *no_worker(message, retry_after_s=self._settings.hold_s))
            else:
                _tell_failed(flight, code, message, None)

    def remind(self, workers: WorkerSet) -> None:
        """Tell the consumers of held streams their state and queue position."""
        if not len(workers.holds):
            return
        name = workers.card.name
        for flight, waiting in queue_positions(workers, wanted=self._wants(name), why=self._why_missing(workers)):
            try:
                flight.consumer.still_waiting(waiting)
            except Exception as error:
                workers.holds.drop(flight)
                self.consumer_raised(flight, error)

    def tell_dispatched(self, flight: Flight, worker: str) -> bool:
        """Tell a stream's consumer that it was sent to a worker; return False if the stream was ended for that."""
        try:
            flight.consumer.dispatched(worker)
        except Exception as error:
            self.consumer_raised(flight, error)
            return False
        return True

    def consumer_raised(self, flight: Flight, error: Exception) -> None:
        """End a stream because its consumer raised; its client gets an error even if the stream had ended."""
        log.error("bug in what consumes %r", flight, exc_info=error)
        flight.ledger.end()
        self._stats.lost[Code.INTERNAL] = self._stats.lost.get(Code.INTERNAL, 0) + 1
        _tell_failed(flight, Code.INTERNAL, "internal error; the server's log has the details", None)


def _place_since_s(flight: Flight) -> float:
    """Return since when a new request waits for a place on the present workers; 0.0: it does not yet."""
    return max(flight.place_since_s, flight.workers.served_since_s) if flight.place_since_s else 0.0


def no_longer_wanted(model: str) -> str:
    """Return the error message for requests that wait for a model which is no longer wanted."""
    return f"the model {model!r} was taken away, and no worker of it is left"


def _tell_failed(flight: Flight, code: Code, message: str, retry_after_s: float | None) -> None:
    """Tell a consumer that its stream failed. If it raises, only log that: the caller has other streams to handle."""
    try:
        flight.consumer.failed(code, message, retry_after_s)
    except Exception:
        log.exception("bug in telling the client of %r that it failed", flight)
