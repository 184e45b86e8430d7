"""Requests that end before their end, by somebody's word: `DELETE /v1/requests/{id}`, and what other frontends and
operators ask for through the store.

Always true: a key ends its own requests and no other, nor learns that there are others, and all who come without a key,
where there are none, are one; a request that is ended tells its client so, gives its place back, and is computed no
further; whoever asks again is told that it is over.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from holdfast.core.errors import Code
from holdfast.core.tasks import Tasks
from holdfast.discovery.keys import KILLS
from holdfast.frontend.accounts import Account
from holdfast.frontend.api.errors import ApiError, of_failure, too_busy
from holdfast.frontend.metrics import Others, nobody
from holdfast.frontend.requests import PATH, Requests, not_found
from holdfast.health.records import Killed
from holdfast.store.contract import Deleted, Put, Registration, Snapshot, Store, StoreUnavailable
from holdfast.streams import kills
from holdfast.streams.kills import Answer, Kill, Outcome
from holdfast.streams.states import State
from holdfast.wire.http.connection import HttpConnection

log = logging.getLogger("holdfast.frontend")

ASKING_MAX = 16  # at once through the store, of whose watches each takes two: a person's hands, and a script's
ANSWERS_MAX = 64  # that stand: they go with what was asked
ENDED_MAX = 1000  # by one word: their ids are 40 kB
TOLD_S = 60.0  # of one that was ended: whoever reads the store is not away for longer
TOLD_MAX = 64
WHY = {
    "key": "the request was cancelled by DELETE /v1/requests",
    "operator": "the request was cancelled by the operator of this service",
}


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What is answered: how what was named is now, and which requests that took."""

    id: str  # as it was asked for
    object: str = "request"
    state: str
    ended: list[str]  # ids; none: it was over before
    unheard: list[str] = []  # frontends that did not answer, and may have more of that name


class Kills:
    """Of one frontend."""

    def __init__(
        self,
        requests: Requests,
        store: Store,
        deployment: str,
        peer: str,
        rng: random.Random,
        unix_s: Callable[[], float],
        others: Others = nobody,
    ) -> None:
        self._requests = requests
        self._store = store
        self._deployment = deployment
        self._peer = peer
        self._rng = rng
        self._unix_s = unix_s
        self._others = others
        self._tasks = Tasks("kills")
        self._answers: dict[str, Registration] = {}  # by the key of what was asked
        self._lately = deque[tuple[str, Killed]](maxlen=TOLD_MAX)  # with the deployment of each, if it is known

    def answer(self, connection: HttpConnection, path: str, key: str) -> None:
        """For whoever has this key, empty where there are none; ApiError for a request that is not there."""
        name = unquote(path.removeprefix(PATH).removeprefix("/"))
        if not kills.NAME.fullmatch(name):
            raise not_found(name)
        if len(self._tasks) >= ASKING_MAX:
            raise too_busy("too many requests are being ended", "ending")
        kill = Kill(
            name=name, deployment=self._deployment, by=kills.KEY, whose=kills.digest(key), at_unix_s=self._unix_s()
        )
        found = self._requests.find(name, key)
        here = self._ended(kill)
        if found is not None and found.id == name:
            connection.respond(200, _encoded(name, here.ended, here.over))
        else:  # others may have more that their clients called so
            _Asking(connection, self._tasks, self._elsewhere(kill, here))

    async def _elsewhere(self, kill: Kill, here: Answer) -> ApiError | bytes:
        try:
            found, why = await kills.ask(self._store, kill, f"{self._rng.getrandbits(64):016x}"), ""
        except StoreUnavailable as error:
            found, why = Outcome(silent=["other frontends"]), str(error)
        ended, over = [*here.ended, *found.ended], here.over or found.over
        if ended or over:
            return _encoded(kill.name, ended, over, found.silent)
        # The store forgets one that is stopped after a moment; it has its requests all the same.
        silent = found.silent or [name for name, page in (await self._others()).items() if page is None]
        if not silent:
            return not_found(kill.name)
        unheard = f"this frontend does not have the request, and {why or _silent(silent)}"
        return of_failure(Code.NO_WORKER, unheard, retry_after_s=1.0)

    async def follow(self) -> None:
        """What is asked for through the store; for ever."""
        async for event in self._store.watch(KILLS):
            found: Mapping[str, bytes] = {}
            if isinstance(event, Snapshot):
                found = event.items
                for key in self._answers.keys() - found.keys():
                    self._take_back(key)
            elif isinstance(event, Put):
                found = {event.key: event.value}
            elif isinstance(event, Deleted):
                self._take_back(event.key)
            for key, value in found.items():
                if not kills.is_answer(key):
                    self._hear(key, kills.read(value))

    def _hear(self, key: str, kill: Kill | None) -> None:
        if kill is None or key in self._answers:
            return
        if self._unix_s() - kill.at_unix_s > kills.STALE_S:
            self._tasks.spawn(self._remove(key), "remove what was asked for")
            return
        answer = self._ended(kill) if kill.deployment in ("", self._deployment) else Answer()
        if len(self._answers) >= ANSWERS_MAX:
            self._take_back(next(iter(self._answers)))
        said = self._store.register(kills.answer_key(key, self._peer), msgspec.json.encode(answer))
        self._answers[key] = said

    def _take_back(self, key: str) -> None:
        if (said := self._answers.pop(key, None)) is not None:
            self._tasks.spawn(said.withdraw(), "take back what was answered")

    async def _remove(self, key: str) -> None:
        try:
            await self._store.delete(key, kills.STORE_S)
        except StoreUnavailable as error:
            log.warning("%s could not be removed: %s", key, error)

    def _ended(self, kill: Kill) -> Answer:
        """End what it names, of this frontend's."""
        accounts = self._requests.under_way(kill.name, lambda one: kill.may_end(one.key))[:ENDED_MAX]
        for account in accounts:
            self._end(account, kill.by)
        gone = self._requests.lately(kill.name, lambda one: kill.may_end(one.key)) if not accounts else None
        return Answer(ended=[one.id for one in accounts], over=gone.ended or "" if gone is not None else "")

    def _end(self, account: Account, by: str) -> None:
        log.info("request %s (%s) is ended: %s", account.name, account.id, WHY[by])
        killed = Killed(id=account.id, model=account.model, by=by, at_unix_s=self._unix_s())
        self._lately.append((account.deployment, killed))
        account.kill(of_failure(Code.CANCELLED, WHY[by]))

    def lately(self, deployment: str) -> tuple[Killed, ...]:
        """Those of the last minute, for whoever reads reports."""
        since_s = self._unix_s() - TOLD_S
        return tuple(one for whose, one in self._lately if whose in ("", deployment) and one.at_unix_s > since_s)

    async def close(self) -> None:
        await self._tasks.stop()


def _encoded(name: str, ended: list[str], over: str, unheard: Sequence[str] = ()) -> bytes:
    state = State.CANCELLED if ended else State(over)
    return msgspec.json.encode(Ended(id=name, state=state, ended=ended, unheard=list(unheard)))


def _silent(names: Sequence[str]) -> str:
    return f"{', '.join(names)} did not answer: ask again, or end the connection"


class _Asking:
    """Answers when other frontends have. Implements `wire.http.response.Responder` while it asks."""

    def __init__(self, connection: HttpConnection, tasks: Tasks, asked: Coroutine[Any, Any, ApiError | bytes]) -> None:
        self._connection: HttpConnection | None = connection
        connection.responder = self
        self._task = tasks.spawn(self._run(asked), "ask other frontends")

    async def _run(self, asked: Coroutine[Any, Any, ApiError | bytes]) -> None:
        found = await asked
        if self._connection is None:
            return
        if isinstance(found, ApiError):
            self._connection.respond(found.status, found.body(), headers=found.headers)
        else:
            self._connection.respond(200, found)

    def client_gone(self) -> None:
        """What it asked for stands: it is ended all the same."""
        self._connection = None

    def client_writable(self) -> None:
        """Nothing waits for it: the answer is one piece."""

    def cut_off(self, why: str) -> None:
        connection, self._connection = self._connection, None
        self._task.cancel()
        if connection is not None:
            error = of_failure(Code.ENGINE_SHUTDOWN, why, retry_after_s=1.0)
            connection.respond(error.status, error.body(), headers=error.headers)
