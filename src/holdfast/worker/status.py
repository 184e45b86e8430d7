"""The worker's status page over HTTP: `/live`, `/health`, `/metrics`, and levers for operators.

Always true: a page is made from the facts and the lifecycle of that moment; probes never wait; levers are for those who
may pull them (`worker.levers`), and a page in such a user's browser may not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from holdfast.failover.lifecycle import Entered, Lifecycle, live, ready
from holdfast.spec.launch import WorkerLaunch
from holdfast.wire import metrics
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest
from holdfast.wire.http.status_page import error_body
from holdfast.worker.levers import Action, Levers, refusal
from holdfast.worker.metrics import WorkerMetrics


class StatusPage:
    """Answers probes from facts asked for at that moment; `clock` is the one the lifecycle is told."""

    def __init__(
        self,
        facts: Callable[[], dict[str, Any]],
        lifecycle: Callable[[], Lifecycle],
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
        *,
        settings: WorkerLaunch,
        actions: Mapping[str, Action],
        levers: Levers,
    ) -> None:
        self._facts = facts
        self._lifecycle = lifecycle
        self._clock = clock
        self._settings = settings
        self._actions = actions
        self._levers = levers
        self._pages = {"/live": self._live, "/health": self._health, "/metrics": self._scrape}
        self._metrics = WorkerMetrics(unix_clock)

    def entered(self, effect: Entered) -> None:
        """The lifecycle is in another state, just now."""
        self._metrics.entered()

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        levers = {f"/engine/{name}": action for name, action in self._actions.items()}
        allowed = ("GET", "HEAD") if request.path in self._pages else ("POST",)
        if request.path not in self._pages and request.path not in levers:
            paths = ", ".join((*self._pages, *levers))
            connection.respond(404, error_body(f"unknown path {request.path[:200]!r}; there are {paths}"))
        elif request.method not in allowed:
            allow = ((b"allow", ", ".join(allowed).encode()),)
            connection.respond(405, error_body(f"only {allowed[0]} is allowed here"), headers=allow)
        elif request.path in self._pages:
            self._pages[request.path](connection)
        elif why := _refusal(request.headers, connection.peer_uid, self._settings.engine_token):
            connection.respond(403, error_body(why))
        else:
            self._levers.pull(request.path, levers[request.path], _Answer(connection))

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
        facts |= {"state": life.state, "entered_unix_s": self._metrics.entered_unix_s, "epoch": life.epoch}
        facts |= {"live": alive, "ready": fit, "reason": reason or facts.get("reason")}
        connection.respond(200 if fit else 503, msgspec.json.encode(facts))

    def _scrape(self, connection: HttpConnection) -> None:
        page = self._metrics.page(self._lifecycle(), self._facts())
        connection.respond(200, page, metrics.CONTENT_TYPE)


class _Answer:
    """The one answer to an operator's request, whoever gives it first."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection: HttpConnection | None = connection
        connection.responder = self

    def give(self, status: int, word: str, message: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.respond(status, _outcome(word, message))

    def client_gone(self) -> None:
        self._connection = None

    def client_writable(self) -> None:
        """Nothing waits for it: the answer is one small piece."""

    def cut_off(self, why: str) -> None:
        self.give(503, "error", why)


def _refusal(headers: Mapping[bytes, bytes], uid: int | None, token: str) -> str:
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    bearer = given.strip() if scheme.lower() == b"bearer" else b""
    return refusal(bearer if b"authorization" in headers else None, uid, token, web_page=b"origin" in headers)


def _outcome(word: str, message: str) -> bytes:
    """In the shape Dynamo's engine routes answer in."""
    return msgspec.json.encode({"status": word, "message": message})
