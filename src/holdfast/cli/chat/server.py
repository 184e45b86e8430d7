"""Connects a chat to its server: finds the model, sends a message, and yields the streamed answer as events.

Always true:
- Every wait has a bound.
- Every failure becomes a `ChatTrouble` that says in one line what happened and whether sending again makes sense.
- The bytes may arrive in any pieces; an event without an end is refused before it fills the memory.
- An answer ends with `AnswerEnd` or with a `ChatTrouble`.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import select
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from holdfast.core.errors import Code, UserError

CONNECT_S = 5.0  # to a machine that is up, over any network
RETURN_S = 5.0  # a supervised frontend that died listens again within two seconds
SILENCE_S = 300.0  # a CPU may need minutes for a long prompt; the user can press Ctrl-C
QUIET_S = 2.0  # after this long without data, ask whether an engine is up
HEALTH_S = 1.0  # short, because the result is only shown to the user
EVENT_BYTES_MAX = 4 * 1024 * 1024  # far more than any chunk of text
PIECE_BYTES = 65_536
ERROR_BYTES_MAX = 65_536
PAGE_BYTES_MAX = 1024 * 1024  # list of models, or a frontend's facts


# -- the answer, read from its bytes


class AnswerText(msgspec.Struct, frozen=True):
    text: str


class AnswerResumed(msgspec.Struct, frozen=True):
    """The answer was interrupted, and continues after a pause."""

    pause_s: float


class AnswerWaits(msgspec.Struct, frozen=True):
    """The answer is held: no engine is up, or all are full and it waits in the queue."""

    place: int = 0  # place in the queue; 0: no engine is up


class AnswerEnd(msgspec.Struct, frozen=True):
    finish: str
    exact: bool  # the text equals that of an uninterrupted run


Event = AnswerText | AnswerResumed | AnswerWaits | AnswerEnd


class ChatTrouble(Exception):
    """The reason why the answer is missing or incomplete; `again`: whether sending the message again makes sense."""

    def __init__(self, message: str, *, again: bool = True) -> None:
        super().__init__(" ".join(message.split())[:500])
        self.again = again


# -- messages of the server


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class ErrorBody(msgspec.Struct):
    message: str = "no reason given"
    type: str | None = None
    code: str | int | None = None

    def trouble(self, where: str) -> ChatTrouble:
        hopeless = self.type == "invalid_request_error" or self.code == Code.POISONED
        return ChatTrouble(f"{where}: {self.message}", again=not hopeless)


class _Holdfast(msgspec.Struct):
    exact: bool = True


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: ErrorBody | None = None
    holdfast: _Holdfast = msgspec.field(default_factory=_Holdfast)


_QUEUED = re.compile(r"queued (\d{1,9})")
_RESUMED = re.compile(r"resumed after (\d{1,9}(?:\.\d{1,9})?) s")


def _comment(text: str) -> Iterator[Event]:
    """Yield the event that a comment reports; other comments are ignored."""
    if text.partition(":")[0] in ("provisioning", "held", "waiting"):  # the reason follows; "waiting": older servers
        yield AnswerWaits()
    elif found := _QUEUED.fullmatch(text):
        yield AnswerWaits(int(found[1]))
    elif found := _RESUMED.fullmatch(text):
        yield AnswerResumed(float(found[1]))


class AnswerReader:
    """Reads the events of one answer from its server-sent events, however their bytes are split."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""
        self._data: list[str] = []  # lines of the current event
        self._size = 0
        self._ended = AnswerEnd("", True)

    def feed(self, data: bytes) -> Iterator[Event]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) + self._size > EVENT_BYTES_MAX:
            raise ChatTrouble("the server sent an event without an end", again=False)
        for line in lines:
            yield from self._line(line.removesuffix(b"\r").decode(errors="replace"))
            if self.done:
                return

    def _line(self, line: str) -> Iterator[Event]:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line and self._data:
            text, self._data, self._size = "\n".join(self._data), [], 0
            if text == "[DONE]":
                self.done = True
                yield self._ended
            else:
                yield from self._chunk(text)
        elif not name:  # a comment, or an empty line
            yield from _comment(value)
        elif name == "data":
            self._data.append(value)
            self._size += len(value)

    def _chunk(self, text: str) -> Iterator[Event]:
        try:
            chunk = msgspec.json.decode(text, type=_Chunk)
        except msgspec.DecodeError as error:
            raise ChatTrouble(f"the server's response is not a chat answer: {error}", again=False) from None
        if chunk.error is not None:
            raise chunk.error.trouble("the answer broke off")
        for choice in chunk.choices[:1]:
            if choice.delta.content:
                yield AnswerText(choice.delta.content)
            if choice.finish_reason is not None:
                self._ended = AnswerEnd(choice.finish_reason, chunk.holdfast.exact)


# -- the connection


class _Refusal(msgspec.Struct):
    error: ErrorBody


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Server:
    """The server that messages are sent to."""

    url: str
    api_key: str = ""

    @classmethod
    def at(cls, url: str, api_key: str = "") -> Server:
        """Return the server at a URL that a user typed; a final /v1, which other clients require, is removed."""
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            known = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            known = False
        if not known:
            raise UserError(f"--url {url!r} is not the address of a server, e.g. http://127.0.0.1:8000")
        if not api_key.isascii() or not api_key.isprintable():
            raise UserError("--api-key must be printable ASCII")
        return cls(text.rstrip("/").removesuffix("/v1"), api_key)

    def model(self) -> str:
        """Return the first model of the server."""
        with self._known_troubles(), contextlib.closing(self._connection(CONNECT_S)) as connection:
            connection.request("GET", self._path("/v1/models"), headers=self._headers())
            response = connection.getresponse()
            if response.status != 200:
                raise _refused(response)
            try:
                models = msgspec.json.decode(response.read(PAGE_BYTES_MAX), type=_Models).data
            except msgspec.DecodeError:
                raise ChatTrouble(f"{self.url} does not list its models; is it an OpenAI-compatible server?") from None
        if not models:
            raise ChatTrouble(f"{self.url} has no model yet; `holdfast status` shows what is missing")
        return models[0].id

    def answer(self, body: dict[str, Any]) -> Generator[Event]:
        """Send a request and yield the events of its answer. Close the generator to stop the answer."""
        with self._known_troubles(), contextlib.closing(self._connection(CONNECT_S)) as connection:
            self._connect(connection)
            data = msgspec.json.encode({**body, "stream": True})
            headers = {**self._headers(), "content-type": "application/json"}
            connection.request("POST", self._path("/v1/chat/completions"), data, headers)
            yield from self._until_it_begins(connection)
            response = connection.getresponse()
            if response.status != 200:
                raise _refused(response)
            with contextlib.closing(response):
                yield from _read(response)

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        """Connect; retry for a while, because the server may be restarting."""
        until_s = time.monotonic() + RETURN_S
        while True:
            try:
                connection.connect()
                connection.sock.settimeout(SILENCE_S)
                return
            except ConnectionRefusedError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.1)

    def _until_it_begins(self, connection: http.client.HTTPConnection) -> Iterator[Event]:
        """Wait for the first byte of the answer. The server sends no header before the first token, so ask on a second
        connection whether an engine is up, and yield AnswerWaits if not."""
        until_s = time.monotonic() + SILENCE_S
        while not select.select([connection.sock], [], [], QUIET_S)[0] and time.monotonic() < until_s:
            if self._has_no_engine():
                yield AnswerWaits()

    def _has_no_engine(self) -> bool:
        connection = self._connection(HEALTH_S)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            connection.request("GET", self._path("/health"))
            facts = msgspec.json.decode(connection.getresponse().read(PAGE_BYTES_MAX), type=dict[str, Any])
            return facts.get("status") == "no_worker"
        return False

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname, parts.port, timeout=timeout_s)

    def _path(self, path: str) -> str:
        return urlsplit(self.url).path + path

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @contextlib.contextmanager
    def _known_troubles(self) -> Iterator[None]:
        """Turn network errors into ChatTrouble."""
        try:
            yield
        except ConnectionRefusedError:
            raise ChatTrouble(f"nothing listens at {self.url}; `holdfast status` shows what runs") from None
        except TimeoutError:
            raise ChatTrouble(f"{self.url} does not answer") from None
        except (ConnectionError, http.client.RemoteDisconnected):
            raise ChatTrouble("the server went away before it answered") from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise ChatTrouble(f"the request to {self.url} failed: {error or type(error).__name__}") from None


def _read(response: http.client.HTTPResponse) -> Iterator[Event]:
    reader = AnswerReader()
    try:
        while not reader.done and (piece := response.read1(PIECE_BYTES)):
            yield from reader.feed(piece)
    except (ConnectionError, http.client.IncompleteRead):
        pass  # raised below: to a user a cut answer is the same with or without a proper end
    if not reader.done:
        raise ChatTrouble("the server went away in the middle of the answer")


def _refused(response: http.client.HTTPResponse) -> ChatTrouble:
    try:
        error = msgspec.json.decode(response.read(ERROR_BYTES_MAX), type=_Refusal).error
    except msgspec.DecodeError:
        error = ErrorBody("it gives no reason")
    if response.status == 401:
        return ChatTrouble("the server requires an API key, or rejects this one; give one with --api-key", again=False)
    trouble = error.trouble(f"the server answers {response.status}")
    trouble.again = trouble.again and (response.status >= 500 or response.status == 429)
    return trouble
