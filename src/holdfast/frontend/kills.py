"""Requests that end before their end, by somebody's word: `DELETE /v1/requests/{id}`, and what other frontends and
operators ask for through the store.

Always true: where there are keys, a key ends its own requests and no other, nor learns that there are others; a request
that is ended tells its client so, gives its place back, and is computed no further.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import unquote

import msgspec

from holdfast.core.errors import Code
from holdfast.core.tasks import Tasks
from holdfast.discovery.keys import KILLS
from holdfast.frontend.accounts import Account
from holdfast.frontend.api.errors import ApiError, of_failure
from holdfast.frontend.requests import PATH, Requests, not_found
from holdfast.health.records import Killed
from holdfast.store.contract import Put, Snapshot, Store, StoreUnavailable
from holdfast.streams import kills
from holdfast.streams.kills import Kill
from holdfast.wire.http.connection import HttpConnection

log = logging.getLogger("holdfast.frontend")

ASKING_MAX = 64  # at once through the store: a person's hands, and a script's
TOLD_S = 60.0  # of one that was ended: whoever reads the store is not away for longer
TOLD_MAX = 64
WHY = {
    "key": "the request was cancelled by its owner (DELETE /v1/requests)",
    "operator": "the request was cancelled by who runs this service",
}


class Kills:
    """Of one frontend."""

    def __init__(
        self, requests: Requests, store: Store, deployment: str, rng: random.Random, unix_s: Callable[[], float]
    ) -> None:
        self._requests = requests
        self._store = store
        self._deployment = deployment
        self._rng = rng
        self._unix_s = unix_s
        self._tasks = Tasks("kills")
        self._lately = deque[tuple[str, Killed]](maxlen=TOLD_MAX)  # with the deployment of each, if it is known

    def answer(self, connection: HttpConnection, path: str, key: str) -> None:
        """For whoever has this key, empty where there are none; ApiError for a request that is not there."""
        name = unquote(path.removeprefix(PATH).removeprefix("/"))
        account = self._requests.under_way(name, lambda one: not key or one.key == key)
        if account is not None:
            self._end(account, "key")
            connection.respond(200, msgspec.json.encode(self._requests.shown(account)))
            return
        if not name or self._requests.find(name, key) is not None or len(self._tasks) >= ASKING_MAX:
            raise not_found(name)  # it is over
        kill = Kill(name=name, deployment=self._deployment, whose=kills.digest(key), at_unix_s=self._unix_s())
        _Asking(connection, self._tasks, self._elsewhere(kill))

    async def _elsewhere(self, kill: Kill) -> ApiError | bytes:
        try:
            if not await kills.ask(self._store, kill, f"{self._rng.getrandbits(64):016x}"):
                return not_found(kill.name)
        except StoreUnavailable as error:
            why = f"this frontend does not have the request, and cannot ask others: {error}"
            return of_failure(Code.NO_WORKER, why, retry_after_s=1.0)
        return msgspec.json.encode({"id": kill.name, "object": "request", "state": "CANCELLED"})

    async def follow(self) -> None:
        """What is asked for through the store; for ever."""
        async for event in self._store.watch(KILLS):
            found = event.items if isinstance(event, Snapshot) else {}
            if isinstance(event, Put):
                found = {event.key: event.value}
            for key, value in found.items():
                if self._is_done(kills.read(value)):
                    self._tasks.spawn(self._remove(key), "remove what was asked for")

    def _is_done(self, kill: Kill | None) -> bool:
        if kill is None or kill.deployment not in ("", self._deployment):
            return False
        if self._unix_s() - kill.at_unix_s > kills.STALE_S:
            return True
        account = self._requests.under_way(kill.name, lambda one: kill.whose in ("", kills.digest(one.key)))
        if account is None:
            return False
        self._end(account, "key" if kill.whose else "operator")
        return True

    async def _remove(self, key: str) -> None:
        try:
            await self._store.delete(key, kills.STORE_S)
        except StoreUnavailable as error:
            log.warning("%s could not be removed: %s", key, error)

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
