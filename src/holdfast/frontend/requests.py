"""The pages at `/v1/requests` (JSON) and `/requests` (HTML): each request's state, its queue position while it waits,
its worker and its tokens; each model's state and counts.

Always true: a page is computed from the current state. With keys, a key sees only its own requests, and does not learn
that others exist. A page is bounded, and waiting requests come first; its counts cover also those that are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import unquote

import msgspec

from holdfast.frontend.api.errors import ApiError
from holdfast.frontend.pending_models import PendingModels
from holdfast.frontend.request_tracker import RequestTracker, TrackedRequest
from holdfast.routing.table import RouteSlot
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.flight import WAITS, Flight, RequestState, WaitStatus, queue_positions, state_of
from holdfast.streams.stats import StreamPlace
from holdfast.wire.http.connection import HttpConnection

PATH = "/v1/requests"
HTML_PATH = "/requests"
LISTED_MAX = 1000  # a quarter of a megabyte
_HTML = b"text/html; charset=utf-8"
_NO_SCRIPTS = ((b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'"),)


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the pages show it."""

    id: str  # of its answer
    object: str = "request"
    request_id: str  # as in `x-request-id`
    model: str
    state: RequestState
    place: int | None  # queue position; None: it is in no queue
    waited_s: float | None  # so far; None: it does not wait
    why: str  # why its model has no worker yet; "": unknown
    tier: str
    stream: bool
    created: float  # unix time
    started: float | None = None  # unix time when it was first sent to a worker; None: not yet
    worker: str = ""  # of its first stream that is on one
    replica: str = ""  # the worker's group, or else the worker
    tokens: int = 0  # shown so far, of all its streams
    resumed: int = 0  # how often its streams were moved or started again
    resuming: bool = False  # it has tokens, and waits for a worker to continue


class ModelActivity(msgspec.Struct, kw_only=True):
    """A model's requests at one frontend."""

    model: str
    state: str  # "BUSY": a request is on a worker; "READY": a worker could take one; "WAITING": none can
    waiting: int = 0
    running: int = 0  # on a worker
    replicas: dict[str, int] = {}  # requests on each


class RequestsListing(msgspec.Struct, frozen=True, kw_only=True):
    """A list of requests; waiting ones come first, in queue order."""

    object: str = "list"
    data: list[RequestView]
    has_more: bool
    models: list[ModelActivity] = []


@dataclass(slots=True)
class RequestsPage:
    """Answers questions about a frontend's requests. `clock` is monotonic; `unix_s` is wall time."""

    tracker: RequestTracker
    pending: PendingModels
    directory: ModelDirectory
    clock: Callable[[], float]
    unix_s: Callable[[], float]
    place_of: Callable[[RouteSlot], StreamPlace] = lambda slot: StreamPlace(slot.name)
    frontend: str = "frontend"

    @staticmethod
    def has(path: str) -> bool:
        return path in (PATH, HTML_PATH) or path.startswith(f"{PATH}/")

    def answer(self, connection: HttpConnection, path: str, key: str) -> None:
        """Answer a client with this API key ("" if none are configured); raise ApiError if there is no such request."""
        if path in (PATH, HTML_PATH):
            self.answer_all(connection, key, as_html=path == HTML_PATH)
            return
        wanted = unquote(path.removeprefix(f"{PATH}/"))
        found = self.find(wanted, key)
        if found is None:
            raise not_found(wanted)
        connection.respond(200, msgspec.json.encode(found))

    def answer_all(self, connection: HttpConnection, key: str = "", *, as_html: bool = False) -> None:
        if as_html:
            connection.respond(200, html_page(self.all(key), self.frontend, self.unix_s()), _HTML, _NO_SCRIPTS)
        else:
            connection.respond(200, msgspec.json.encode(self.all(key)))

    def find(self, name: str, key: str = "") -> RequestView | None:
        """Return the request with this answer id, or the latest with this name."""
        if tracker := self.under_way(name, lambda one: _may_see(one, key)):
            return self._shown(tracker[-1], dict(self._waiting()).get(tracker[-1].id))
        gone = self.lately(name, lambda one: _may_see(one, key))
        return self._shown(gone, None) if gone is not None else None

    def under_way(self, name: str, may: Callable[[TrackedRequest], bool]) -> list[TrackedRequest]:
        """Return the requests under way that `may` accepts: the one with this id, or all with this name, in order of
        arrival."""
        if (one := self.tracker.under_way.get(name)) is not None and may(one):
            return [one]
        return [one for one in self.tracker.under_way.values() if one.name == name and may(one)]

    def lately(self, name: str, may: Callable[[TrackedRequest], bool]) -> TrackedRequest | None:
        """Return the latest request with this id or name that ended within the last minute, if there is one."""
        gone = self.tracker.lately(self.clock())
        return next((one for one in gone if name in (one.id, one.name) and may(one)), None)

    def all(self, key: str = "") -> RequestsListing:
        """Return all requests under way."""
        waiting, under_way = dict(self._waiting()), self.tracker.under_way
        first = [under_way[id] for id in waiting if id in under_way]
        rest = [tracked for id, tracked in under_way.items() if id not in waiting]
        seen = [tracked for tracked in (*first, *rest) if _may_see(tracked, key)]
        shown = [self._shown(tracked, waiting.get(tracked.id)) for tracked in seen[:LISTED_MAX]]
        return RequestsListing(data=shown, has_more=len(seen) > LISTED_MAX, models=self._models(seen, waiting))

    def _models(self, seen: Iterable[TrackedRequest], waiting: Mapping[str, WaitStatus]) -> list[ModelActivity]:
        """Return the models of these requests, and those that are served here."""
        routable: dict[str, int] = dict.fromkeys(self.directory.models(), 0)
        for workers in self.directory.sets.values():
            routable[workers.card.name] = routable.get(workers.card.name, 0) + workers.table.routable_count
        found = {name: _activity(name, count) for name, count in routable.items()}
        for tracked in seen:
            one = found.setdefault(tracked.asked, _activity(tracked.asked, 0))
            if _state(tracked, waiting.get(tracked.id)) in WAITS:
                one.waiting += 1
                continue
            one.running, one.state = one.running + 1, "BUSY"
            if (place := self._place(tracked)) is not None:
                one.replicas[place.group] = one.replicas.get(place.group, 0) + 1
        return [found[name] for name in sorted(found)]

    def _place(self, tracked: TrackedRequest) -> StreamPlace | None:
        flights = _flights(tracked) if tracked.reply is not None else []
        slot = next((flight.slot for flight in flights if flight.slot is not None), None)
        return self.place_of(slot) if slot is not None else None

    def _waiting(self) -> Iterator[tuple[str, WaitStatus]]:
        """Yield the waiting requests by id; a request with several streams only if none of them runs."""
        for tracked, waiting in self.pending.waiting():
            yield tracked.id, waiting
        by_reply = {id(one.reply): one for one in self.tracker.under_way.values() if one.reply is not None}
        for workers in self.directory.sets.values():
            for flight, waiting in queue_positions(
                workers, wanted=False, why=self.directory.missing(workers.card.name).why
            ):
                held = by_reply.get(id(flight.consumer.request))
                if held is not None and state_of(_flights(held)) is waiting.state:
                    yield held.id, waiting

    def _shown(self, tracked: TrackedRequest, waiting: WaitStatus | None) -> RequestView:
        now_s, state = self.clock(), _state(tracked, waiting)
        waits = state in WAITS
        since_s = waiting.since_s if waiting is not None else tracked.began_s
        place, reply = self._place(tracked), tracked.reply
        queued_s = reply.queued_s() if reply is not None else None
        tokens = reply.completion_token_count() if reply is not None else 0
        came_unix_s = self.unix_s() - (now_s - tracked.began_s)
        return RequestView(
            id=tracked.id,
            request_id=tracked.name,
            model=tracked.asked,
            state=state,
            place=waiting.place if waiting is not None else None,
            waited_s=round(max(0.0, now_s - since_s), 3) if waits else None,
            why=waiting.why if waiting is not None else "",
            tier=tracked.tier.label,
            stream=tracked.kind == "stream",
            created=round(came_unix_s, 3),
            started=round(came_unix_s + queued_s, 3) if queued_s is not None else None,
            worker=place.name if place is not None else "",
            replica=place.group if place is not None else "",
            tokens=tokens,
            resumed=reply.resumed_count() if reply is not None else 0,
            resuming=waits and tokens > 0,
        )


def _activity(model: str, routable: int) -> ModelActivity:
    return ModelActivity(model=model, state="READY" if routable else "WAITING")


def _state(tracked: TrackedRequest, waiting: WaitStatus | None) -> RequestState:
    """Return the request's state; it is QUEUED while it is still being prepared."""
    if tracked.ended is not None:
        return tracked.ended
    if waiting is not None:
        return waiting.state
    return state_of(_flights(tracked)) if tracked.reply is not None else RequestState.QUEUED


def _flights(tracked: TrackedRequest) -> list[Flight]:
    reply = tracked.reply
    assert reply is not None, tracked
    return [choice.flight for choice in reply.choices if choice.flight is not None]


def not_found(name: str) -> ApiError:
    message = f"there is no request {name[:200]!r} here, nor was there one in the last minute"
    if not name:
        message = f"no request is named: {PATH}/ID is one, {PATH} are all"
    return ApiError(404, message, code="request_not_found")


def _may_see(one: TrackedRequest, key: str) -> bool:
    return not key or one.key == key


# -- for people

_STYLE = (
    "body{font:14px/1.4 system-ui,sans-serif;margin:1.5em;color:#222;background:#fff}"
    "table{border-collapse:collapse;margin:.5em 0 1.5em}td,th{padding:.2em .8em;text-align:left;"
    "border-bottom:1px solid #ddd}td.n,th.n{text-align:right}.w{color:#a60}.g{color:#080}"
)
_REFRESH_S = 2
HTML_LISTED_MAX = 250  # a person reads no more; some 5 ms, in which no stream gets a token
_MODEL_TITLES = ("model", "state", "waiting", "running", "requests on each replica")
_TITLES = ("id", "model", "tier", "state", "place", "waited", "since", "worker", "tokens")
_RIGHT = {"waiting", "running", "place", "waited", "tokens"}


def html_page(listing: RequestsListing, frontend: str, now_unix_s: float) -> bytes:
    """Return the listing as a page without scripts that loads itself again."""
    models = [
        (one.model, one.state, one.waiting, one.running, ", ".join(f"{name}: {n}" for name, n in one.replicas.items()))
        for one in listing.models
    ]
    rows = [
        (
            *(one.id, one.model, one.tier, "RESUMING" if one.resuming else str(one.state)),
            *("–" if one.place is None else one.place, "–" if one.waited_s is None else f"{one.waited_s:.1f} s"),
            *(_clock(one.created), one.worker or one.why or "–", one.tokens),
        )
        for one in listing.data[:HTML_LISTED_MAX]
    ]
    title = f"Requests of {escape(frontend)}"
    is_cut = listing.has_more or len(listing.data) > HTML_LISTED_MAX
    more = f"<p class=w>only the first {HTML_LISTED_MAX} are listed</p>" if is_cut else ""
    parts = (
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<meta http-equiv=refresh content={_REFRESH_S}><title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1><p>{_clock(now_unix_s)} UTC; as JSON: <a href={PATH}>{PATH}</a></p>",
        *_table(_MODEL_TITLES, models),
        *(_table(_TITLES, rows) if rows else ("<p>no request is under way</p>",)),
        more,
    )
    return "".join(parts).encode(errors="replace")


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    kinds = [" class=n" if title in _RIGHT else "" for title in titles]
    yield "<table><tr>"
    yield from (f"<th{kind}>{title}" for kind, title in zip(kinds, titles, strict=True))
    for row in rows:
        yield "<tr>"
        yield from (f"<td{kind}>{_cell(value)}" for kind, value in zip(kinds, row, strict=True))
    yield "</table>"


def _cell(value: object) -> str:
    text = escape(str(value))
    colour = "w" if text in _WAITING_WORDS else "g" if text in _RUNNING_WORDS else ""
    return f"<span class={colour}>{text}</span>" if colour else text


_WAITING_WORDS = frozenset({*map(str, WAITS), "RESUMING", "WAITING"})
_RUNNING_WORDS = frozenset({"RUNNING", "DISPATCHED", "READY", "BUSY"})


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(unix_s))
