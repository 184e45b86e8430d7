"""The OpenAI surface: paths, keys, and one root per request where every failure becomes an answer."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

from holdfast.core.errors import Code
from holdfast.core.tasks import Tasks
from holdfast.frontend.accounts import Account, Accounts
from holdfast.frontend.admission import Admission
from holdfast.frontend.api.errors import SERVER, ApiError, log_failure, of_failure, too_busy
from holdfast.frontend.api.parse import Unexplained
from holdfast.frontend.api.request import ParsedRequest
from holdfast.frontend.body_reader import PARSERS
from holdfast.frontend.gate import ANYONE, Caller, Gate, RequestNames
from holdfast.frontend.kills import Kills
from holdfast.frontend.large_bodies import PARSE_NOW_BYTES_MAX, LargeBodies
from holdfast.frontend.levels import AllLevels
from holdfast.frontend.lobby import Lobby
from holdfast.frontend.model_text import ModelText
from holdfast.frontend.pages import OPEN_PATHS, Pages
from holdfast.frontend.requests import PATH as REQUESTS
from holdfast.frontend.requests import Requests
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.flight import WorkerSet
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest, RefusedRequest

log = logging.getLogger("holdfast.frontend")

# Requests being read in another process or tokenized in threads, and what they hold: sixteen of the largest bodies that
# are text. Those that wait for a first worker are counted apart.
PREPARING_MAX = 1024
PREPARING_BYTES_MAX = 512 * 1024 * 1024

# Of a body where none is needed: some clients send "{}" with every request.
OTHER_BODY_BYTES_MAX = 64 * 1024

_GENERATING = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}  # each is a key of PARSERS


@dataclass(slots=True)
class _Preparing:
    """Stands in as the responder until the reply exists, so that a client's leaving is noticed."""

    connection: HttpConnection
    account: Account
    task: asyncio.Task[None]

    def client_gone(self) -> None:
        self.account.client_left()
        self.task.cancel()

    def cut_off(self, why: str) -> None:
        self.task.cancel()
        _refuse(self.connection, of_failure(Code.ENGINE_SHUTDOWN, why, retry_after_s=1.0))

    def client_writable(self) -> None:
        """Nothing has been written yet."""

    def kill(self, error: ApiError) -> None:
        self.task.cancel()
        _refuse(self.connection, error)


@dataclass(slots=True)
class App:
    """Answers HTTP requests."""

    gate: Gate
    directory: ModelDirectory
    admission: Admission
    pages: Pages
    names: RequestNames
    accounts: Accounts
    requests: Requests
    kills: Kills
    lobby: Lobby
    large: LargeBodies
    levels: AllLevels
    body_bytes_max: int
    _tasks: Tasks = field(default_factory=lambda: Tasks("frontend"))
    _held_bytes: int = 0  # by all of them

    def begin(self, connection: HttpConnection, request: HttpRequest) -> None:
        """What every answer has, also one to what is no request."""
        connection.request_id = self.names.of(request.headers)
        connection.answer_headers = self.gate.headers_for(request)
        connection.on_status = self.accounts.count_answer if request.path in _GENERATING else None
        if self.accounts.access is not None:
            self.accounts.access.begin(connection, request)

    def admit(self, connection: HttpConnection, request: HttpRequest) -> int:
        """Return how much of a request's body is read, by its head alone; RefusedRequest: none, and why. A short body
        with a key is read whatever is wrong with its head, so that the connection can go on after the answer."""
        try:
            self._check_head(request)
        except ApiError as error:
            length = request.headers.get(b"content-length", b"")
            if error.status != HTTPStatus.UNAUTHORIZED and not (
                length.isdigit() and int(length) > OTHER_BODY_BYTES_MAX
            ):
                return OTHER_BODY_BYTES_MAX
            log_failure("without a name", error)
            raise RefusedRequest(error.status, error.message, headers=error.headers, body=error.body()) from None
        return self.body_bytes_max if request.path in _GENERATING else OTHER_BODY_BYTES_MAX

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        """The root of every request."""
        try:
            self._route(connection, request)
        except ApiError as error:
            _refuse(connection, error)
        except Exception:
            log.exception("bug while answering %s %s (request %s)", request.method, request.path, connection.request_id)
            _refuse(connection, ApiError(500, "internal error; the log has the details", SERVER))

    def _route(self, connection: HttpConnection, request: HttpRequest) -> None:
        path = request.path
        allowed = self.gate.may_ask_first(request)
        if allowed is not None:
            connection.respond(200, b"", b"text/plain", allowed)
            return
        caller = self._check_head(request)
        if path in _GENERATING:
            self._generate(connection, request, _GENERATING[path], caller)
        elif self.pages.has(path):
            self.pages.answer(connection, path)
        else:
            about = self.kills if request.method == "DELETE" else self.requests
            about.answer(connection, path, caller.key)

    def _check_head(self, request: HttpRequest) -> Caller:
        """Return who asks; ApiError, if its key, path, method or kind of body will not do."""
        path = request.path
        if self.gate.may_ask_first(request) is not None:
            return ANYONE
        caller = self.gate.check_key(request) if path not in OPEN_PATHS else ANYONE
        if path in _GENERATING:
            self.gate.check_method(request, "POST")
            self.gate.check_body(request)
        elif self.pages.has(path):
            self.gate.check_method(request, "GET", "HEAD")
        elif self.requests.has(path):
            self.gate.check_method(request, "GET", "HEAD", *(("DELETE",) if path != REQUESTS else ()))
        else:
            raise ApiError(404, f"unknown path {path[:200]!r}; see /v1/models, /v1/chat/completions, /v1/completions")
        return caller

    # -- generating

    def _generate(self, connection: HttpConnection, request: HttpRequest, endpoint: str, caller: Caller) -> None:
        if self.pages.draining and not self.pages.replaced:
            connection.closing = True
            raise ApiError(503, "this frontend is shutting down", SERVER, None, "draining", retry_after_s=1.0)
        tier = self.gate.tier_of(request, caller)
        answer_id = self.names.of_answer(endpoint)
        account = self.accounts.begin(endpoint, tier, id=answer_id, name=connection.request_id, key=caller.key)
        body, request.body = request.body, b""  # the connection keeps its request for as long as it is answered
        try:
            self.levels.check(tier)
            if len(body) > PARSE_NOW_BYTES_MAX:
                self._prepare_slowly(connection, account, body)
                return
            try:
                parsed = PARSERS[endpoint](body)
            except Unexplained:
                self._prepare_slowly(connection, account, body)  # its reader has the time to find the field
                return
            account.named(parsed)
            account.held_bytes = parsed.held_bytes(len(body))
            if not self._launch_now(connection, account, parsed):
                self._prepare_slowly(connection, account, parsed)
        except BaseException:
            account.over(None)
            raise

    def _launch_now(self, connection: HttpConnection, account: Account, parsed: ParsedRequest) -> bool:
        """Everything in this turn of the loop, where it is little; False: it has to be prepared."""
        workers = self.admission.find_set(parsed)
        if workers is None:
            return False
        self._is_served_by(workers, account)
        text = cast(ModelText, workers.text)
        prompts = self.admission.prompt_texts(parsed, text)
        if not self.admission.is_short(prompts):
            return False
        tokens = self.admission.encode_now(parsed, text, prompts)
        self.admission.launch(connection, parsed, workers, text, tokens, account=account)
        return True

    def _is_served_by(self, workers: WorkerSet, account: Account) -> None:
        """ApiError, if the deployment that it asks for sheds it."""
        self.levels.check_for(workers.deployment, account.tier)
        account.deployment = workers.deployment

    def _prepare_slowly(self, connection: HttpConnection, account: Account, asked: ParsedRequest | bytes) -> None:
        if isinstance(asked, bytes):
            account.held_bytes = len(asked)
        held_bytes = self._held_bytes - self.lobby.held_bytes + account.held_bytes
        if len(self._tasks) - len(self.lobby) >= PREPARING_MAX or held_bytes > PREPARING_BYTES_MAX:
            raise too_busy("too many requests are being prepared", "preparing")
        self._held_bytes += account.held_bytes
        task = self._tasks.spawn(self._prepare(connection, account, asked), "prepare")
        # Not inside the task: one that is cancelled before its first step never gets to run a line of its own.
        task.add_done_callback(lambda done: self._prepared(account, done))
        connection.responder = account.preparing = _Preparing(connection, account, task)

    def _prepared(self, account: Account, done: asyncio.Task[None]) -> None:
        self._held_bytes -= account.held_bytes
        if done.cancelled():
            account.over(None)

    async def _prepare(self, connection: HttpConnection, account: Account, asked: ParsedRequest | bytes) -> None:
        """A request that could not be launched at once; the root of its task."""
        try:
            parsed = await self._parse_large(account, asked) if isinstance(asked, bytes) else asked
            del asked  # a body, of which all is known
            workers = await self.lobby.wait(account, connection, parsed, self.admission.find_set)
            self._is_served_by(workers, account)
            text = cast(ModelText, workers.text)
            prompts = await asyncio.to_thread(self.admission.prompt_texts, parsed, text)
            tokens = await self.admission.encode(parsed, text, prompts)
            self.admission.launch(connection, parsed, workers, text, tokens, account=account)
        except ApiError as error:
            account.over(None)
            _refuse(connection, error)
        except Exception:
            log.exception("bug while preparing request %s", connection.request_id)
            account.over(None)
            _refuse(connection, ApiError(500, "internal error; the log has the details", SERVER))

    async def _parse_large(self, account: Account, body: bytes) -> ParsedRequest:
        contexts = {name: card.context_tokens_max for name, card in self.directory.models().items()}
        parsed = await self.large.parse(account.endpoint, body, contexts)
        account.named(parsed)
        more_bytes = parsed.held_bytes(len(body)) - account.held_bytes
        account.held_bytes += more_bytes
        self._held_bytes += more_bytes
        return parsed

    async def close(self) -> None:
        await self._tasks.stop()
        await self.kills.close()
        await self.large.close()


def _refuse(connection: HttpConnection, error: ApiError) -> None:
    log_failure(connection.request_id, error)
    if connection.streaming:  # its client was told how it waits
        connection.end_stream(b"data: " + error.body() + b"\n\n")
    else:
        connection.respond(error.status, error.body(), headers=error.headers)
