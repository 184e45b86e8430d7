"""Serves the worker's status over HTTP: `/live`, `/health`, `/metrics`, and admin actions for operators.

Always true: each response is computed from the current facts and lifecycle; probes never wait;
`worker.admin_actions.admin_refusal` decides whether a caller may start an action; without the token it refuses a web
page in an operator's browser. Where Dynamo has a metric, ours has the same name and labels, so that its dashboards
work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from holdfast.failover.lifecycle import Lifecycle, State, live, ready
from holdfast.kv.pool import KvUse
from holdfast.spec.launch import WorkerLaunch
from holdfast.wire import metrics
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest
from holdfast.wire.http.response import refusal
from holdfast.worker.admin_actions import AdminAction, AdminActions, admin_refusal

FAILOVER = "dynamo_component_engine_failover"
KV = "dynamo_component_kvstats"
LABELS = ("engine_id", "model", "dynamo_component")

GAUGES = {
    "streams": "streams on this worker",
    "running": "streams the engine advances now",
    "waiting": "streams admitted and not yet running",
    "step_ms_p99": "recent engine steps, 99th percentile, milliseconds",
}
# Gauges, not counters: they restart at 0 with every wake. A worker without a group shows 0.
RESUMES = {
    "resumed_total": "streams that came back with some of their answer, since the last wake",
    "resumed_resident_total": "of these, with all full KV blocks found",
    "resumed_evicted_total": "of these, with a KV block that was adopted and evicted before they came",
    "resumed_missing_total": "of these, with a KV block that was not there to be adopted",
    "recomputed_tokens_max": "most KV positions that one of them computed again",
    "recomputed_tokens_resident_max": "most KV positions that one with all its blocks computed again",
}
# By the field of `KvUse`.
KV_GAUGES = {
    "blocks": (f"{KV}_total_blocks", "KV blocks there are"),
    "held": (f"{KV}_active_blocks", "KV blocks that streams hold"),
    "usage": (f"{KV}_gpu_cache_usage_percent", "share of KV blocks that streams hold, 0 to 1"),
    "hit_rate": (f"{KV}_gpu_prefix_cache_hit_rate", "share of prefix tokens that were found, 0 to 1"),
    "cached": ("holdfast_worker_kv_cached_blocks", "whole KV blocks that no stream holds, found by prefix"),
}
COUNTERS = {
    "steps": "engine steps since the start",
    "tokens": "tokens made since the start",
    "requests": "requests taken since the start",
}


class WorkerMetrics:
    """Renders one worker's metrics.

    The `Lifecycle` and the facts do the counting, so a scrape sees every transition whole and a wake does no extra
    work. Always true: every state has a line from the first scrape on (0, not absent); a share is 0 to 1; a counter
    never decreases, even when a KV pool restarts its own counts at 0."""

    def __init__(self) -> None:
        registry = self._registry = metrics.MetricsRegistry()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> metrics.Gauge:
            return metrics.Gauge(name, text, labels, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> metrics.Counter:
            return metrics.Counter(name, text, labels, registry=registry)

        self._status = gauge("holdfast_worker_state", "1 for the worker's state", ("status",))
        self._gauges = {
            name: gauge(f"holdfast_worker_{name.removesuffix('_total')}", text)
            for name, text in (GAUGES | RESUMES).items()
        }
        self._counters = {f"{name}_total": counter(f"holdfast_worker_{name}", text) for name, text in COUNTERS.items()}

        self._state = gauge(f"{FAILOVER}_state", "1 for the state the engine is in", (*LABELS, "state"))
        self._entered = gauge(f"{FAILOVER}_state_entered_timestamp_seconds", "when that state began, unix time", LABELS)
        lasted = "how long each state lasted, the last time it was left"
        self._durations = gauge(f"{FAILOVER}_last_state_duration_seconds", lasted, (*LABELS, "state"))
        self._transitions = counter(f"{FAILOVER}_transitions", "changes of state", (*LABELS, "from_state", "to_state"))
        self._attempts = counter(f"{FAILOVER}_switch_attempts", "times it won the lock after another", LABELS)
        self._successes = counter(f"{FAILOVER}_switch_success", "times it then woke and announced itself", LABELS)

        self._kv = {field: gauge(name, text) for field, (name, text) in KV_GAUGES.items()}
        self._asked = counter("holdfast_worker_prefix_tokens", "prompt tokens in whole blocks, looked for as KV")
        self._found = counter("holdfast_worker_prefix_hit_tokens", "of these, found and not computed")
        self._last_use = KvUse()

    def page(self, life: Lifecycle, entered_unix_s: float, facts: dict[str, Any]) -> bytes:
        """Return the metrics page; `entered_unix_s` is when the lifecycle's state began."""
        self._status.clear()
        self._status.labels(facts["status"]).set(1)
        for name, gauge in self._gauges.items():
            gauge.set(facts.get(name, 0) if name in RESUMES else facts[name])
        for name, counter in self._counters.items():
            metrics.catch_up(counter, facts[name])
        labels = (str(facts.get("engine_id", 0)), str(facts.get("model", "")), str(facts.get("component", "worker")))
        self._entered.labels(*labels).set(entered_unix_s)
        self._show_failover(life, labels)
        self._show_kv(KvUse(**facts.get("kv", {})))
        return metrics.page(self._registry)

    def _show_failover(self, life: Lifecycle, labels: tuple[str, str, str]) -> None:
        for state in State:
            self._state.labels(*labels, state).set(state is life.state)
        for state, duration_s in life.durations_s.items():
            self._durations.labels(*labels, state).set(duration_s)
        for (before, after), count in life.transitions.items():
            metrics.catch_up(self._transitions.labels(*labels, before, after), count)
        metrics.catch_up(self._attempts.labels(*labels), life.switch_attempts)
        metrics.catch_up(self._successes.labels(*labels), life.switch_successes)

    def _show_kv(self, use: KvUse) -> None:
        """Set the metrics of the KV pool; all are 0 without a pool."""
        for field, gauge in self._kv.items():
            gauge.set(getattr(use, field))
        last = self._last_use if use.prefix_tokens >= self._last_use.prefix_tokens else KvUse()
        self._asked.inc(use.prefix_tokens - last.prefix_tokens)
        self._found.inc(use.prefix_hit_tokens - last.prefix_hit_tokens)
        self._last_use = use


class WorkerStatusPage:
    """The handler of the status server's requests; `clock` is the clock that the lifecycle's times come from."""

    def __init__(
        self,
        facts: Callable[[], dict[str, Any]],
        lifecycle: Callable[[], Lifecycle],
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
        *,
        settings: WorkerLaunch,
        actions: Mapping[str, AdminAction],
        admin: AdminActions,
    ) -> None:
        self._facts = facts
        self._lifecycle = lifecycle
        self._clock = clock
        self._settings = settings
        self._actions = actions
        self._admin = admin
        self._pages = {"/live": self._live, "/health": self._health, "/metrics": self._scrape}
        self._metrics = WorkerMetrics()
        self._unix_clock = unix_clock
        self._entered_unix_s = unix_clock()

    def entered(self) -> None:
        """Note the wall time at which the lifecycle entered a state; the lifecycle has monotonic times only."""
        self._entered_unix_s = self._unix_clock()

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        actions = {f"/engine/{name}": action for name, action in self._actions.items()}
        allowed = ("GET", "HEAD") if request.path in self._pages else ("POST",)
        if request.path not in self._pages and request.path not in actions:
            paths = ", ".join((*self._pages, *actions))
            connection.respond(404, refusal(404, f"unknown path {request.path[:200]!r}; there are {paths}"))
        elif request.method not in allowed:
            allow = ((b"allow", ", ".join(allowed).encode()),)
            connection.respond(405, refusal(405, f"only {allowed[0]} is allowed here"), headers=allow)
        elif request.path in self._pages:
            self._pages[request.path](connection)
        elif why := _admin_refusal(request.headers, connection.peer_uid, self._settings.engine_token):
            connection.respond(403, refusal(403, why))
        else:
            self._admin.start(request.path, actions[request.path], _HttpReply(connection).give)

    # -- probes

    def _live(self, connection: HttpConnection) -> None:
        life = self._lifecycle()
        alive, reason = live(life, self._clock(), self._settings.starting_ready)
        status = "live" if alive else "notlive"
        body = {"status": status, "state": life.state, "reason": reason}
        connection.respond(200 if alive else 503, msgspec.json.encode(body))

    def _health(self, connection: HttpConnection) -> None:
        life, now_s, settings = self._lifecycle(), self._clock(), self._settings
        alive, _ = live(life, now_s, settings.starting_ready)
        fit, reason = ready(life, now_s, settings.starting_ready, settings.health_endpoints)
        facts = self._facts()
        facts |= {"state": life.state, "entered_unix_s": self._entered_unix_s, "epoch": life.epoch}
        facts |= {"live": alive, "ready": fit, "reason": reason or facts.get("reason")}
        connection.respond(200 if fit else 503, msgspec.json.encode(facts))

    def _scrape(self, connection: HttpConnection) -> None:
        page = self._metrics.page(self._lifecycle(), self._entered_unix_s, self._facts())
        connection.respond(200, page, metrics.CONTENT_TYPE)


class _HttpReply:
    """The response to an operator's request; only the first call of `give` sends one."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection: HttpConnection | None = connection
        connection.responder = self

    def give(self, status: int, word: str, message: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            # In the shape of Dynamo's engine routes.
            connection.respond(status, msgspec.json.encode({"status": word, "message": message}))

    def client_gone(self) -> None:
        self._connection = None

    def client_writable(self) -> None:
        """Do nothing: the answer is one small piece."""

    def cut_off(self, why: str) -> None:
        self.give(503, "error", why)


def _admin_refusal(headers: Mapping[bytes, bytes], uid: int | None, token: str) -> str:
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    bearer = given.strip() if scheme.lower() == b"bearer" else b""
    return admin_refusal(bearer if b"authorization" in headers else None, uid, token, web_page=b"origin" in headers)
