"""What a frontend saw of each worker, as it reports it to control: attempts and how they ended, tokens, streams' time.

Tokens are on the per-token path: they are counted a frame at a time (facts 33). Streams' time is counted at each tick,
of streams that have made a token here: what waits for its first says nothing of the worker's pace.

Long streams end seldom, so a failure is also over when an attempt made tokens after it. And a request may be to blame
itself: it counts against one worker at most until it has made tokens again, and against none if it fails on a second.

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
# An attempt that made so many tokens went well so far. A worker that fails every request after its first tokens does
# not: none of its attempts gets there.
PROGRESS_TOKENS = 16


class Sighting:
    """One worker. Slotted and mutable: it is stepped for every frame."""

    __slots__ = (
        "_counted", "_failed_s", "breath", "excused", "failed", "outlived", "seen_s", "stream_s", "succeeded", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.succeeded = 0
        self.failed: dict[str, int] = {}
        self.outlived = 0
        self.excused = 0
        self.tokens = 0
        self.stream_s = 0.0
        self.breath = 0  # counts what comes or breaks at once
        self._counted: dict[Kind, int] = {}  # the breath in which a failure of a kind was last counted
        self._failed_s = 0.0  # when the last failure was that no tokens followed yet; 0: none
        self.seen_s = 0.0  # when it was last known

    def fails(self, kind: Kind | None, flight: Flight, streams: Iterable[Flight], now_s: float) -> None:
        """Count an attempt that ended by its fault; None: by another's. `streams`: that it has, with this one."""
        if kind is None or self._is_the_requests(flight):
            return
        flight.blamed, flight.excused = self, self._counted.get(kind) == self.breath
        if flight.excused:  # with the others of this breath it counts as one
            return
        self._look(streams)
        self._counted[kind] = self.breath
        self.failed[kind] = self.failed.get(kind, 0) + 1
        self._failed_s = now_s

    def _is_the_requests(self, flight: Flight) -> bool:
        """Whether a request's failure was counted before and the request has made no progress since; where that was
        against another worker, it is taken back."""
        first = flight.blamed
        if first is None or made(flight) >= PROGRESS_TOKENS:
            return False
        if first is not self and not flight.excused:
            flight.excused = True
            first.excused += 1
        return True

    def _look(self, streams: Iterable[Flight]) -> None:
        """Note whether an attempt has made tokens since the last failure."""
        if self._failed_s and any(s.last_s > self._failed_s and made(s) >= PROGRESS_TOKENS for s in streams):
            self.outlived += 1
            self._failed_s = 0.0

    def told(self, streams: Iterable[Flight], fall: int, now_s: float) -> Seen:
        """Its part of a report, with the streams that it has now."""
        streams = list(streams)
        self._look(streams)
        waits = [now_s - max(flight.last_s, flight.sent_s) for flight in streams]
        return Seen(
            succeeded=self.succeeded,
            failed=dict(self.failed),
            outlived=self.outlived,
            excused=self.excused,
            tokens=self.tokens,
            stream_s=round(self.stream_s, 2),
            open=len(waits),
            silent_s=round(max(waits, default=0.0), 1),
            fall=fall,
        )


def made(flight: Flight) -> int:
    """Return the tokens that its current attempt has made."""
    return flight.ledger.emitted - flight.ledger.mark


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
