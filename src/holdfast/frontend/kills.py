"""Ends requests: for `DELETE /v1/requests/{id}`, and for other frontends and operators through the store.

Always true:
- A key can end only its own requests, and does not learn that others exist. If no keys are configured, all requests
  count as one client's.
- The client of an ended request gets an error; the request's place is freed, and its computation stops.
- A second call is answered that the request is over.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import msgspec

from holdfast.core.errors import Code
from holdfast.core.tasks import Tasks
from holdfast.discovery.keys import KILLS
from holdfast.frontend.api.errors import ApiError, of_failure, too_busy
from holdfast.frontend.metrics import Others, no_others
from holdfast.frontend.notes import send_error
from holdfast.frontend.request_tracker import TrackedRequest
from holdfast.frontend.requests import PATH, RequestsPage, not_found
from holdfast.health.records import KilledRequest
from holdfast.store.contract import Registration, Store, StoreUnavailable, changes
from holdfast.streams import kills
from holdfast.streams.flight import RequestState
from holdfast.streams.kills import KillAnswer, KillOutcome, KillRequest
from holdfast.wire.http.connection import HttpConnection

log = logging.getLogger("holdfast.frontend")

ASKING_MAX = 16  # calls through the store at the same time, each with two watches: enough for people and a script
ANSWERS_MAX = 64  # answers in the store; each is removed with its question
ENDED_MAX = 1000  # requests ended by one call: their ids are 40 kB
TOLD_S = 60.0  # how long an ended request is reported: control is not away for longer
TOLD_MAX = 64
WHY = {
    "key": "the request was cancelled by DELETE /v1/requests",
    "operator": "the request was cancelled by the operator of this service",
}


class KillReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a DELETE: the request's state, and which requests were ended."""

    id: str  # as in the call
    object: str = "request"
    state: str
    ended: list[str]  # ids; none: it was over before
    unheard: list[str] = []  # frontends that did not answer, and may have more requests of that name


@dataclass(slots=True)
class KillHandler:
    """Ends requests of one frontend, and asks other frontends to."""

    requests: RequestsPage
    store: Store
    deployment: str
    peer: str
    rng: random.Random
    unix_s: Callable[[], float]
    others: Others = no_others
    _tasks: Tasks = field(default_factory=lambda: Tasks("kills"))
    _answers: dict[str, Registration] = field(default_factory=dict)  # by the key of the kill record
    # Requests ended lately, each with its deployment, if known.
    _lately: deque[tuple[str, KilledRequest]] = field(default_factory=lambda: deque(maxlen=TOLD_MAX))

    def answer(self, connection: HttpConnection, path: str, key: str) -> None:
        """Answer a client with this API key ("" if none are configured); raise ApiError if there is no such request."""
        name = unquote(path.removeprefix(PATH).removeprefix("/"))
        if not kills.NAME.fullmatch(name):
            raise not_found(name)
        if len(self._tasks) >= ASKING_MAX:
            raise too_busy("too many requests are being ended", "ending")
        kill = KillRequest(
            name=name, deployment=self.deployment, by=kills.KEY, whose=kills.digest(key), at_unix_s=self.unix_s()
        )
        found = self.requests.find(name, key)
        here = self._end_named(kill)
        if found is not None and found.id == name:
            connection.respond(200, _encoded(name, here.ended, here.over))
        else:  # other frontends may have requests of that name
            _Asking(connection, self._tasks, self._ask_others(kill, here))

    async def _ask_others(self, kill: KillRequest, here: KillAnswer) -> ApiError | bytes:
        try:
            found, why = await kills.ask(self.store, kill, f"{self.rng.getrandbits(64):016x}"), ""
        except StoreUnavailable as error:
            found, why = KillOutcome(silent=["other frontends"]), str(error)
        ended, over = [*here.ended, *found.ended], here.over or found.over
        if ended or over:
            return _encoded(kill.name, ended, over, found.silent)
        # The store soon forgets a stopped frontend, which still has its requests.
        silent = found.silent or [name for name, page in (await self.others()).items() if page is None]
        if not silent:
            return not_found(kill.name)
        unheard = f"this frontend does not have the request, and {why or _silent(silent)}"
        return of_failure(Code.NO_WORKER, unheard, retry_after_s=1.0)

    async def follow(self) -> None:
        """Follow the kill records in the store, until cancelled."""
        async for event in self.store.watch(KILLS):
            found, removed = changes(event, self._answers)
            for key in removed:
                self._withdraw_answer(key)
            for key, value in found.items():
                if "/" not in key.removeprefix(KILLS):  # else an answer
                    self._on_kill_request(key, kills.read(value))

    def _on_kill_request(self, key: str, kill: KillRequest | None) -> None:
        if kill is None or key in self._answers:
            return
        if self.unix_s() - kill.at_unix_s > kills.STALE_S:
            self._tasks.spawn(self._remove(key), "remove what was asked for")
            return
        answer = self._end_named(kill) if kill.deployment in ("", self.deployment) else KillAnswer()
        if len(self._answers) >= ANSWERS_MAX:
            self._withdraw_answer(next(iter(self._answers)))
        answered = self.store.register(f"{key}/{self.peer}", msgspec.json.encode(answer))
        self._answers[key] = answered

    def _withdraw_answer(self, key: str) -> None:
        if (answered := self._answers.pop(key, None)) is not None:
            self._tasks.spawn(answered.withdraw(), "take back what was answered")

    async def _remove(self, key: str) -> None:
        try:
            await self.store.delete(key, kills.STORE_S)
        except StoreUnavailable as error:
            log.warning("%s could not be removed: %s", key, error)

    def _end_named(self, kill: KillRequest) -> KillAnswer:
        """End this frontend's requests that the record names."""
        tracker = self.requests.under_way(kill.name, lambda one: kill.may_end(one.key))[:ENDED_MAX]
        for tracked in tracker:
            self._end(tracked, kill.by)
        gone = self.requests.lately(kill.name, lambda one: kill.may_end(one.key)) if not tracker else None
        return KillAnswer(ended=[one.id for one in tracker], over=gone.ended or "" if gone is not None else "")

    def _end(self, tracked: TrackedRequest, by: str) -> None:
        log.info("request %s (%s) is ended: %s", tracked.name, tracked.id, WHY[by])
        killed = KilledRequest(id=tracked.id, model=tracked.model, by=by, at_unix_s=self.unix_s())
        self._lately.append((tracked.deployment, killed))
        tracked.kill(of_failure(Code.CANCELLED, WHY[by]))

    def lately(self, deployment: str) -> tuple[KilledRequest, ...]:
        """Return the requests ended in the last minute, for this frontend's report."""
        since_s = self.unix_s() - TOLD_S
        return tuple(one for owner, one in self._lately if owner in ("", deployment) and one.at_unix_s > since_s)

    async def close(self) -> None:
        await self._tasks.stop()


def _encoded(name: str, ended: list[str], over: str, unheard: Sequence[str] = ()) -> bytes:
    state = RequestState.CANCELLED if ended else RequestState(over)
    return msgspec.json.encode(KillReply(id=name, state=state, ended=ended, unheard=list(unheard)))


def _silent(names: Sequence[str]) -> str:
    return f"{', '.join(names)} did not answer: ask again, or end the connection"


class _Asking:
    """Answers a DELETE once the other frontends have answered. Implements `wire.http.response.Responder` meanwhile."""

    def __init__(self, connection: HttpConnection, tasks: Tasks, asked: Coroutine[Any, Any, ApiError | bytes]) -> None:
        self._connection: HttpConnection | None = connection
        connection.responder = self
        self._task = tasks.spawn(self._run(asked), "ask other frontends")

    async def _run(self, asked: Coroutine[Any, Any, ApiError | bytes]) -> None:
        found = await asked
        if self._connection is None:
            return
        if isinstance(found, ApiError):
            send_error(self._connection, found)
        else:
            self._connection.respond(200, found)

    def client_gone(self) -> None:
        """Note that the client left; the named request is still ended."""
        self._connection = None

    def client_writable(self) -> None:
        """Do nothing: the answer is one piece."""

    def cut_off(self, why: str) -> None:
        connection, self._connection = self._connection, None
        self._task.cancel()
        if connection is not None:
            send_error(connection, of_failure(Code.ENGINE_SHUTDOWN, why, retry_after_s=1.0))
