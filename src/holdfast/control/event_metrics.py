"""The mirror of events in Prometheus' words; none of them where no Redis was named."""

from __future__ import annotations

from collections import Counter

from holdfast.fleet.events import Kind
from holdfast.wire import metrics


class EventMetrics:
    """Of one control."""

    def __init__(self) -> None:
        self.on = False  # a Redis was named
        self.told = Counter[Kind]()
        self.dropped = 0
        self.failed = 0  # calls of Redis
        self.waiting = 0
        self.connected = False

    def families(self) -> list[metrics.Metric]:
        if not self.on:
            return []
        told = {(kind.value,): float(self.told[kind]) for kind in Kind}
        text = "events that Redis did not take in time, and that are not told any more"
        return [
            metrics.counter("holdfast_events_told", "events that Redis has taken", ("event",), told),
            metrics.counter("holdfast_events_dropped", text, (), {(): self.dropped}),
            metrics.counter("holdfast_events_failures", "times that Redis did not take any", (), {(): self.failed}),
            metrics.gauge("holdfast_events_waiting", "changes that are not told yet", (), {(): self.waiting}),
            metrics.gauge("holdfast_events_connected", "1 while Redis takes them", (), {(): self.connected}),
        ]
