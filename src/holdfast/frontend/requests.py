"""The pages at `/v1/requests`: each request's state, and its queue position while it waits.

Always true: a page is computed from the current state. With keys, a key sees only its own requests, and does not learn
that others exist. A page is bounded, and waiting requests come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec

from holdfast.frontend.api.errors import ApiError
from holdfast.frontend.pending_models import PendingModels
from holdfast.frontend.request_tracker import RequestTracker, TrackedRequest
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.flight import WAITS, Flight, RequestState, WaitStatus, queue_positions, state_of
from holdfast.wire.http.connection import HttpConnection

PATH = "/v1/requests"
LISTED_MAX = 1000  # a quarter of a megabyte


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


class RequestsListing(msgspec.Struct, frozen=True, kw_only=True):
    """A list of requests; waiting ones come first, in queue order."""

    object: str = "list"
    data: list[RequestView]
    has_more: bool


@dataclass(slots=True)
class RequestsPage:
    """Answers questions about a frontend's requests. `clock` is monotonic; `unix_s` is wall time."""

    tracker: RequestTracker
    pending: PendingModels
    directory: ModelDirectory
    clock: Callable[[], float]
    unix_s: Callable[[], float]

    @staticmethod
    def has(path: str) -> bool:
        return path == PATH or path.startswith(f"{PATH}/")

    def answer(self, connection: HttpConnection, path: str, key: str) -> None:
        """Answer a client with this API key ("" if none are configured); raise ApiError if there is no such request."""
        if path == PATH:
            self.answer_all(connection, key)
            return
        wanted = unquote(path.removeprefix(f"{PATH}/"))
        found = self.find(wanted, key)
        if found is None:
            raise not_found(wanted)
        connection.respond(200, msgspec.json.encode(found))

    def answer_all(self, connection: HttpConnection, key: str = "") -> None:
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
        return RequestsListing(data=shown, has_more=len(seen) > LISTED_MAX)

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
            created=round(self.unix_s() - (now_s - tracked.began_s), 3),
        )


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
