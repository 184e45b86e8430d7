"""A worker in Prometheus' words, under the names and labels that dashboards for Dynamo look for where they have some.

Always true: what is counted follows from the `Lifecycle` and the facts of that moment, which count by themselves, so a
scrape can neither miss a transition nor see half of one, and a wake pays for none of this; every state has a line from
the first scrape on (0, not absent); a share is 0 to 1; counters never fall, also where a pool that was taken again
counts from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.failover.lifecycle import Lifecycle, State
from holdfast.kv.pool import KvUse
from holdfast.wire import metrics

FAILOVER = "dynamo_component_engine_failover"
KV = "dynamo_component_kvstats"
WHO = ("engine_id", "model", "dynamo_component")

GAUGES = {
    "streams": "streams on this worker",
    "running": "streams the engine advances now",
    "waiting": "streams admitted and not yet running",
    "step_ms_p99": "recent engine steps, 99th percentile, milliseconds",
}
# Since the last wake, so they may fall: none is a counter. A worker without a group tells none, and shows 0.
RESUMES = {
    "resumed_total": "streams that came back with some of their answer, since the last wake",
    "resumed_resident_total": "of these, all of whose full KV blocks were found",
    "resumed_evicted_total": "of these, with a KV block that was adopted and evicted before they came",
    "resumed_missing_total": "of these, with a KV block that was not there to be adopted",
    "recomputed_tokens_max": "most KV positions that one of them computed again",
    "recomputed_tokens_resident_max": "most KV positions that one with all its blocks computed again",
}
COUNTERS = {
    "steps": "engine steps since the start",
    "tokens": "tokens made since the start",
    "requests": "requests taken since the start",
}


class WorkerMetrics:
    """The lines of one worker."""

    def __init__(self, unix_clock: Callable[[], float]) -> None:
        registry = self._registry = metrics.MetricsRegistry()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> metrics.Gauge:
            return metrics.Gauge(name, text, labels, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> metrics.Counter:
            return metrics.Counter(name, text, labels, registry=registry)

        self._unix_clock = unix_clock
        self.entered_unix_s = unix_clock()
        self._status = gauge("holdfast_worker_state", "1 for the worker's state", ("status",))
        self._gauges = {
            name: gauge(f"holdfast_worker_{name.removesuffix('_total')}", text)
            for name, text in (GAUGES | RESUMES).items()
        }
        self._counters = {f"{name}_total": counter(f"holdfast_worker_{name}", text) for name, text in COUNTERS.items()}

        self._state = gauge(f"{FAILOVER}_state", "1 for the state the engine is in", (*WHO, "state"))
        self._entered = gauge(f"{FAILOVER}_state_entered_timestamp_seconds", "when that state began, unix time", WHO)
        lasted = "how long each state lasted, the last time it was left"
        self._durations = gauge(f"{FAILOVER}_last_state_duration_seconds", lasted, (*WHO, "state"))
        self._transitions = counter(f"{FAILOVER}_transitions", "changes of state", (*WHO, "from_state", "to_state"))
        self._attempts = counter(f"{FAILOVER}_switch_attempts", "times it won the lock after another", WHO)
        self._successes = counter(f"{FAILOVER}_switch_success", "times it then woke and announced itself", WHO)

        self._total = gauge(f"{KV}_total_blocks", "KV blocks there are")
        self._active = gauge(f"{KV}_active_blocks", "KV blocks that streams hold")
        self._usage = gauge(f"{KV}_gpu_cache_usage_percent", "share of KV blocks that streams hold, 0 to 1")
        self._rate = gauge(f"{KV}_gpu_prefix_cache_hit_rate", "share of prefix tokens that were found, 0 to 1")
        self._cached = gauge("holdfast_worker_kv_cached_blocks", "whole KV blocks that nobody holds and a prefix finds")
        self._asked = counter("holdfast_worker_prefix_tokens", "prompt tokens in whole blocks, looked for as KV")
        self._found = counter("holdfast_worker_prefix_hit_tokens", "of these, found and not computed")
        self._last_use = KvUse()

    def entered(self) -> None:
        """Another state, just now: the calendar's time is known only in this moment."""
        self.entered_unix_s = self._unix_clock()

    def page(self, life: Lifecycle, facts: dict[str, Any]) -> bytes:
        """Every line, up to date."""
        self._status.clear()
        self._status.labels(facts["status"]).set(1)
        for name, gauge in self._gauges.items():
            gauge.set(facts.get(name, 0) if name in RESUMES else facts[name])
        for name, counter in self._counters.items():
            metrics.catch_up(counter, facts[name])
        who = (str(facts.get("engine_id", 0)), str(facts.get("model", "")), str(facts.get("component", "worker")))
        self._show_failover(life, who)
        self._show_kv(KvUse(**facts.get("kv", {})))
        return metrics.page(self._registry)

    def _show_failover(self, life: Lifecycle, who: tuple[str, str, str]) -> None:
        for state in State:
            self._state.labels(*who, state).set(state is life.state)
        self._entered.labels(*who).set(self.entered_unix_s)
        for state, duration_s in life.durations_s.items():
            self._durations.labels(*who, state).set(duration_s)
        for (before, after), count in life.transitions.items():
            metrics.catch_up(self._transitions.labels(*who, before, after), count)
        metrics.catch_up(self._attempts.labels(*who), life.switch_attempts)
        metrics.catch_up(self._successes.labels(*who), life.switch_successes)

    def _show_kv(self, use: KvUse) -> None:
        """A pool that is not there has no blocks."""
        self._total.set(use.blocks)
        self._active.set(use.held)
        self._usage.set(use.usage)
        self._rate.set(use.hit_rate)
        self._cached.set(use.cached)
        last = self._last_use if use.prefix_tokens >= self._last_use.prefix_tokens else KvUse()
        self._asked.inc(use.prefix_tokens - last.prefix_tokens)
        self._found.inc(use.prefix_hit_tokens - last.prefix_hit_tokens)
        self._last_use = use
