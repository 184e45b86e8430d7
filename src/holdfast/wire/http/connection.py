"""An HTTP/1.1 server protocol: one synchronous call per request, raw writes for streams.

Why not an ASGI server: on the per-token path every layer costs microseconds (facts 33; docs/decisions.md has
our own measurement). Always true: one response at a time per connection, pipelined requests wait in order and are
bounded; bytes that are no request get an answer too, in their turn, before the connection closes; nobody is asked to
answer after the last answer; whoever answers learns at once when the client is gone; a streamed body ends where
`end_stream` says so and nowhere else, whatever is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from holdfast.core.peers import peer_uid
from holdfast.wire.http import response
from holdfast.wire.http.ahead import Ahead
from holdfast.wire.http.request import HttpBounds, HttpRequest, RefusedRequest, RequestReader
from holdfast.wire.http.response import Headers, Responder
from holdfast.wire.net import Outgoing, is_reset, tune

# Past this many unsent bytes a client counts as slow, and its stream waits in the ledger.
WRITE_HIGH_BYTES = 64 * 1024
# How long a client may go on sending after the last answer. Closing at once would reset the connection under what
# is still on its way, and take the answer with it.
LINGER_S = 2.0
# After a client said that it sends no more, for a reset to come back from one that is gone altogether.
RESET_S = 0.05

Handler = Callable[["HttpConnection", HttpRequest], None]
Admit = Callable[["HttpConnection", HttpRequest], int]
Told = Callable[["HttpConnection"], None]
Count = Callable[[int], None]


class HttpConnection(asyncio.Protocol):
    """One client's connection."""

    def __init__(
        self, begin: Handler, handler: Handler, bounds: HttpBounds, *, admit: Admit, came: Told, left: Told, held: Count
    ) -> None:
        self._begin = begin
        self._handler = handler
        self._came = came
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(bounds, self._on_request, self._on_expect, lambda head: admit(self, head))
        self.ahead = Ahead(self._reader, bounds.body_bytes_max, held)
        self.transport: asyncio.Transport | None = None
        self.responder: Responder | None = None
        self.paused = False
        self.closing = False  # the response under way is the last,
        self.leaving = False  # or the next that begins: one under way may have said that there is another
        self.busy = False  # a request is being answered
        self.outgoing = Outgoing()
        self.request_id = ""  # what the handler calls it; told to the client with the answer
        self.answer_headers: Headers = ()  # the handler's; they go with the answer, whatever it is
        self.on_over: Callable[[int], object] | None = None  # told a response's status once it is over; 0: it had none
        self.on_status: Callable[[int], object] | None = None  # told a response's status when its head is sent
        self._status = 0
        self.active_at_s = self._loop.time()
        self.receiving_since_s = 0.0  # when the request that is arriving began to
        self._request: HttpRequest | None = None
        self._streaming = False  # the response has begun to go out in pieces,
        self._chunked = False  # and as chunks
        self._refusal: RefusedRequest | None = None  # what ended the reading; answered after all that came before it
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
            return  # read on, so that the client's leaving is noticed, and its last bytes reset nothing
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
        """The client sends nothing more. It may be gone, or only done with sending: it gets what it asked for."""
        if self.transport is None or not self.at_work:
            return False
        self._half_closed = True
        if self._request is not None and not self._streaming and not self._request.http10:
            self._send(response.CONTINUE)  # harmless to who reads it; who is gone answers with a reset
        self._loop.call_later(RESET_S, self.check_client)
        return True

    def check_client(self) -> None:
        """End a half-closed connection whose client is gone: it is not read from, so nothing else tells."""
        if self._half_closed and self.transport is not None and is_reset(self.transport):
            self.transport.abort()

    # -- requests

    @property
    def peer_uid(self) -> int | None:
        """Whose process of this machine is at the other end; None: nobody's that can be told."""
        sock = self.transport.get_extra_info("socket") if self.transport is not None else None
        return peer_uid(sock) if sock is not None else None

    @property
    def streaming(self) -> bool:
        """The head of a streamed response is out, and its end is not."""
        return self._streaming

    @property
    def received_bytes(self) -> int:
        return self._reader.received_bytes

    @property
    def receiving(self) -> bool:
        """A request has begun to arrive and is not complete."""
        return self._reader.receiving and self._refusal is None

    @property
    def at_work(self) -> bool:
        """A request is being answered, or waits for its turn."""
        return self.busy or bool(self.ahead)

    def _on_request(self, request: HttpRequest) -> None:
        if not self.at_work:
            if self._linger is None:  # else it came in one piece with the one that got the last answer
                self._serve(request)
            return
        self.ahead.append(request)

    def _on_expect(self) -> None:
        """Between two responses only; in the middle of one the client must do without, as it may have to anyway."""
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
        """Free all that the client has sent ahead of its answers, and refuse it."""
        self.ahead.drop()
        self.refuse(refusal)

    def refuse(self, refusal: RefusedRequest) -> None:
        """Read nothing more; answer with the refusal when its turn comes, then close."""
        self._refusal = refusal
        self._reader.drop_body()
        if not self.at_work and self._linger is None:  # who was hung up on has its answer
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
        """A whole response. Inside a stream there is no place for one: then the client sees a broken body."""
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
        """The head of a streamed 200, and the body's first piece in the same write; it may be empty."""
        assert self._request is not None
        assert not self._streaming, "one response at a time"
        self._streaming = True
        self._chunked = not self._request.http10
        self.closing |= self._request.http10  # the body ends with the connection
        head = self._head(200, content_type, headers)
        head += b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n"
        self._send(head + self._piece(data))

    def write(self, data: bytes) -> None:
        """One piece of a streamed body; an empty one writes nothing."""
        if self.transport is not None and data:
            assert self._streaming, "a piece of no stream"
            self._send(self._piece(data))

    def end_stream(self, data: bytes = b"") -> None:
        """The last piece of a streamed body, which may be empty, and its end."""
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
        """Drop the client at once."""
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
            # Through the loop, so that a long pipeline does not become a deep stack.
            self._loop.call_soon(self._serve_waiting)
        elif self._refusal is not None:
            self._answer_refusal(self._refusal)
        elif self._half_closed:
            self._hang_up()

    def _hang_up(self) -> None:
        """Say that nothing more comes; close when the client has closed, or soon."""
        assert self.transport is not None
        self.ahead.drop()
        if self._half_closed:
            self.transport.close()  # it sends nothing that a close could reset
            return
        self.transport.write_eof()
        # What is not sent by then still goes out; the sweep ends a client that does not read.
        self._linger = self._loop.call_later(LINGER_S, self.transport.close)
