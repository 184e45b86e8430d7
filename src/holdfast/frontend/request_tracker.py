"""Tracks requests: those under way, the metrics of each when it is over, and its line in the access log.

Always true: an entry of the access log is one line, whatever a client sent; it costs nothing per token, and nothing if
the log is off.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.core.tiers import Tier
from holdfast.frontend.api.errors import ApiError
from holdfast.frontend.api.request import ParsedRequest
from holdfast.frontend.metrics import FrontendMetrics
from holdfast.frontend.notes import WaitNotes
from holdfast.frontend.reply import Reply
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.flight import RequestState
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest

log = logging.getLogger("holdfast.access")
PATH_CHARS_MAX = 200  # of a path in the access log
ASKED_CHARS_MAX = 512  # of a model's name on the requests page
PAST_S = 60.0  # how long ended requests are remembered, for clients that ask after their connection broke
PAST_MAX = 1024  # half a megabyte
_STATES = {
    "success": RequestState.DONE,
    "error": RequestState.FAILED,
    "cancelled": RequestState.CANCELLED,
    "killed": RequestState.CANCELLED,
}


class Preparing(Protocol):
    """A request's preparation, before it has a reply."""

    def kill(self, error: ApiError) -> None: ...


@dataclass(slots=True)
class EndedCounts:
    """Counts of successful requests and their tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def add(self, reply: Reply) -> None:
        self.requests += 1
        self.prompt_tokens += reply.prompt_token_count()
        self.answer_tokens += reply.completion_token_count()


@dataclass(slots=True)
class RequestTracker:
    """All requests of a frontend."""

    directory: ModelDirectory
    metrics: FrontendMetrics
    access: AccessLog | None = None
    ended: dict[str, EndedCounts] = field(default_factory=dict)  # by deployment
    under_way: dict[str, TrackedRequest] = field(default_factory=dict)  # by id, in the order they came
    past: deque[TrackedRequest] = field(default_factory=lambda: deque(maxlen=PAST_MAX))  # in the order they ended
    answers: int = 0  # to requests for completions, including those refused before they were read
    answers_failed: int = 0  # those of them that were refused or failed
    _became_idle: asyncio.Event = field(default_factory=asyncio.Event)

    def count_answer(self, status: int) -> None:
        """Count an answer by its HTTP status."""
        self.answers += 1
        self.answers_failed += status >= 400

    @property
    def inflight(self) -> int:
        return len(self.under_way)

    def begin(self, endpoint: str, tier: Tier, *, id: str, name: str, key: str) -> TrackedRequest:
        """Track a new request."""
        tracked = TrackedRequest(self, endpoint, tier, asyncio.get_running_loop().time(), id, name, key)
        self.under_way[id] = tracked
        return tracked

    def lately(self, now_s: float) -> Iterator[TrackedRequest]:
        """Yield the requests that ended within the last minute, the latest first."""
        for tracked in reversed(self.past):
            if now_s - tracked.ended_s > PAST_S:
                return
            yield tracked

    def over(self, tracked: TrackedRequest) -> None:
        self.past.append(self.under_way.pop(tracked.id))
        if not self.under_way:
            self._became_idle.set()

    async def idle(self) -> None:
        """Wait until no request is under way."""
        while self.inflight:
            self._became_idle.clear()
            await self._became_idle.wait()


@dataclass(slots=True)
class TrackedRequest:
    """One request. It is over after `over` (None: it was refused), `client_left` or `kill`."""

    tracker: RequestTracker
    endpoint: str
    tier: Tier
    began_s: float
    id: str  # of its answer
    name: str  # of the request: chosen by its client, or generated
    key: str  # the API key that it came with; empty: no keys are configured
    asked: str = ""  # the requested model, cut to `ASKED_CHARS_MAX`
    model: str = "unknown"
    kind: str = "unknown"
    deployment: str = ""  # of the workers that serve it, once known
    preparing: Preparing | None = None  # until `reply` exists
    reply: Reply | None = None
    held_bytes: int = 0  # memory that its body takes until it is launched
    waited: bool = False  # for a worker set
    progress: bool = False  # its client asked for comments about its wait (`PROGRESS_HEADER`)
    notes: WaitNotes | None = None  # comments to a streaming client about its wait
    ended: RequestState | None = None  # how; None: it is under way
    ended_s: float = 0.0

    def named(self, parsed: ParsedRequest) -> None:
        """Note what the request asks for."""
        self.asked = parsed.model[:ASKED_CHARS_MAX]
        # A name that a client made up must not become a permanent metrics label.
        self.model = parsed.model if self.tracker.directory.knows(parsed.model) else "unknown"
        self.kind = "stream" if parsed.stream else "unary"
        self.tracker.metrics.inflight.labels(self.model).inc()

    def wait_notes(self, connection: HttpConnection) -> WaitNotes:
        """Return the comments to its streaming client; they are the same before and after the reply exists."""
        if self.notes is None:
            self.notes = WaitNotes(connection, self.began_s, self.asked if self.progress else "")
        return self.notes

    def client_left(self) -> None:
        """End a request whose client left before there was a reply."""
        self._close("cancelled", None)

    def kill(self, error: ApiError) -> None:
        """End it on request of an operator or of its API key."""
        if self.reply is not None:
            self.reply.kill(error)
        elif (preparing := self.preparing) is not None:
            self._close("killed", None)
            preparing.kill(error)

    def over(self, reply: Reply | None) -> None:
        self._close(reply.outcome if reply is not None else "error", reply)

    def _close(self, outcome: str, reply: Reply | None) -> None:
        if self.ended is not None:
            return
        metrics = self.tracker.metrics
        self.reply = self.notes = self.preparing = None
        self.ended, self.ended_s = _STATES[outcome], asyncio.get_running_loop().time()
        self.tracker.over(self)
        if self.kind != "unknown":
            metrics.inflight.labels(self.model).dec()
        metrics.requests.labels(self.model, self.endpoint, self.kind, outcome).inc()
        if outcome == "cancelled":
            metrics.disconnects.inc()
        if reply is not None:
            if outcome == "success":
                self.tracker.ended.setdefault(self.deployment, EndedCounts()).add(reply)
            self._measure(reply, metrics)
            if self.tracker.access is not None:
                self.tracker.access.measured(reply, self.model)

    def _measure(self, reply: Reply, shown: FrontendMetrics) -> None:
        model = self.model
        now_s = asyncio.get_running_loop().time()
        made = reply.completion_token_count()
        shown.duration.labels(model).observe(now_s - self.began_s)
        shown.input_tokens.labels(model).observe(reply.prompt_token_count())
        shown.output_tokens.labels(model).observe(made)
        shown.output_total.labels(model).inc(made)
        if (queued_s := reply.queued_s()) is not None:
            shown.queue.labels(model).observe(queued_s)
        if reply.first_token_s:
            shown.ttft.labels(model).observe(reply.first_token_s - self.began_s)


@dataclass(slots=True)
class _AccessEntry:
    """A line of the access log that is not complete yet."""

    client: str
    asked: str
    request_id: str
    began_s: float
    facts: list[str] = field(default_factory=list)  # from its reply


class AccessLog:
    """Writes the access log."""

    def __init__(self) -> None:
        log.setLevel(logging.INFO)  # the access log was switched on, whatever the level of other logs
        self._open: dict[HttpConnection, _AccessEntry] = {}

    def begin(self, connection: HttpConnection, request: HttpRequest) -> None:
        """Note a request that has its name and is about to be answered."""
        loop = asyncio.get_running_loop()
        asked = f"{request.method} {request.path[:PATH_CHARS_MAX]}".encode("unicode_escape").decode()
        asked = asked.replace('"', "%22")
        entry = _AccessEntry(_peer(connection), asked, connection.request_id, loop.time())
        self._open[connection] = entry
        # Not at once: `measured` is called right after the last byte is handed over, and adds the reply's figures.
        connection.on_over = lambda status: loop.call_soon(self._write, connection, entry, status, loop.time())

    def measured(self, reply: Reply, model: str) -> None:
        """Note a reply that is over, with its outcome."""
        entry = self._open.get(reply.connection)
        if entry is None:
            return
        entry.facts = [f"model={model}", f"outcome={reply.outcome}"]
        entry.facts += [f"prompt={reply.prompt_token_count()}", f"completion={reply.completion_token_count()}"]
        if reply.first_token_s:
            entry.facts.append(f"ttft_ms={(reply.first_token_s - entry.began_s) * 1000:.1f}")
        if resumed := reply.resumed_count():
            entry.facts.append(f"resumed={resumed}")

    def _write(self, connection: HttpConnection, entry: _AccessEntry, status: int, now_s: float) -> None:
        if self._open.get(connection) is entry:
            del self._open[connection]
        shown = str(status) if status else "-"  # the client left before it got a status
        took = f"total_ms={(now_s - entry.began_s) * 1000:.1f}"
        parts = (entry.client, f'"{entry.asked}"', shown, f"request={entry.request_id}", took, *entry.facts)
        log.info("access %s", " ".join(parts))


def _peer(connection: HttpConnection) -> str:
    """Return the client's address; a Unix socket's client has none."""
    name = connection.transport.get_extra_info("peername") if connection.transport is not None else None
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "local"
