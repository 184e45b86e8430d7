"""An HTTP/1.1 server protocol: one synchronous call per request, raw writes for streams.

Why not an ASGI server: on the per-token path every layer costs microseconds (facts 33; docs/decisions.md has
our own measurement). Always true: one response at a time per connection, pipelined requests wait in order and are
bounded; bytes that are no request get an answer too, in their turn, before the connection closes; whoever answers
learns at once when the client is gone; a streamed body ends where `end_stream` says so and nowhere else, whatever
is written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol, cast

import msgspec

from holdfast.wire.http_request import HttpLimits, HttpRequest, RefusedRequest, RequestReader
from holdfast.wire.net import set_nodelay

__all__ = ["Handler", "HttpConnection", "HttpLimits", "HttpRequest", "Responder"]

# Past this many unsent bytes a client counts as slow, and its stream waits in the ledger.
WRITE_HIGH_BYTES = 64 * 1024
# Requests a client may send ahead of their answers; browsers use 1, and memory must have a bound.
PIPELINE_MAX = 16
# How long a client may go on sending after the last answer. Closing at once would reset the connection under what
# is still on its way, and take the answer with it.
LINGER_S = 2.0


class Responder(Protocol):
    """Whoever is answering the current request on a connection."""

    def client_gone(self) -> None: ...

    def client_writable(self) -> None: ...

    def cut_off(self, why: str) -> None:
        """The server must end before the answer has: say so to the client, by name."""


Handler = Callable[["HttpConnection", HttpRequest], None]


class HttpConnection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, handler: Handler, limits: HttpLimits, registry: set[HttpConnection]) -> None:
        self._handler = handler
        self._limits = limits
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(limits, self._on_request, self._on_expect)
        self.transport: asyncio.Transport | None = None
        self.responder: Responder | None = None
        self.paused = False
        self.paused_since_s = 0.0
        self.closing = False  # the response under way, or the next one, is the last
        self.busy = False  # a request is being answered
        self.request_id = ""  # what the handler calls it; told to the client with the answer
        self.active_at_s = self._loop.time()
        self.receiving_since_s = 0.0  # when the request that is arriving began to
        self._request: HttpRequest | None = None
        self._streaming = False  # the response has begun to go out in pieces
        self._chunked = False
        self._waiting: deque[HttpRequest] = deque()
        self._refusal: RefusedRequest | None = None  # what ended the reading; answered after all that came before it
        self._linger: asyncio.TimerHandle | None = None

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
        if self._linger is not None:
            self._linger.cancel()
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
        if self._refusal is not None or self._linger is not None:
            return  # read on, so that the client's leaving is noticed, and its last bytes reset nothing
        self.active_at_s = self._loop.time()
        begun = self._reader.begun
        try:
            self._reader.feed(data)
        except RefusedRequest as refused:
            self.refuse(refused)
        if self._reader.begun != begun:
            self.receiving_since_s = self.active_at_s

    # -- requests

    @property
    def receiving(self) -> bool:
        """A request has begun to arrive and is not complete."""
        return self._reader.receiving and self._refusal is None

    def _on_request(self, request: HttpRequest) -> None:
        if not self.busy and not self._waiting:
            self._serve(request)
            return
        ahead_bytes = len(request.body) + sum(len(waiting.body) for waiting in self._waiting)
        if len(self._waiting) >= PIPELINE_MAX or ahead_bytes > self._limits.body_bytes_max:
            limit = f"{PIPELINE_MAX} requests or {self._limits.body_bytes_max} bytes"
            raise RefusedRequest(429, f"more than {limit} sent ahead on one connection")
        self._waiting.append(request)

    def _on_expect(self) -> None:
        """Between two responses only; in the middle of one the client must do without, as it may have to anyway."""
        if self.transport is not None and not self.busy and not self._waiting:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _serve(self, request: HttpRequest) -> None:
        self.busy = True
        self._request = request
        self._handler(self, request)

    def _serve_waiting(self) -> None:
        if self._waiting and not self.busy and self.transport is not None:
            self._serve(self._waiting.popleft())

    def refuse(self, refusal: RefusedRequest) -> None:
        """Read nothing more; answer with the refusal when its turn comes, then close."""
        self._refusal = refusal
        if not self.busy and not self._waiting:
            self._answer_refusal(refusal)

    def _answer_refusal(self, refusal: RefusedRequest) -> None:
        self._request = None
        error = {"message": refusal.message, "type": "invalid_request_error", "param": None, "code": None}
        self.respond(refusal.status, msgspec.json.encode({"error": error}))

    # -- answering

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        """A whole response. Inside a stream there is no place for one: then the client sees a broken body."""
        if self.transport is None:
            return
        if self._streaming:
            self.abort()
            return
        head = self._head(status, content_type, headers) + b"content-length: %d\r\n\r\n" % len(body)
        without_body = self._request is not None and self._request.method == "HEAD"
        self.transport.write(head if without_body else head + body)
        self._finish_response()

    def start_stream(
        self, content_type: bytes, headers: tuple[tuple[bytes, bytes], ...] = (), data: bytes = b""
    ) -> None:
        """The head of a streamed 200, and the body's first piece in the same write; it may be empty."""
        assert self._request is not None
        assert not self._streaming, "one response at a time"
        self._streaming = True
        self._chunked = not self._request.http10
        self.closing |= self._request.http10  # the body ends with the connection
        head = self._head(200, content_type, headers)
        head += b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n"
        if self.transport is not None:
            self.transport.write(head + self._piece(data))

    def write(self, data: bytes) -> None:
        """One piece of a streamed body; an empty one writes nothing."""
        if self.transport is not None and data:
            assert self._streaming, "a piece of no stream"
            self.transport.write(self._piece(data))

    def end_stream(self, data: bytes = b"") -> None:
        """The last piece of a streamed body, which may be empty, and its end."""
        if self.transport is not None:
            assert self._streaming, "the end of no stream"
            self.transport.write(self._piece(data) + (b"0\r\n\r\n" if self._chunked else b""))
        self._finish_response()

    def _piece(self, data: bytes) -> bytes:
        """The one place where a piece becomes bytes: a chunk of no bytes would be the body's end."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked and data else data

    def abort(self) -> None:
        """Drop the client at once."""
        if self.transport is not None:
            self.transport.abort()

    def close_when_idle(self) -> None:
        """Take no further request than those begun; close now if there is none."""
        self.closing = True
        if not (self.busy or self._waiting or self.receiving) and self.transport is not None:
            self.transport.close()

    def _head(self, status: int, content_type: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
        keep = self._request is not None and self._request.keep_alive and not self.closing
        lines = [_status_line(status), b"content-type: " + content_type + b"\r\n"]
        lines += [name + b": " + value + b"\r\n" for name, value in headers]
        if self.request_id:
            lines.append(b"x-request-id: %b\r\n" % self.request_id.encode())
        if not keep:
            self.closing = True
            lines.append(b"connection: close\r\n")
        elif self._request is not None and self._request.http10:
            lines.append(b"connection: keep-alive\r\n")
        return b"".join(lines)

    def _finish_response(self) -> None:
        self.responder = None
        self.request_id = ""
        self.busy = self._streaming = False
        self._request = None
        self.active_at_s = self._loop.time()
        if self.transport is None:
            return
        if self.closing:
            self._hang_up()
        elif self._waiting:
            # Through the loop, so that a long pipeline does not become a deep stack.
            self._loop.call_soon(self._serve_waiting)
        elif self._refusal is not None:
            self._answer_refusal(self._refusal)

    def _hang_up(self) -> None:
        """Say that nothing more comes; close when the client has closed, or soon."""
        assert self.transport is not None
        self._waiting.clear()
        self.transport.write_eof()
        self._linger = self._loop.call_later(LINGER_S, self._end_linger)

    def _end_linger(self) -> None:
        if self.transport is not None:
            self.transport.close()  # what is not sent yet still goes out; the sweep ends a client that does not read


_status_lines: dict[int, bytes] = {}


def _status_line(status: int) -> bytes:
    line = _status_lines.get(status)
    if line is None:
        known = status in HTTPStatus._value2member_map_  # 499 is not in the book
        phrase = HTTPStatus(status).phrase if known else "Error"
        line = _status_lines[status] = f"HTTP/1.1 {status} {phrase}\r\n".encode()
    return line
