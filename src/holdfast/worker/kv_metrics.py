"""A worker's KV pool in Prometheus' words: Dynamo's names for what is used now, and counters of prefixes found.

Always true: a share is 0 to 1; counters never fall, also where a pool that was taken again counts from 0.
"""

from __future__ import annotations

from typing import Any

from holdfast.kv.usage import KvUse
from holdfast.wire import metrics

PREFIX = "dynamo_component_kvstats"


class KvMetrics:
    """Lines of one engine in `registry`."""

    def __init__(self, registry: metrics.MetricsRegistry) -> None:
        def gauge(name: str, text: str) -> metrics.Gauge:
            return metrics.Gauge(name, text, registry=registry)

        self._total = gauge(f"{PREFIX}_total_blocks", "KV blocks there are")
        self._active = gauge(f"{PREFIX}_active_blocks", "KV blocks that streams hold")
        self._usage = gauge(f"{PREFIX}_gpu_cache_usage_percent", "share of KV blocks that streams hold, 0 to 1")
        self._rate = gauge(f"{PREFIX}_gpu_prefix_cache_hit_rate", "share of prefix tokens that were found, 0 to 1")
        self._cached = gauge("holdfast_worker_kv_cached_blocks", "whole KV blocks that nobody holds and a prefix finds")
        self._asked = metrics.Counter(
            "holdfast_worker_prefix_tokens", "prompt tokens in whole blocks, looked for as KV", registry=registry
        )
        self._found = metrics.Counter(
            "holdfast_worker_prefix_hit_tokens", "of these, found and not computed", registry=registry
        )
        self._last = KvUse()

    def show(self, facts: dict[str, Any]) -> None:
        """Bring every line up to date; a pool that is not there has no blocks."""
        use, last = KvUse(**facts), self._last
        self._total.set(use.blocks)
        self._active.set(use.held)
        self._usage.set(use.usage)
        self._rate.set(use.hit_rate)
        self._cached.set(use.cached)
        if use.prefix_tokens < last.prefix_tokens:
            last = KvUse()
        self._asked.inc(use.prefix_tokens - last.prefix_tokens)
        self._found.inc(use.prefix_hit_tokens - last.prefix_hit_tokens)
        self._last = use
