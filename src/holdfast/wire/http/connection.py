"""Implements HTTP/1.1 as a server protocol: one synchronous call per request, raw writes for streams.

Why not an ASGI server: on the per-token path every layer costs microseconds (facts 33; docs/decisions.md has our own
measurement).

Always true:

- One response at a time per connection; pipelined requests wait in order and are bounded.
- Malformed input gets an answer too, in its turn, before the connection closes.
- No handler is called after the last answer.
- `client_gone` is called on the responder as soon as the client is gone.
- A streamed body ends only at `end_stream`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

from holdfast.core.procfs import peer_uid
from holdfast.wire.http import response
from holdfast.wire.http.request import HttpBounds, HttpRequest, RefusedRequest, RequestReader
from holdfast.wire.http.response import RETRY_SOON, Headers, Responder
from holdfast.wire.net import Outgoing, is_reset, tune

# Requests a client may send ahead of their answers; browsers use 1, and memory must have a bound.
PIPELINE_MAX = 16
# A connection's bodies are not counted against the budget of all connections up to this total, so that ordinary
# requests are always read.
UNCOUNTED_BYTES_MAX = 64 * 1024


class PipelinedRequests:
    """The requests that a client sent ahead of their answers, in order. It calls `buffered` with each change of the
    bytes that its unanswered bodies hold."""

    def __init__(self, reader: RequestReader, bytes_max: int, buffered: Callable[[int], None]) -> None:
        self._reader = reader
        self._bytes_max = bytes_max
        self._buffered = buffered
        self._waiting: deque[HttpRequest] = deque()
        self.buffered_bytes = 0  # of unanswered bodies, as last reported

    def __len__(self) -> int:
        return len(self._waiting)

    def append(self, request: HttpRequest) -> None:
        """Queue a request; raise RefusedRequest if there are too many."""
        ahead_bytes = len(request.body) + sum(len(waiting.body) for waiting in self._waiting)
        if len(self._waiting) >= PIPELINE_MAX or ahead_bytes > self._bytes_max:
            limit = f"{PIPELINE_MAX} requests or {self._bytes_max} bytes sent ahead on one connection"
            raise RefusedRequest(429, f"more than {limit}", request, RETRY_SOON)
        self._waiting.append(request)

    def pop(self) -> HttpRequest:
        request = self._waiting.popleft()
        self.count()
        return request

    def drop(self) -> None:
        """Discard all requests and bodies: none of them will be answered."""
        self._waiting.clear()
        self._reader.drop_body()
        self.count()

    def count(self) -> None:
        """Report the change in held bytes since the last report."""
        held = self._reader.body_bytes
        if self._waiting:
            held += sum(len(request.body) for request in self._waiting)
        held = held if held > UNCOUNTED_BYTES_MAX else 0
        if held != self.buffered_bytes:
            more, self.buffered_bytes = held - self.buffered_bytes, held
            self._buffered(more)


# With more unsent bytes than this a client counts as slow, and its stream waits in the ledger.
WRITE_HIGH_BYTES = 64 * 1024
# How long a client may keep sending after the last answer. Closing at once would reset the connection, and the client
# would lose the answer.
LINGER_S = 2.0
# After a client's end of input: time for a reset to arrive, if the client is gone altogether.
RESET_S = 0.05

Handler = Callable[["HttpConnection", HttpRequest], None]
Admit = Callable[["HttpConnection", HttpRequest], int]
Told = Callable[["HttpConnection"], None]
Count = Callable[[int], None]


class HttpConnection(asyncio.Protocol):
    """A client's connection at the server. `admit` returns the limit for a body in bytes. `came` is called when the
    connection opens, `left` when it closes, and `held` with each change of its buffered bytes."""

    def __init__(
        self, begin: Handler, handler: Handler, bounds: HttpBounds, *, admit: Admit, came: Told, left: Told, held: Count
    ) -> None:
        self._begin = begin
        self._handler = handler
        self._came = came
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(bounds, self._on_request, self._on_expect, lambda head: admit(self, head))
        self.ahead = PipelinedRequests(self._reader, bounds.body_bytes_max, held)
        self.transport: asyncio.Transport | None = None
        self.responder: Responder | None = None
        self.paused = False
        self.closing = False  # the current response is the last,
        self.leaving = False  # or the next one: the current head may have promised keep-alive
        self.busy = False  # a request is being answered
        self.outgoing = Outgoing()
        self.request_id = ""  # set by the handler; sent to the client with the answer
        self.answer_headers: Headers = ()  # set by the handler; sent with any answer
        self.on_over: Callable[[int], object] | None = None  # called at a response's end; 0: it had no status
        self.on_status: Callable[[int], object] | None = None  # called when a response's head is sent
        self._status = 0
        self.active_at_s = self._loop.time()
        self.receiving_since_s = 0.0  # when the current request began to arrive
        self._request: HttpRequest | None = None
        self._streaming = False  # a streamed response has begun,
        self._chunked = False  # and as chunks
        self._refusal: RefusedRequest | None = None  # ended the reading; answered after all earlier requests
        self._linger: asyncio.TimerHandle | None = None
        self._half_closed = False  # the client sends nothing more

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        tune(transport, may_pause=True)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._left(self)
        self.ahead.drop()
        if self._linger is not None:
            self._linger.cancel()
        responder, self.responder = self.responder, None
        if responder is not None:
            responder.client_gone()
        self._tell_over()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.responder is not None:
            self.responder.client_writable()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self._linger is not None:
            return  # keep reading: to notice that the client leaves, and so that unread bytes cause no reset
        self.active_at_s = self._loop.time()
        begun = self._reader.begun
        try:
            self._reader.feed(data)
        except RefusedRequest as refused:
            self.refuse(refused)
        if self._reader.begun != begun:
            self.receiving_since_s = self.active_at_s
        self.ahead.count()

    def eof_received(self) -> bool:
        """Keep the connection open if an answer is due: the client may be gone, or only have finished sending."""
        if self.transport is None or not self.at_work:
            return False
        self._half_closed = True
        if self._request is not None and not self._streaming and not self._request.http10:
            self._send(response.CONTINUE)  # harmless to a client; if it is gone, its kernel answers with a reset
        self._loop.call_later(RESET_S, self.check_client)
        return True

    def check_client(self) -> None:
        """Close a half-closed connection if its client is gone. It is not read any more, so nothing else shows that."""
        if self._half_closed and self.transport is not None and is_reset(self.transport):
            self.transport.abort()

    # -- requests

    @property
    def peer_uid(self) -> int | None:
        """Return the user id of the peer's process on this machine; None if unknown."""
        return peer_uid(self.transport.get_extra_info("socket")) if self.transport is not None else None

    @property
    def streaming(self) -> bool:
        """Return True after the head of a streamed response is sent and before its end is."""
        return self._streaming

    @property
    def received_bytes(self) -> int:
        return self._reader.received_bytes

    @property
    def receiving(self) -> bool:
        """Return True if a request has begun to arrive and is not complete."""
        return self._reader.receiving and self._refusal is None

    @property
    def at_work(self) -> bool:
        """Return True if a request is being answered or waits for its turn."""
        return self.busy or bool(self.ahead)

    def _on_request(self, request: HttpRequest) -> None:
        if not self.at_work:
            if self._linger is None:  # else it came in one read with the request that got the last answer
                self._serve(request)
            return
        self.ahead.append(request)

    def _on_expect(self) -> None:
        """Send `100 Continue`, unless a response is under way: a client must be able to do without it."""
        if self._linger is None and not self.at_work:
            self._send(response.CONTINUE)

    def _serve(self, request: HttpRequest) -> None:
        self.busy = True
        self._request = request
        self._begin(self, request)
        self._handler(self, request)

    def _serve_waiting(self) -> None:
        if self.ahead and not self.busy and self.transport is not None:
            self._serve(self.ahead.pop())

    def shed(self, refusal: RefusedRequest) -> None:
        """Discard all unanswered requests and refuse the client."""
        self.ahead.drop()
        self.refuse(refusal)

    def refuse(self, refusal: RefusedRequest) -> None:
        """Read nothing more; answer with the refusal when its turn comes, then close."""
        self._refusal = refusal
        self._reader.drop_body()
        if not self.at_work and self._linger is None:  # while lingering the last answer is already sent
            self._answer_refusal(refusal)

    def _answer_refusal(self, refusal: RefusedRequest) -> None:
        self._request = refusal.request or self._reader.so_far()
        self._request.keep_alive = False
        self._begin(self, self._request)
        self.respond(refusal.status, refusal.body, headers=refusal.headers)

    # -- answering

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: Headers = (),
    ) -> None:
        """Send a whole response. If a streamed one is under way, abort it instead: the client sees a broken body."""
        if self.transport is None:
            return
        if self._streaming:
            self.abort()
            return
        head = self._head(status, content_type, headers) + b"content-length: %d\r\n\r\n" % len(body)
        without_body = self._request is not None and self._request.method == "HEAD"
        self._send(head if without_body else head + body)
        self._finish_response()

    def start_stream(self, content_type: bytes, headers: Headers = (), data: bytes = b"") -> None:
        """Send the head of a streamed 200 and the body's first piece, which may be empty, in one write."""
        assert self._request is not None
        assert not self._streaming, "one response at a time"
        self._streaming = True
        self._chunked = not self._request.http10
        self.closing |= self._request.http10  # the body ends with the connection
        head = self._head(200, content_type, headers)
        head += b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n"
        self._send(head + self._piece(data))

    def write(self, data: bytes) -> None:
        """Send one piece of a streamed body; nothing if it is empty."""
        if self.transport is not None and data:
            assert self._streaming, "a piece of no stream"
            self._send(self._piece(data))

    def end_stream(self, data: bytes = b"") -> None:
        """Send the last piece of a streamed body, which may be empty, and its end."""
        if self.transport is not None:
            assert self._streaming, "the end of no stream"
            self._send(self._piece(data) + (response.LAST_CHUNK if self._chunked else b""))
        self._finish_response()

    def _piece(self, data: bytes) -> bytes:
        return response.chunk(data) if self._chunked else data

    def _send(self, data: bytes) -> None:
        if self.transport is not None:
            self.outgoing.written += len(data)
            self.transport.write(data)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _head(self, status: int, content_type: bytes, headers: Headers) -> bytes:
        request = self._request
        self._status = status
        if self.on_status is not None:
            self.on_status(status)
        self.closing |= self._half_closed and not self.ahead
        keep = request is not None and request.keep_alive and not (self.closing or self.leaving)
        self.closing = not keep
        headers += self.answer_headers
        if self.request_id:
            headers = (*headers, (b"x-request-id", self.request_id.encode()))
        kept = b"keep-alive" if request is not None and request.http10 else b""
        return response.head(status, content_type, headers, kept if keep else b"close")

    def _tell_over(self) -> None:
        told, status = self.on_over, self._status
        self.on_over, self._status = None, 0
        if told is not None:
            told(status)

    def _finish_response(self) -> None:
        self._tell_over()
        self.responder = None
        self.request_id = ""
        self.answer_headers = ()
        self.busy = False
        self._streaming = False
        self._request = None
        self.active_at_s = self._loop.time()
        if self.transport is None:
            return
        if self.closing:
            self._hang_up()
        elif self.ahead:
            # Through the event loop, so that a long pipeline does not become a deep stack.
            self._loop.call_soon(self._serve_waiting)
        elif self._refusal is not None:
            self._answer_refusal(self._refusal)
        elif self._half_closed:
            self._hang_up()

    def _hang_up(self) -> None:
        """Send end of output; close when the client has closed, or after `LINGER_S`."""
        assert self.transport is not None
        self.ahead.drop()
        if self._half_closed:
            self.transport.close()  # the client sends nothing more, so closing resets nothing
            return
        self.transport.write_eof()
        # Unsent bytes still go out after the close; the sweep drops a client that does not read.
        self._linger = self._loop.call_later(LINGER_S, self.transport.close)
