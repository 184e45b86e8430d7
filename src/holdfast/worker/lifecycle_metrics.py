"""The lifecycle in Prometheus' words, under the names and labels that dashboards for Dynamo look for.

Always true: what is counted follows from the `Lifecycle` of that moment, which counted each transition itself, so a
scrape can neither miss one nor see half of one, and a wake pays for none of this; every state has a line from the first
scrape on (0, not absent).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.failover.lifecycle import Lifecycle, State
from holdfast.wire import metrics

PREFIX = "dynamo_component_engine_failover"
WHO = ("engine_id", "model", "dynamo_component")


class LifecycleMetrics:
    """Lines of one engine in `registry`."""

    def __init__(self, registry: metrics.MetricsRegistry, unix_clock: Callable[[], float]) -> None:
        self._unix_clock = unix_clock
        self.entered_unix_s = unix_clock()
        self._state = metrics.Gauge(
            f"{PREFIX}_state", "1 for the state the engine is in", (*WHO, "state"), registry=registry
        )
        self._entered_unix = metrics.Gauge(
            f"{PREFIX}_state_entered_timestamp_seconds", "when that state began, unix time", WHO, registry=registry
        )
        self._durations = metrics.Gauge(
            f"{PREFIX}_last_state_duration_seconds",
            "how long each state lasted, the last time it was left",
            (*WHO, "state"),
            registry=registry,
        )
        self._transitions = metrics.Counter(
            f"{PREFIX}_transitions", "changes of state", (*WHO, "from_state", "to_state"), registry=registry
        )
        self._attempts = metrics.Counter(
            f"{PREFIX}_switch_attempts", "times it won the lock after another", WHO, registry=registry
        )
        self._successes = metrics.Counter(
            f"{PREFIX}_switch_success", "times it then woke and announced itself", WHO, registry=registry
        )

    def entered(self) -> None:
        """Another state, just now: the calendar's time is known only in this moment."""
        self.entered_unix_s = self._unix_clock()

    def show(self, life: Lifecycle, facts: dict[str, Any]) -> None:
        """Bring every line up to date; `facts` say whose they are."""
        who = (str(facts.get("engine_id", 0)), str(facts.get("model", "")), str(facts.get("component", "worker")))
        for state in State:
            self._state.labels(*who, state).set(state is life.state)
        self._entered_unix.labels(*who).set(self.entered_unix_s)
        for state, duration_s in life.durations_s.items():
            self._durations.labels(*who, state).set(duration_s)
        for (before, after), count in life.transitions.items():
            metrics.catch_up(self._transitions.labels(*who, before, after), count)
        metrics.catch_up(self._attempts.labels(*who), life.switch_attempts)
        metrics.catch_up(self._successes.labels(*who), life.switch_successes)
