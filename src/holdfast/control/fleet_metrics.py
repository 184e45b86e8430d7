"""The fleet's Prometheus metrics. The controller knows nothing of them: the fleet loop feeds them.

Always true: once there is a fleet, counters for alerts have a line from the first scrape on; removed models have none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from holdfast.fleet.actions import Verb
from holdfast.fleet.planner import ControllerEvent, FleetController
from holdfast.wire import metrics

# Upper bounds of a planner pass, in seconds: from no change, over one node of many, to a whole large fleet.
PASS_BOUNDS_S = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)
FAILURES = ("failed", "crashed", "lost")


class FleetMetrics:
    """Collects the fleet's metrics in one control, over all its leaderships."""

    def __init__(self) -> None:
        self._happened = Counter[str]()
        self._passes = [0] * (len(PASS_BOUNDS_S) + 1)
        self._passes_s = 0.0
        self.controller: FleetController | None = None  # the one that leads

    def passed(self, took_s: float) -> None:
        """Count a pass of the planner."""
        self._passes[bisect_left(PASS_BOUNDS_S, took_s)] += 1
        self._passes_s += took_s

    def on_event(self, one: ControllerEvent) -> None:
        self._happened[one.what] += 1

    def families(self) -> list[metrics.Metric]:
        """Return the metrics; an empty list if there never was a fleet."""
        if self.controller is None or not sum(self._passes):
            return []
        happened = self._happened
        there = Counter((one.model, one.level.word, one.phase.value) for one in self.controller.replicas())
        text = "how long the planner took for a pass"
        return [
            metrics.gauge(
                "holdfast_fleet_replicas", "replicas, by level and phase", ("model", "level", "phase"), there
            ),
            metrics.gauge(
                "holdfast_fleet_unmet",
                "1 where a model misses somebody",
                ("model",),
                {(key,): 1 for key in self.controller.unmet},
            ),
            metrics.counter(
                "holdfast_fleet_actions",
                "what was asked of nodes",
                ("verb",),
                {(verb.value,): happened[verb] for verb in Verb},
            ),
            metrics.counter(
                "holdfast_fleet_failures",
                "actions that failed, replicas that crashed, nodes that were lost",
                ("what",),
                {(what,): happened[what] for what in FAILURES},
            ),
            metrics.counter("holdfast_fleet_scalings", "numbers that scaling changed", (), {(): happened["scaled"]}),
            metrics.histogram(
                "holdfast_fleet_pass_seconds", text, (), PASS_BOUNDS_S, {(): (self._passes, self._passes_s)}
            ),
        ]
