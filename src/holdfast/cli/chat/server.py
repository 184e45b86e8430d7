"""The server a chat talks to: finds its model, asks, and streams the answer as events.

Always true: every wait has a bound; whatever goes wrong on the way becomes a `ChatTrouble`.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from holdfast.cli.chat.events import AnswerReader, ChatTrouble, ErrorSaid, Event, Waiting
from holdfast.core.errors import UserError

CONNECT_S = 5.0  # to a machine that is there, over any network
RETURN_S = 5.0  # a supervised frontend that died listens again within a second or two
SILENCE_S = 300.0  # a CPU may take minutes over a long prompt; a person who is tired of it presses Ctrl-C
QUIET_S = 2.0  # without a word for this long, it is asked whether an engine is up at all
HEALTH_S = 1.0  # it is only for a word to the person
PIECE_BYTES = 65_536
ERROR_BYTES_MAX = 65_536
PAGE_BYTES_MAX = 1024 * 1024  # a list of models, or the facts of a frontend


class _Refusal(msgspec.Struct):
    error: ErrorSaid


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Server:
    """Where the questions go."""

    url: str
    api_key: str = ""

    @classmethod
    def at(cls, url: str, api_key: str = "") -> Server:
        """From what a person typed; a path that ends in /v1, as clients want it, is one without it."""
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
        """The first model it has."""
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
            raise ChatTrouble(f"{self.url} has no model yet; `holdfast ps` shows what is missing")
        return models[0].id

    def answer(self, body: dict[str, Any]) -> Generator[Event]:
        """The streamed answer to one request. Close it to stop the answer."""
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
        """A server that is being started again is waited for."""
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
        """No header comes before the first word, so nothing says that it waits: ask, on a connection of its own."""
        until_s = time.monotonic() + SILENCE_S
        while not select.select([connection.sock], [], [], QUIET_S)[0] and time.monotonic() < until_s:
            if self._has_no_engine():
                yield Waiting()

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
        """What networks do, in words."""
        try:
            yield
        except ConnectionRefusedError:
            raise ChatTrouble(f"nothing listens at {self.url}; `holdfast ps` shows what runs") from None
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
        pass  # said below: cut off with or without a proper end, it is the same to a person
    if not reader.done:
        raise ChatTrouble("the server went away in the middle of the answer")


def _refused(response: http.client.HTTPResponse) -> ChatTrouble:
    try:
        error = msgspec.json.decode(response.read(ERROR_BYTES_MAX), type=_Refusal).error
    except msgspec.DecodeError:
        error = ErrorSaid("it gives no reason")
    if response.status == 401:
        return ChatTrouble("the server requires an API key, or rejects this one; give one with --api-key", again=False)
    trouble = error.trouble(f"the server answers {response.status}")
    trouble.again = trouble.again and (response.status >= 500 or response.status == 429)
    return trouble
