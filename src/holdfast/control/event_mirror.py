"""The event mirror of the leading control sends the fleet's events to a Redis stream.

A shell: it reads facts from the store (`fleet.events`) and sends how they differ from those sent before. Always true:
- Serving and decisions never wait for it.
- The queue of unsent changes is bounded. When it overflows, the changes are dropped, counted and reported as a gap, and
  the current state is sent instead.
- After an outage of Redis or a change of the leader it continues from what Redis has, so no difference that still
  exists is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from holdfast.control.redis_stream import Overwritten, RedisStream, RedisUnavailable
from holdfast.core.backoff import Backoff
from holdfast.core.tasks import beside, done_within, first
from holdfast.fleet.events import EventKind, Fact, FactChange, FactReader, StoreOutages, changes, gap, keep_leased
from holdfast.store.contract import Store
from holdfast.store.mirror import Mirror
from holdfast.wire import metrics

log = logging.getLogger("holdfast.control")

KEPT_MAX = 10_000  # unsent changes: some megabytes, and minutes of a large fleet
BATCH_MAX = 256  # changes in one transaction: a millisecond of Redis
# Pause between two reads: several changes of a subject within it become one event, which is enough for readers.
READ_S = 0.1
LOOK_S = 30.0  # how often an idle mirror checks that Redis still has what was sent
PAUSE_S = 1.0  # after a bug of ours


class EventMetrics:
    """Holds the event mirror's counters; without --redis there are none."""

    def __init__(self) -> None:
        self.on = False  # True: --redis was given
        self.sent = Counter[EventKind]()
        self.dropped = 0
        self.failed = 0  # failed calls of Redis
        self.waiting = 0
        self.connected = False

    def families(self) -> list[metrics.Metric]:
        if not self.on:
            return []
        sent = {(kind.value,): float(self.sent[kind]) for kind in EventKind}
        text = "events that Redis did not take in time, and that are not told any more"
        return [
            metrics.counter("holdfast_events_told", "events that Redis has taken", ("event",), sent),
            metrics.counter("holdfast_events_dropped", text, (), {(): self.dropped}),
            metrics.counter("holdfast_events_failures", "times that Redis did not take any", (), {(): self.failed}),
            metrics.gauge("holdfast_events_waiting", "changes that are not told yet", (), {(): self.waiting}),
            metrics.gauge("holdfast_events_connected", "1 while Redis takes them", (), {(): self.connected}),
        ]


class EventMirror:
    """Sends one fleet's events to Redis. `run` it in a task."""

    def __init__(
        self,
        store: Store,
        deployment: str,
        stream: RedisStream,
        metrics: EventMetrics,
        *,
        unix_s: Callable[[], float],
        rng: random.Random,
        kept_max: int = KEPT_MAX,
        read_s: float = READ_S,
        look_s: float = LOOK_S,
    ) -> None:
        self._store = store
        self._deployment = deployment
        self._stream = stream
        self._metrics = metrics
        metrics.on = True
        self._unix_s = unix_s
        self._backoff = Backoff(rng)
        self._kept_max, self._read_s, self._look_s = kept_max, read_s, look_s
        self._reader = FactReader(deployment)
        self._facts: dict[str, Fact] = {}  # as they were last read
        self._waiting = deque[FactChange]()
        self._news = asyncio.Event()
        self._begun = asyncio.Event()  # the store was read
        self._dropped = 0  # events dropped and not yet reported as a gap
        # As Redis has them. None: unknown, Redis must be asked.
        self._number: int | None = None
        self._sent: dict[str, Fact] = {}

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self._mirror()
                except Exception:
                    log.exception("bug in the mirror of events; beginning anew")
                    self._number = None
                await asyncio.sleep(PAUSE_S)
        finally:
            self._metrics.connected = False
            with contextlib.suppress(RedisUnavailable, OSError):
                await self._stream.close()

    async def _mirror(self) -> None:
        mirror = Mirror(self._store, self._reader.prefixes)
        async with (
            beside(mirror.run(), "events' mirror") as watching,
            beside(self._read(mirror), "events read") as reading,
            beside(self._send_all(), "events told") as telling,
        ):
            await first((), (watching, reading, telling))
            for task in (watching, reading, telling):
                if task.done():
                    task.result()

    # -- from the store

    async def _read(self, mirror: Mirror) -> None:
        loop, outages = asyncio.get_running_loop(), StoreOutages()
        await mirror.whole.wait()
        while True:
            left_s = outages.left_s(mirror.outages, loop.time())
            if not mirror.away:
                facts = self._reader.read(mirror.values)
                self._queue_changes(keep_leased(self._facts, facts) if left_s else facts)
            await done_within(mirror.news.wait(), left_s or None)
            await asyncio.sleep(self._read_s)
            mirror.news.clear()

    def _queue_changes(self, facts: dict[str, Fact]) -> None:
        found = changes(self._facts, facts, self._deployment, self._unix_s())
        self._facts = facts
        self._begun.set()
        if not found:
            return
        self._waiting.extend(found)
        if len(self._waiting) > self._kept_max + len(facts):  # at the start every fact is a change
            self._drop()
        self._metrics.waiting = len(self._waiting)
        self._news.set()

    def _drop(self) -> None:
        """Drop all waiting changes; the current state is sent in their place later."""
        self._count_dropped(count_events(self._waiting))
        self._waiting.clear()
        self._number = None
        log.warning("events: Redis takes none in time, and %d were dropped", self._dropped)

    def _count_dropped(self, events: int) -> None:
        self._dropped += events
        self._metrics.dropped += events

    # -- to Redis

    async def _send_all(self) -> None:
        await self._begun.wait()
        while True:
            self._news.clear()
            try:
                if not self._waiting and self._number != await self._stream.number():
                    self._number = None
                while self._number is None or self._waiting:
                    if self._number is None:
                        await self._resume()
                    if self._waiting:
                        await self._send_batch()
            except (RedisUnavailable, Overwritten) as error:
                self._on_redis_failed(error)
                await asyncio.sleep(self._backoff.next_s())
                continue
            self._on_redis_ok()
            await done_within(self._news.wait(), self._look_s)

    async def _resume(self) -> None:
        """Continue from what Redis says was sent."""
        batch = list(self._waiting)[:BATCH_MAX]
        number, sent = await self._stream.read_sent()
        if self._dropped or sent not in (self._sent, facts_after(self._sent, batch)):
            self._requeue_from(sent)
        elif sent != self._sent:  # the last batch arrived, but the answer was lost
            for _ in batch:
                self._waiting.popleft()
        self._number, self._sent = number, sent

    def _requeue_from(self, sent: dict[str, Fact]) -> None:
        now_s = self._unix_s()
        found = changes(sent, self._facts, self._deployment, now_s)
        if self._dropped:
            self._count_dropped(max(0, count_events(self._waiting) - count_events(found)))
            found.insert(0, gap(self._dropped, self._deployment, now_s))
        self._waiting = deque(found)

    async def _send_batch(self) -> None:
        assert self._number is not None, "Redis was asked"
        batch = list(self._waiting)[:BATCH_MAX]
        await self._stream.write(self._number, batch)
        if batch[0].event is not None and batch[0].event.event_type is EventKind.GAP:
            self._dropped -= batch[0].event.data["dropped"]
        if self._number is None:  # changes were dropped meanwhile: ask Redis what it has
            return
        for _ in batch:
            self._waiting.popleft()
        events = [one.event.event_type for one in batch if one.event is not None]
        self._number += len(events)
        self._sent = facts_after(self._sent, batch)
        self._metrics.sent.update(events)
        self._metrics.waiting = len(self._waiting)

    def _on_redis_ok(self) -> None:
        self._backoff.reset()
        if not self._metrics.connected:
            log.info("events: Redis takes them, and has %d", self._number)
        self._metrics.connected = True

    def _on_redis_failed(self, error: Exception) -> None:
        self._number = None
        if self._metrics.connected or not self._metrics.failed:
            log.warning("events: Redis does not take them, and is asked again: %s", error)
        self._metrics.connected = False
        self._metrics.failed += 1


def count_events(waiting: Iterable[FactChange]) -> int:
    """Return the number of the fleet's events among the changes, without gaps."""
    return sum(one.event is not None and one.event.event_type is not EventKind.GAP for one in waiting)


def facts_after(sent: dict[str, Fact], batch: Sequence[FactChange]) -> dict[str, Fact]:
    """Return the facts that are known to Redis once this batch is sent."""
    facts = dict(sent)
    for change in batch:
        if change.now is None:
            facts.pop(change.subject, None)
        else:
            facts[change.subject] = change.now
    return facts
