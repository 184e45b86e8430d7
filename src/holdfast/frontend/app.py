"""Routes HTTP requests: checks path and key, and turns every failure of a request into an answer."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

from holdfast.core.errors import Code
from holdfast.core.tasks import Tasks
from holdfast.frontend.access import ANYONE, AccessRules, Caller, RequestNames
from holdfast.frontend.admission import Admission
from holdfast.frontend.api.errors import SERVER, ApiError, log_failure, of_failure, too_busy
from holdfast.frontend.api.parse import Unexplained
from holdfast.frontend.api.request import ParsedRequest
from holdfast.frontend.body_reader import PARSERS
from holdfast.frontend.kills import KillHandler
from holdfast.frontend.large_bodies import PARSE_NOW_BYTES_MAX, LargeBodies
from holdfast.frontend.model_text import TextSide
from holdfast.frontend.notes import PROGRESS_HEADER, add_queued_header, send_error
from holdfast.frontend.pages import OPEN_PATHS, StatusPages
from holdfast.frontend.pending_models import PendingModels
from holdfast.frontend.request_tracker import RequestTracker, TrackedRequest
from holdfast.frontend.requests import HTML_PATH, RequestsPage
from holdfast.frontend.requests import PATH as REQUESTS
from holdfast.frontend.shedding import DeploymentLevels
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.flight import WorkerSet
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest, RefusedRequest

log = logging.getLogger("holdfast.frontend")

# Requests that are parsed in another process or tokenized in threads, and their memory: sixteen of the largest bodies
# that are text. Requests that wait for a first worker are counted apart.
PREPARING_MAX = 1024
PREPARING_BYTES_MAX = 512 * 1024 * 1024

# Limit on bodies of requests that need none: some clients send "{}" with every request.
OTHER_BODY_BYTES_MAX = 64 * 1024

_GENERATING = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}  # each is a key of PARSERS


@dataclass(slots=True)
class _Preparing:
    """The responder of a request until its reply exists; it notices when the client leaves."""

    connection: HttpConnection
    tracked: TrackedRequest
    task: asyncio.Task[None]

    def client_gone(self) -> None:
        self.tracked.client_left()
        self.task.cancel()

    def cut_off(self, why: str) -> None:
        self.task.cancel()
        _refuse(self.connection, of_failure(Code.ENGINE_SHUTDOWN, why, retry_after_s=1.0))

    def client_writable(self) -> None:
        """Do nothing: nothing has been written yet."""

    def kill(self, error: ApiError) -> None:
        self.task.cancel()
        _refuse(self.connection, error)


@dataclass(slots=True)
class App:
    """Answers HTTP requests."""

    access: AccessRules
    directory: ModelDirectory
    admission: Admission
    pages: StatusPages
    names: RequestNames
    tracker: RequestTracker
    requests: RequestsPage
    kills: KillHandler
    pending: PendingModels
    large: LargeBodies
    levels: DeploymentLevels
    body_bytes_max: int
    _tasks: Tasks = field(default_factory=lambda: Tasks("frontend"))
    _held_bytes: int = 0  # by all requests being prepared

    def begin(self, connection: HttpConnection, request: HttpRequest) -> None:
        """Set the name and headers that every answer has, even the answer to an invalid request."""
        connection.request_id = self.names.of(request.headers)
        connection.answer_headers = self.access.headers_for(request)
        connection.on_status = self.tracker.count_answer if request.path in _GENERATING else None
        if self.tracker.access is not None:
            self.tracker.access.begin(connection, request)

    def admit(self, connection: HttpConnection, request: HttpRequest) -> int:
        """Return how many bytes of a request's body to read, judged by its head; raise RefusedRequest to read none. If
        the key is right, a short body is read even if its head is wrong: the connection can then be used further."""
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
        """Answer a request; all its errors end here."""
        try:
            self._route(connection, request)
        except ApiError as error:
            _refuse(connection, error)
        except Exception:
            log.exception("bug while answering %s %s (request %s)", request.method, request.path, connection.request_id)
            _refuse(connection, ApiError(500, "internal error; the log has the details", SERVER))

    def _route(self, connection: HttpConnection, request: HttpRequest) -> None:
        path = request.path
        allowed = self.access.may_ask_first(request)
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
        """Return the client; raise ApiError if its key, path, method or content type is wrong."""
        path = request.path
        if self.access.may_ask_first(request) is not None:
            return ANYONE
        caller = self.access.check_key(request) if path not in OPEN_PATHS else ANYONE
        if path in _GENERATING:
            self.access.check_method(request, "POST")
            self.access.check_body(request)
        elif self.pages.has(path):
            self.access.check_method(request, "GET", "HEAD")
        elif self.requests.has(path):
            self.access.check_method(
                request, "GET", "HEAD", *(("DELETE",) if path not in (REQUESTS, HTML_PATH) else ())
            )
        else:
            raise ApiError(404, f"unknown path {path[:200]!r}; see /v1/models, /v1/chat/completions, /v1/completions")
        return caller

    # -- generating

    def _generate(self, connection: HttpConnection, request: HttpRequest, endpoint: str, caller: Caller) -> None:
        if self.pages.draining and not self.pages.replaced:
            connection.closing = True
            raise ApiError(503, "this frontend is shutting down", SERVER, None, "draining", retry_after_s=1.0)
        tier = self.access.tier_of(request, caller)
        answer_id = self.names.of_answer(endpoint)
        tracked = self.tracker.begin(endpoint, tier, id=answer_id, name=connection.request_id, key=caller.key)
        tracked.progress = request.headers.get(PROGRESS_HEADER) == b"1"
        body, request.body = request.body, b""  # the connection keeps the request object until it is answered
        try:
            self.levels.check(tier)
            if len(body) > PARSE_NOW_BYTES_MAX:
                self._prepare_slowly(connection, tracked, body)
                return
            try:
                parsed = PARSERS[endpoint](body)
            except Unexplained:
                self._prepare_slowly(connection, tracked, body)  # a body reader has the time to find the wrong field
                return
            tracked.named(parsed)
            tracked.held_bytes = parsed.held_bytes(len(body))
            if not self._launch_now(connection, tracked, parsed):
                self._prepare_slowly(connection, tracked, parsed)
        except BaseException:
            tracked.over(None)
            raise

    def _launch_now(self, connection: HttpConnection, tracked: TrackedRequest, parsed: ParsedRequest) -> bool:
        """Launch the request at once if that is little work; return False if it has to be prepared in a task."""
        workers = self.admission.find_set(parsed)
        if workers is None:
            return False
        self._is_served_by(workers, tracked)
        text = cast(TextSide, workers.text)
        prompts = self.admission.prompt_texts(parsed, text)
        if not self.admission.is_short(prompts):
            return False
        tokens = self.admission.encode_now(parsed, text, prompts)
        self.admission.launch(connection, parsed, workers, text, tokens, tracked=tracked)
        return True

    def _is_served_by(self, workers: WorkerSet, tracked: TrackedRequest) -> None:
        """Note the deployment; raise ApiError if it sheds the request."""
        self.levels.check_for(workers.deployment, tracked.tier)
        tracked.deployment = workers.deployment

    def _prepare_slowly(
        self, connection: HttpConnection, tracked: TrackedRequest, asked: ParsedRequest | bytes
    ) -> None:
        if isinstance(asked, bytes):
            tracked.held_bytes = len(asked)
        held_bytes = self._held_bytes - self.pending.held_bytes + tracked.held_bytes
        if len(self._tasks) - len(self.pending) >= PREPARING_MAX or held_bytes > PREPARING_BYTES_MAX:
            raise too_busy("too many requests are being prepared", "preparing")
        self._held_bytes += tracked.held_bytes
        task = self._tasks.spawn(self._prepare(connection, tracked, asked), "prepare")
        # Not inside the task: a task that is cancelled before its first step runs no line of code.
        task.add_done_callback(lambda done: self._prepared(tracked, done))
        connection.responder = tracked.preparing = _Preparing(connection, tracked, task)

    def _prepared(self, tracked: TrackedRequest, done: asyncio.Task[None]) -> None:
        self._held_bytes -= tracked.held_bytes
        if done.cancelled():
            tracked.over(None)

    async def _prepare(self, connection: HttpConnection, tracked: TrackedRequest, asked: ParsedRequest | bytes) -> None:
        """Prepare a request that could not be launched at once; the root of its task."""
        try:
            parsed = await self._parse_large(tracked, asked) if isinstance(asked, bytes) else asked
            del asked  # frees a large body, which is parsed now
            workers = await self.pending.wait(tracked, connection, parsed, self.admission.find_set)
            self._is_served_by(workers, tracked)
            text = cast(TextSide, workers.text)
            prompts = await asyncio.to_thread(self.admission.prompt_texts, parsed, text)
            tokens = await self.admission.encode(parsed, text, prompts)
            self.admission.launch(connection, parsed, workers, text, tokens, tracked=tracked)
        except ApiError as error:
            tracked.over(None)
            if tracked.waited:
                add_queued_header(connection, asyncio.get_running_loop().time() - tracked.began_s)
            _refuse(connection, error)
        except Exception:
            log.exception("bug while preparing request %s", connection.request_id)
            tracked.over(None)
            _refuse(connection, ApiError(500, "internal error; the log has the details", SERVER))

    async def _parse_large(self, tracked: TrackedRequest, body: bytes) -> ParsedRequest:
        contexts = {name: card.context_tokens_max for name, card in self.directory.models().items()}
        parsed = await self.large.parse(tracked.endpoint, body, contexts)
        tracked.named(parsed)
        more_bytes = parsed.held_bytes(len(body)) - tracked.held_bytes
        tracked.held_bytes += more_bytes
        self._held_bytes += more_bytes
        return parsed

    async def close(self) -> None:
        await self._tasks.stop()
        await self.kills.close()
        await self.large.close()


def _refuse(connection: HttpConnection, error: ApiError) -> None:
    log_failure(connection.request_id, error)
    send_error(connection, error)
