"""What a frontend saw of each worker, as it reports it to control: attempts and how they ended, tokens, streams' time.

Tokens are on the per-token path: they are counted a frame at a time (facts 33). Streams' time is counted at each tick,
of streams that have made a token here: what waits for its first says nothing of the worker's pace.

Always true: counts only grow; all streams that end in one breath (a broken connection, a stall, one frame) and of one
kind are one failure; only what `health.breaker.blame` calls the worker's own is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.health.breaker import Kind
from holdfast.health.records import Seen
from holdfast.streams.flight import Flight

# A worker that is gone is reported for so long: control hears of what it did last, also past a short loss of the store.
LINGER_S = 60.0


class Sighting:
    """One worker. Slotted and mutable: it is stepped for every frame."""

    __slots__ = ("_counted", "breath", "failed", "seen_s", "stream_s", "succeeded", "tokens")

    def __init__(self) -> None:
        self.succeeded = 0
        self.failed: dict[str, int] = {}
        self.tokens = 0
        self.stream_s = 0.0
        self.breath = 0  # counts what comes or breaks at once
        self._counted: dict[Kind, int] = {}  # the breath in which a failure of a kind was last counted
        self.seen_s = 0.0  # when it was last known

    def fails(self, kind: Kind | None) -> None:
        """An attempt ended by its fault; None: by another's."""
        if kind is not None and self._counted.get(kind) != self.breath:
            self._counted[kind] = self.breath
            self.failed[kind] = self.failed.get(kind, 0) + 1

    def told(self, streams: Iterable[Flight], fall: int, now_s: float) -> Seen:
        """Its part of a report, with the streams that it has now."""
        waits = [now_s - max(flight.last_s, flight.sent_s) for flight in streams]
        return Seen(
            succeeded=self.succeeded,
            failed=dict(self.failed),
            tokens=self.tokens,
            stream_s=round(self.stream_s, 2),
            open=len(waits),
            silent_s=round(max(waits, default=0.0), 1),
            fall=fall,
        )


class Sightings:
    """All workers that a frontend has met, by instance."""

    def __init__(self) -> None:
        self._by_instance: dict[int, Sighting] = {}

    def of(self, instance: int) -> Sighting:
        """A worker's, the same for all its connections."""
        return self._by_instance.setdefault(instance, Sighting())

    def told(self, here: Mapping[int, tuple[Iterable[Flight], int]], now_s: float) -> dict[str, Seen]:
        """Of every worker that was sent anything; `here`: streams, and the last known fall, of those that are known."""
        told: dict[str, Seen] = {}
        for instance, sighting in list(self._by_instance.items()):
            streams, fall = here.get(instance, ((), 0))
            if instance in here:
                sighting.seen_s = now_s
            elif now_s - sighting.seen_s > LINGER_S:
                del self._by_instance[instance]
                continue
            seen = sighting.told(streams, fall, now_s)
            if seen.succeeded or seen.failed or seen.tokens or seen.open:
                told[f"{instance:x}"] = seen
        return told
