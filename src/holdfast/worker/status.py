"""The worker's status page over HTTP: `/live`, `/health`, `/metrics`, and two levers for operators.

Always true: a page is made from the facts and the lifecycle of that moment; probes never wait; at most one operator's
action is under way, it ends within `ACTION_S`, and a client who leaves does not stop it half-way; levers are for those
who may pull them: they stop and start serving, so not whoever reaches the port. Who has the token may, from anywhere;
else the kernel must say that the other end is a process of this machine, of this user or root; and a page in that
user's browser may not.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from holdfast.core.errors import UserError
from holdfast.core.tasks import Tasks
from holdfast.failover.lifecycle import Entered, Lifecycle, Misstep, live, ready
from holdfast.spec.launch import WorkerLaunch
from holdfast.wire import metrics
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest
from holdfast.worker.metrics import WorkerMetrics

log = logging.getLogger("holdfast.worker")

# Longer than a drain or a remap (30 s) by its own bound; shorter than the patience of whoever asks with curl.
ACTION_S = 60.0

Action = Callable[[], Awaitable[str]]  # answers with a sentence; refuses with a UserError
Actions = dict[str, Action]  # by the last word of their path; looked into when asked, so levers may come and go


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
        action_s: float = ACTION_S,
    ) -> None:
        self._facts = facts
        self._lifecycle = lifecycle
        self._clock = clock
        self._settings = settings
        self._actions = actions
        self._action_s = action_s
        self._tasks = Tasks("levers")  # one at a time
        self._under_way = ""
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
            connection.respond(404, _error(f"unknown path {request.path[:200]!r}; there are {paths}"))
        elif request.method not in allowed:
            allow = ((b"allow", ", ".join(allowed).encode()),)
            connection.respond(405, _error(f"only {allowed[0]} is allowed here"), headers=allow)
        elif request.path in self._pages:
            self._pages[request.path](connection)
        elif why := _refusal(request.headers, connection.peer_uid, self._settings.engine_token):
            connection.respond(403, _error(why))
        else:
            self._act(connection, request.path, levers[request.path])

    async def close(self) -> None:
        """End the action under way, if there is one."""
        await self._tasks.stop()

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

    # -- levers

    def _act(self, connection: HttpConnection, path: str, action: Action) -> None:
        if len(self._tasks):
            connection.respond(409, _outcome("error", f"{self._under_way} is still under way"))
            return
        answer = _Answer(connection)
        self._under_way = path
        self._tasks.spawn(self._run(path, action, answer), path)

    async def _run(self, path: str, action: Action, answer: _Answer) -> None:
        """The root of an action's task."""
        log.info("%s: asked for", path)
        try:
            async with asyncio.timeout(self._action_s) as bound:
                message = await action()
            answer.give(200, "ok", message)
        except (UserError, Misstep) as refusal:
            log.info("%s: refused: %s", path, refusal)
            answer.give(409, "error", str(refusal))
        except Exception as error:
            if bound.expired():
                log.warning("%s: given up after %g s", path, self._action_s)
                answer.give(504, "error", f"given up after {self._action_s:g} s")
                return
            log.exception("%s failed", path)
            answer.give(500, "error", f"failed: {error!r}")
        except asyncio.CancelledError:
            answer.cut_off("the worker stops")
            raise


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
    """Why a request may not pull a lever, in words that say how it might; "": it may."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if token and scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token.encode()):
        return ""
    mend = "send `Authorization: Bearer` with its HOLDFAST_ENGINE_TOKEN" if token else "set HOLDFAST_ENGINE_TOKEN"
    if b"authorization" in headers:
        return f"the token is wrong; {mend}"
    if b"origin" in headers:
        return f"a web page may not do this; {mend}"
    if uid is None or uid not in (os.getuid(), 0):
        who = "whoever asks from another machine" if uid is None else f"uid {uid}"
        return f"{who} may not do this, only uid {os.getuid()} and root on this machine; or {mend}"
    return ""


def _outcome(word: str, message: str) -> bytes:
    """In the shape Dynamo's engine routes answer in."""
    return msgspec.json.encode({"status": word, "message": message})


def _error(message: str) -> bytes:
    """In the shape the frontend's errors have."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return msgspec.json.encode({"error": error})
