"""The OpenAI surface: paths, keys, and one root per request where every failure becomes an answer."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

from holdfast.core.errors import Code
from holdfast.frontend.admission import Admission, too_busy
from holdfast.frontend.api.chat import parse_chat
from holdfast.frontend.api.completions import parse_completion
from holdfast.frontend.api.errors import SERVER, ApiError, no_worker, of_failure
from holdfast.frontend.api.request import ParsedRequest
from holdfast.frontend.model_text import ModelText
from holdfast.frontend.pages import OPEN_PATHS, Pages
from holdfast.frontend.reply import Reply
from holdfast.frontend.request_names import RequestNames, log_failure
from holdfast.migration.sets import ModelDirectory, WorkerSet
from holdfast.wire.http import HttpConnection, HttpRequest

log = logging.getLogger("holdfast.frontend")

# Requests being tokenized in threads or waiting for a first worker; each holds its body.
PREPARING_MAX = 1024

Parse = Callable[[bytes], ParsedRequest]
Over = Callable[[Reply | None], None]
_GENERATING: dict[str, tuple[Parse, str]] = {
    "/v1/chat/completions": (parse_chat, "chat"),
    "/v1/completions": (parse_completion, "completions"),
}


@dataclass(frozen=True, slots=True)
class AppSettings:
    """Who may ask, and how long a request waits for a model's first worker."""

    api_keys: frozenset[str] = frozenset()
    model_wait_s: float = 30.0


@dataclass(slots=True)
class _Preparing:
    """Stands in as the responder until the reply exists, so that a client's leaving is noticed."""

    connection: HttpConnection
    task: asyncio.Task[None]

    def client_gone(self) -> None:
        self.task.cancel()

    def cut_off(self, why: str) -> None:
        self.task.cancel()
        _refuse(self.connection, of_failure(Code.ENGINE_SHUTDOWN, why, retry_after_s=1.0))

    def client_writable(self) -> None:
        """Nothing has been written yet."""


@dataclass(slots=True)
class App:
    """Answers HTTP requests."""

    settings: AppSettings
    directory: ModelDirectory
    admission: Admission
    pages: Pages
    names: RequestNames
    inflight: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _models_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _became_idle: asyncio.Event = field(default_factory=asyncio.Event)

    def models_changed(self) -> None:
        """Wake whoever waits for a model."""
        self._models_changed.set()
        self._models_changed = asyncio.Event()

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        """The root of every request."""
        connection.request_id = self.names.of(request.headers)
        try:
            self._route(connection, request)
        except ApiError as error:
            _refuse(connection, error)
        except Exception:
            log.exception("bug while answering %s %s (request %s)", request.method, request.path, connection.request_id)
            _refuse(connection, ApiError(500, "internal error; the log has the details", SERVER))

    def _route(self, connection: HttpConnection, request: HttpRequest) -> None:
        path = request.path
        if path not in OPEN_PATHS:
            self._check_key(request)
        if path in _GENERATING:
            _only(request.method, "POST")
            self._generate(connection, request, *_GENERATING[path])
        elif self.pages.has(path):
            _only(request.method, "GET", "HEAD")
            self.pages.answer(connection, path)
        else:
            raise ApiError(404, f"unknown path {path[:200]!r}; see /v1/models, /v1/chat/completions, /v1/completions")

    def _check_key(self, request: HttpRequest) -> None:
        keys = self.settings.api_keys
        if not keys:
            return
        given = request.headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not any(hmac.compare_digest(given, key.encode()) for key in keys):
            message = "missing or wrong API key; send 'Authorization: Bearer KEY'"
            raise ApiError(401, message, "authentication_error", None, "invalid_api_key")

    # -- generating

    def _generate(self, connection: HttpConnection, request: HttpRequest, parse: Parse, endpoint: str) -> None:
        if self.pages.draining:
            connection.closing = True
            raise ApiError(503, "this frontend is shutting down", SERVER, None, "draining", retry_after_s=1.0)
        began_s = asyncio.get_running_loop().time()
        try:
            parsed = parse(request.body)
        except ApiError:
            self.pages.metrics.requests.labels("unknown", endpoint, "unknown", "error").inc()
            raise
        over = self._begin(parsed, endpoint, began_s)
        try:
            workers = self.admission.find_set(parsed)
            if workers is not None:
                text = cast(ModelText, workers.text)
                prompts = self.admission.prompt_texts(parsed, text)
                if self.admission.is_short(prompts):
                    tokens = self.admission.encode_now(parsed, text, prompts)
                    self.admission.launch(connection, parsed, workers, text, tokens, over)
                    return
        except ApiError:
            over(None)
            raise
        self._prepare_slowly(connection, parsed, over)

    def _prepare_slowly(self, connection: HttpConnection, parsed: ParsedRequest, over: Over) -> None:
        if len(self._tasks) >= PREPARING_MAX:
            over(None)
            raise too_busy()
        task = self._spawn(self._prepare(connection, parsed, over))
        # Not inside the task: one that is cancelled before its first step never gets to run a line of its own.
        task.add_done_callback(lambda done: over(None) if done.cancelled() else None)
        connection.responder = _Preparing(connection, task)

    async def _prepare(self, connection: HttpConnection, parsed: ParsedRequest, over: Over) -> None:
        """A request that could not be launched at once; the root of its task."""
        try:
            workers = await self._wait_for_set(parsed)
            text = cast(ModelText, workers.text)
            prompts = self.admission.prompt_texts(parsed, text)
            tokens = await self.admission.encode(parsed, text, prompts)
            self.admission.launch(connection, parsed, workers, text, tokens, over)
        except ApiError as error:
            over(None)
            _refuse(connection, error)
        except Exception:
            log.exception("bug while preparing request %s", connection.request_id)
            over(None)
            _refuse(connection, ApiError(500, "internal error; the log has the details", SERVER))

    async def _wait_for_set(self, parsed: ParsedRequest) -> WorkerSet:
        """The set, waiting for a worker if none has come yet or all have gone."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self.settings.model_wait_s
        while True:
            changed = self._models_changed
            workers = self.admission.find_set(parsed)
            if workers is not None:
                return workers
            try:
                async with asyncio.timeout_at(deadline_s):
                    await changed.wait()
            except TimeoutError:
                raise no_worker(parsed.model, f"none has come up within {self.settings.model_wait_s:g} s") from None

    def _begin(self, parsed: ParsedRequest, endpoint: str, began_s: float) -> Over:
        """Count a request in; what is returned counts it out, with its reply or None for a refusal."""
        # A name a client made up must not become a label for ever.
        model = parsed.model if self.directory.knows(parsed.model) else "unknown"
        kind = "stream" if parsed.stream else "unary"
        self.inflight += 1
        self.pages.metrics.inflight.labels(model).inc()

        def over(reply: Reply | None) -> None:
            self.inflight -= 1
            if self.inflight == 0:
                self._became_idle.set()
            self.pages.metrics.inflight.labels(model).dec()
            outcome = reply.outcome if reply is not None else "error"
            self.pages.metrics.requests.labels(model, endpoint, kind, outcome).inc()
            if reply is not None:
                self._count(reply, model, began_s)

        return over

    def _count(self, reply: Reply, model: str, began_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        made = reply.completion_token_count()
        shown = self.pages.metrics
        shown.duration.labels(model).observe(now_s - began_s)
        shown.input_tokens.labels(model).observe(reply.prompt_token_count())
        shown.output_tokens.labels(model).observe(made)
        shown.output_total.labels(model).inc(made)
        if reply.outcome == "cancelled":
            shown.disconnects.inc()
        if reply.first_token_s:
            shown.ttft.labels(model).observe(reply.first_token_s - began_s)

    # -- tasks

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def idle(self) -> None:
        """Wait until no request is under way."""
        while self.inflight:
            self._became_idle.clear()
            await self._became_idle.wait()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _WrongMethod(ApiError):
    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        super().__init__(405, f"method {method} is not allowed here; use {allowed[0]}")
        self.allow = ", ".join(allowed).encode()


def _only(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise _WrongMethod(method, allowed)


def _refuse(connection: HttpConnection, error: ApiError) -> None:
    log_failure(connection.request_id, error)
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if error.retry_after_s is not None:
        headers = ((b"retry-after", b"%d" % max(1, round(error.retry_after_s))),)
    elif isinstance(error, _WrongMethod):
        headers = ((b"allow", error.allow),)
    elif error.status == 401:
        headers = ((b"www-authenticate", b"Bearer"),)
    connection.respond(error.status, error.body(), headers=headers)
