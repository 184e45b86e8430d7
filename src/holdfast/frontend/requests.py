"""What clients and operators can ask about requests: each one's state, and its place in line while it waits.

Always true: what is shown is told from where a request is at that moment; where there are keys, a key sees its own
requests and no other, nor that there are others; a page has a bound, and whoever waits is on it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec

from holdfast.frontend.accounts import Account, Accounts
from holdfast.frontend.api.errors import ApiError
from holdfast.frontend.lobby import Lobby
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.flight import Flight
from holdfast.streams.lines import line_of, state_of
from holdfast.streams.states import WAITS, State, Waiting
from holdfast.wire.http.connection import HttpConnection

PATH = "/v1/requests"
LISTED_MAX = 1000  # a quarter of a megabyte


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    id: str  # that its answer has
    object: str = "request"
    request_id: str  # as in `x-request-id`
    model: str
    state: State
    place: int | None  # in line; None: it does not stand in one
    waited_s: float | None  # so far; None: it waits no more
    why: str  # no worker of its model is there yet; "": nobody says
    tier: str
    stream: bool
    created: float  # unix time


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """Many; those that wait first, in order."""

    object: str = "list"
    data: list[Shown]
    has_more: bool


@dataclass(slots=True)
class Requests:
    """A frontend's requests, as they are asked about. `clock` never goes back; `unix_s` is the world's."""

    accounts: Accounts
    lobby: Lobby
    directory: ModelDirectory
    clock: Callable[[], float]
    unix_s: Callable[[], float]

    @staticmethod
    def has(path: str) -> bool:
        return path == PATH or path.startswith(f"{PATH}/")

    def answer(self, connection: HttpConnection, path: str, key: str) -> None:
        """For whoever has this key, empty where there are none; ApiError for a request that is not there."""
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

    def find(self, name: str, key: str = "") -> Shown | None:
        """By its answer's id; or the latest that its client called so, whatever clients with other keys call theirs."""
        if accounts := self.under_way(name, lambda one: _may_see(one, key)):
            return self._shown(accounts[-1], dict(self._waiting()).get(accounts[-1].id))
        gone = self.lately(name, lambda one: _may_see(one, key))
        return self._shown(gone, None) if gone is not None else None

    def under_way(self, name: str, may: Callable[[Account], bool]) -> list[Account]:
        """Those that are, and that `may`: the one with that id, or all that their clients called so, as they came."""
        if (one := self.accounts.under_way.get(name)) is not None and may(one):
            return [one]
        return [one for one in self.accounts.under_way.values() if one.name == name and may(one)]

    def lately(self, name: str, may: Callable[[Account], bool]) -> Account | None:
        """The latest of that id or name that is over, if that is not long ago."""
        gone = self.accounts.lately(self.clock())
        return next((one for one in gone if name in (one.id, one.name) and may(one)), None)

    def all(self, key: str = "") -> Listed:
        """All that are under way."""
        waiting, under_way = dict(self._waiting()), self.accounts.under_way
        first = [under_way[id] for id in waiting if id in under_way]
        rest = [account for id, account in under_way.items() if id not in waiting]
        seen = [account for account in (*first, *rest) if _may_see(account, key)]
        shown = [self._shown(account, waiting.get(account.id)) for account in seen[:LISTED_MAX]]
        return Listed(data=shown, has_more=len(seen) > LISTED_MAX)

    def _waiting(self) -> Iterator[tuple[str, Waiting]]:
        """Who stands in a line, by id: of several streams of one request only if none of them runs."""
        for account, waiting in self.lobby.waiting():
            yield account.id, waiting
        by_reply = {id(one.reply): one for one in self.accounts.under_way.values() if one.reply is not None}
        for workers in self.directory.sets.values():
            for flight, waiting in line_of(workers, wanted=False, why=self.directory.missing(workers.card.name).why):
                held = by_reply.get(id(flight.consumer.asker))
                if held is not None and state_of(_flights(held)) is waiting.state:
                    yield held.id, waiting

    def _shown(self, account: Account, waiting: Waiting | None) -> Shown:
        now_s, state = self.clock(), _state(account, waiting)
        waits = state in WAITS
        since_s = waiting.since_s if waiting is not None else account.began_s
        return Shown(
            id=account.id,
            request_id=account.name,
            model=account.asked,
            state=state,
            place=waiting.place if waiting is not None else None,
            waited_s=round(max(0.0, now_s - since_s), 3) if waits else None,
            why=waiting.why if waiting is not None else "",
            tier=account.tier.word,
            stream=account.kind == "stream",
            created=round(self.unix_s() - (now_s - account.began_s), 3),
        )


def _state(account: Account, waiting: Waiting | None) -> State:
    """One that is still being read, or on its way to a line, waits for nobody but us."""
    if account.ended is not None:
        return account.ended
    if waiting is not None:
        return waiting.state
    return state_of(_flights(account)) if account.reply is not None else State.QUEUED


def _flights(account: Account) -> list[Flight]:
    reply = account.reply
    assert reply is not None, account
    return [choice.flight for choice in reply.choices if choice.flight is not None]


def not_found(name: str) -> ApiError:
    message = f"there is no request {name[:200]!r} here, nor was there one in the last minute"
    if not name:
        message = f"no request is named: {PATH}/ID is one, {PATH} are all"
    return ApiError(404, message, code="request_not_found")


def _may_see(one: Account, key: str) -> bool:
    return not key or one.key == key
