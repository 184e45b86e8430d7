"""An HTTP/1.1 server protocol on httptools: one synchronous call per request, raw writes for streams.

Why not an ASGI server: on the per-token path every layer costs microseconds (facts 33; docs/decisions.md has
our own measurement). Always true: headers and bodies are bounded; a malformed request gets a 400 and a close;
one response at a time per connection, pipelined requests wait in order; whoever answers learns at once when
the client is gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, cast

import httptools
import msgspec

from holdfast.wire.net import set_nodelay

# Past this many unsent bytes a client counts as slow, and its stream waits in the ledger.
WRITE_HIGH_BYTES = 64 * 1024
# Requests a client may send ahead of their answers; browsers use 1, and memory must have a bound.
PIPELINE_MAX = 16


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of what a client may send."""

    header_bytes_max: int = 32 * 1024
    body_bytes_max: int = 16 * 1024 * 1024


@dataclass(slots=True)
class HttpRequest:
    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool
    http10: bool


class Responder(Protocol):
    """Whoever is answering the current request on a connection."""

    def client_gone(self) -> None: ...

    def client_writable(self) -> None: ...


Handler = Callable[["HttpConnection", HttpRequest], None]


class HttpConnection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, handler: Handler, limits: HttpLimits, registry: set[HttpConnection]) -> None:
        self._handler = handler
        self._limits = limits
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport | None = None
        self.responder: Responder | None = None
        self.paused = False
        self.paused_since_s = 0.0
        self.closing = False  # no further request is taken
        self.busy = False  # a request is being answered
        self.active_at_s = self._loop.time()
        self._request: HttpRequest | None = None
        self._chunked = False
        self._waiting: deque[HttpRequest] = deque()
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._receiving = False

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        set_nodelay(transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._registry.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._registry.discard(self)
        self._waiting.clear()
        responder, self.responder = self.responder, None
        if responder is not None:
            responder.client_gone()

    def pause_writing(self) -> None:
        self.paused = True
        self.paused_since_s = self._loop.time()

    def resume_writing(self) -> None:
        self.paused = False
        if self.responder is not None:
            self.responder.client_writable()

    def data_received(self, data: bytes) -> None:
        if self.closing and not self.busy:
            return
        self.active_at_s = self._loop.time()
        try:
            self._parser.feed_data(data)
        except _Refused as refused:
            self._refuse(refused.status, refused.message)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "protocol upgrades are not supported")
        except httptools.HttpParserError as error:
            inner = error.__context__
            if isinstance(inner, _Refused):
                self._refuse(inner.status, inner.message)
            else:
                self._refuse(400, f"malformed HTTP request: {error}")

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        self._reset()
        self._receiving = True

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        self._headers[name.lower()] = value

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._limits.header_bytes_max:
            raise _Refused(431, f"request headers are over {self._limits.header_bytes_max} bytes")

    def on_headers_complete(self) -> None:
        length = self._headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limits.body_bytes_max:
            limit = self._limits.body_bytes_max
            raise _Refused(413, f"request body of {int(length)} bytes is over the limit of {limit}")
        if self._headers.get(b"expect", b"").lower() == b"100-continue" and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.body_bytes_max:
            raise _Refused(413, f"request body is over the limit of {self._limits.body_bytes_max} bytes")
        self._body.append(body)

    def on_message_complete(self) -> None:
        path = self._url.partition(b"?")[0].decode("latin-1")
        http10 = self._parser.get_http_version() == "1.0"
        request = HttpRequest(
            self._parser.get_method().decode("latin-1"),
            path,
            self._headers,
            b"".join(self._body),
            self._parser.should_keep_alive(),
            http10,
        )
        self._reset()
        if self.busy:
            if len(self._waiting) >= PIPELINE_MAX:
                raise _Refused(429, f"more than {PIPELINE_MAX} requests sent ahead on one connection")
            self._waiting.append(request)
        else:
            self._serve(request)

    def _serve(self, request: HttpRequest) -> None:
        self.busy = True
        self._request = request
        self._handler(self, request)

    @property
    def receiving(self) -> bool:
        """A request has begun to arrive and is not complete."""
        return self._receiving

    # -- answering

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        """A whole response."""
        if self.transport is None:
            return
        head = self._head(status, content_type, headers) + b"content-length: %d\r\n\r\n" % len(body)
        without_body = self._request is not None and self._request.method == "HEAD"
        self.transport.write(head if without_body else head + body)
        self._finish_response()

    def start_stream(self, content_type: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
        """The head of a streamed 200; the caller writes it together with its first chunk."""
        assert self._request is not None
        self._chunked = not self._request.http10
        if self._chunked:
            return self._head(200, content_type, headers) + b"transfer-encoding: chunked\r\n\r\n"
        self.closing = True
        return self._head(200, content_type, headers) + b"\r\n"

    def write(self, data: bytes, head: bytes = b"") -> None:
        """One piece of a streamed body."""
        if self.transport is not None:
            self.transport.write(b"%b%x\r\n%b\r\n" % (head, len(data), data) if self._chunked else head + data)

    def end_stream(self, data: bytes = b"", head: bytes = b"") -> None:
        """The last piece of a streamed body."""
        if data:
            self.write(data, head)
        if self.transport is not None and self._chunked:
            self.transport.write(b"0\r\n\r\n")
        self._finish_response()

    def abort(self) -> None:
        """Drop the client at once."""
        if self.transport is not None:
            self.transport.abort()

    def close_when_idle(self) -> None:
        """Take no further request; close now if none is being answered."""
        self.closing = True
        if not self.busy and self.transport is not None:
            self.transport.close()

    def _head(self, status: int, content_type: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
        keep = self._request is not None and self._request.keep_alive and not self.closing
        lines = [_status_line(status), b"content-type: " + content_type + b"\r\n"]
        lines += [name + b": " + value + b"\r\n" for name, value in headers]
        if not keep:
            self.closing = True
            lines.append(b"connection: close\r\n")
        elif self._request is not None and self._request.http10:
            lines.append(b"connection: keep-alive\r\n")
        return b"".join(lines)

    def _finish_response(self) -> None:
        self.responder = None
        self.busy = False
        self._request = None
        self.active_at_s = self._loop.time()
        if self.transport is None:
            return
        if self.closing:
            self.transport.close()
        elif self._waiting:
            # Through the loop, so that a long pipeline does not become a deep stack.
            self._loop.call_soon(self._serve_waiting)

    def _serve_waiting(self) -> None:
        if self._waiting and not self.busy and self.transport is not None:
            self._serve(self._waiting.popleft())

    def _refuse(self, status: int, message: str) -> None:
        """Answer bytes that are not a request we can take, then close: the parser's place is lost."""
        self.closing = True
        self._waiting.clear()
        if self.transport is None:
            return
        if self.busy:
            self.transport.pause_reading()  # the response under way goes out, then the connection closes
            return
        self._request = None
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        self.respond(status, msgspec.json.encode({"error": error}))


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


_status_lines: dict[int, bytes] = {}


def _status_line(status: int) -> bytes:
    line = _status_lines.get(status)
    if line is None:
        line = _status_lines[status] = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
    return line
