"""The frontend's metrics, and one page for all frontends that share a port. Nothing here is called per token (facts
33): `streams.stats` counts on the per-token path, and a scrape reads those counts. The frontend that gets a scrape asks
the others, and labels each number with its frontend.

Always true: a frontend that does not answer in time is shown as down; a scrape ends when its client leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from holdfast.core.errors import Code
from holdfast.core.tasks import Tasks
from holdfast.core.tiers import Tier
from holdfast.health.liveness import Liveness
from holdfast.routing.degradation import SHED_REASONS
from holdfast.streams.roster import Roster
from holdfast.streams.stats import GAP_BOUNDS_S, DispatchStats
from holdfast.wire import metrics
from holdfast.wire.http.connection import HttpConnection

log = logging.getLogger("holdfast.frontend")

LABEL = "frontend"
_UP = "holdfast_frontend_up"

# Returns the pages of the other frontends of this port, by name; None for one that did not answer. Bounded in time.
Others = Callable[[], Awaitable[Mapping[str, bytes | None]]]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class FrontendMetrics:
    """Counters and histograms under Dynamo's names, so that dashboards carry over."""

    def __init__(self, stats: DispatchStats) -> None:
        self._stats = stats
        self.registry = registry = metrics.MetricsRegistry()

        def counter(name: str, text: str, *labels: str) -> metrics.Counter:
            return metrics.Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> metrics.Gauge:
            return metrics.Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, label: str, buckets: tuple[float, ...]) -> metrics.Histogram:
            return metrics.Histogram(f"dynamo_{name}", text, (label,), buckets=buckets, registry=registry)

        labels = ("model", "endpoint", "request_type", "status")
        self.requests = counter("dynamo_frontend_requests", "requests, by outcome", *labels)
        self.inflight = gauge("dynamo_frontend_inflight_requests", "requests under way", "model")
        self.queued = gauge("dynamo_frontend_queued_requests", "streams held for a worker", "model")
        pending = "held by requests for models that have no worker"
        self.pending_bytes = gauge("holdfast_frontend_lobby_bytes", pending)
        self.ttft = histogram("frontend_time_to_first_token_seconds", "request to first output", "model", _SECONDS)
        waited = "request to its first worker"
        name = "holdfast_frontend_queue_seconds"
        self.queue = metrics.Histogram(name, waited, ("model",), buckets=_SECONDS, registry=registry)
        sent = "streams sent to a worker, again for each attempt"
        self.dispatched = counter("holdfast_frontend_dispatched", sent, "model")
        metrics.Read(self._read, registry)
        self.duration = histogram("frontend_request_duration_seconds", "request to end", "model", _SECONDS)
        self.input_tokens = histogram("frontend_input_sequence_tokens", "prompt tokens", "model", _TOKENS)
        self.output_tokens = histogram("frontend_output_sequence_tokens", "generated tokens", "model", _TOKENS)
        self.output_total = counter("dynamo_frontend_output_tokens", "generated tokens", "model")
        left = "clients that left before their answer's end"
        self.disconnects = counter("dynamo_frontend_disconnected_clients", left)
        self.resumed = counter("holdfast_frontend_resumed", "attempts resumed on another worker, by cause", "cause")
        self.lost = counter("holdfast_streams_lost", "streams that ended with an error, by cause", "cause")
        for code in Code:  # shown from the start, for alerts
            self.lost.labels(code)
        self.refused = counter("holdfast_frontend_refused", "new requests that never ran, by cause", "cause")
        gaps = "gaps that failures made, from a stream's last token to its next"
        self.pause = histogram("migration_duration_seconds", gaps, "method", _SECONDS)
        self.workers = gauge("holdfast_workers", "workers by verdict", "verdict")
        self.standbys = gauge("holdfast_frontend_standbys", "connected workers that stand by")
        self.takeovers = counter("holdfast_frontend_takeovers", "standbys that said they are active now")
        readers = "readers of large bodies lost, by cause"
        self._readers_lost = counter("holdfast_body_readers_lost", readers, "cause")
        for cause in ("died", "slow", "stopped", "stuck"):  # shown from the start, for alerts
            self._readers_lost.labels(cause)
        self.verdicts = counter("holdfast_verdicts", "changes of verdict", "verdict")

    def reader_lost(self, cause: str) -> None:
        self._readers_lost.labels(cause).inc()

    def _read(self) -> list[metrics.Metric]:
        gaps = {(model,): (gaps.counts, gaps.sum_s) for model, gaps in self._stats.gaps.items()}
        name, text = "dynamo_frontend_inter_token_latency_seconds", "every gap between two tokens of a stream"
        moved = "streams that went on at another worker: takeover, reprefill, handover, token_mismatch (wrong answers)"
        shed = "new requests refused for want of capacity"
        shown = {(tier.label, reason): 0 for tier in Tier for reason in SHED_REASONS} | self._stats.shed
        labels = ("source_group", "target_group", "method")
        return [
            metrics.histogram(name, text, ("model",), GAP_BOUNDS_S, gaps),
            metrics.counter("dynamo_migration", moved, labels, self._stats.moved),
            metrics.counter("holdfast_frontend_shed", shed, ("tier", "reason"), shown),
        ]

    def page(self, roster: Roster, held: dict[str, int]) -> bytes:
        """Update the metrics that are counted elsewhere, and return the page."""
        stats = self._stats
        _catch_up(self.resumed, stats.resumed)
        _catch_up(self.lost, stats.lost)
        _catch_up(self.refused, stats.refused)
        _catch_up(self.dispatched, stats.dispatched)
        pauses, stats.pauses_s = stats.pauses_s, []
        for method, pause_s in pauses:
            self.pause.labels(method).observe(pause_s)
        for model, count in held.items():
            self.queued.labels(model).set(count)
        for verdict in Liveness:
            count = sum(watcher.liveness.state is verdict for watcher in roster.watchers.values())
            self.workers.labels(verdict).set(count)
        _catch_up(self.verdicts, roster.verdicts)
        self.standbys.set(len(roster.standbys))
        metrics.catch_up(self.takeovers, stats.takeovers)
        return metrics.page(self.registry)


def _catch_up(counter: metrics.Counter, totals: dict[str, int]) -> None:
    for cause, total in totals.items():
        metrics.catch_up(counter.labels(cause), total)


async def no_others() -> Mapping[str, bytes | None]:
    """Return no other pages: the port is not shared."""
    return {}


class Scrape:
    """Answers `/metrics` for all frontends of the port. Implements `wire.http.response.Responder` while it asks."""

    def __init__(self, connection: HttpConnection, name: str, own: bytes, others: Others, tasks: Tasks) -> None:
        self._connection: HttpConnection | None = connection
        connection.responder = self
        self._task = tasks.spawn(self._run(name, own, others), "scrape")

    async def _run(self, name: str, own: bytes, others: Others) -> None:
        """Ask the other frontends, and answer; the root of its task."""
        try:
            found = await others()
        except Exception:
            log.exception("bug while asking the other frontends")
            found = {}
        if self._connection is not None:
            self._connection.respond(200, page({name: own, **found}), metrics.CONTENT_TYPE)

    def client_gone(self) -> None:
        self._connection = None
        self._task.cancel()

    def client_writable(self) -> None:
        """Do nothing: the answer is one piece."""

    def cut_off(self, why: str) -> None:
        connection, self._connection = self._connection, None
        self._task.cancel()
        if connection is not None:
            connection.respond(503, why.encode(), b"text/plain; charset=utf-8")


def page(pages: Mapping[str, bytes | None]) -> bytes:
    """Join the pages of all frontends that answered, and add which did."""
    answered = {name: text for name, text in pages.items() if text is not None}
    up = "".join(f'{_UP}{{{LABEL}="{name}"}} {int(name in answered)}\n' for name in pages)
    head = f"# HELP {_UP} whether the frontend of this port answered this scrape\n# TYPE {_UP} gauge\n"
    return metrics.merged(answered, LABEL) + (head + up).encode()
