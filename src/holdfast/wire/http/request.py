"""Parses bytes into whole HTTP/1.x requests, with httptools. No I/O, no clock.

Always true: line, headers and body are bounded while they arrive, not after. Any input becomes requests, in order, or
one `RefusedRequest`, after which nothing more is parsed, because the position in the input is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import httptools

from holdfast.wire.http.response import Headers, refusal

# Removed, as headers and from the connection header's list, when a request is parsed again without its upgrade.
_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})
# A 405 must list the allowed methods (RFC 9110, 15.5.6); CONNECT names no path, so this is the list of all paths.
_NO_PROXY: Headers = ((b"allow", b"GET, HEAD, POST, OPTIONS"),)


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """Limits on what clients may send and how long one may be idle. A client that keeps sending is cut off only when
    its request has taken ten times `request_s` (`server.REQUEST_TIMES_MAX`)."""

    header_bytes_max: int = 32 * 1024
    body_bytes_max: int = 16 * 1024 * 1024
    buffered_bytes_max: int = 128 * 1024 * 1024  # unanswered bodies of all connections
    request_s: float = 30.0  # to finish sending a request, plus 1 s per 4096 bytes received
    idle_s: float = 300.0  # between requests; longer than common proxies' limit, so that they close first
    unread_s: float = 300.0  # without reading anything that was sent; progress shows per packet, of up to 64 KiB


@dataclass(slots=True)
class HttpRequest:
    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool
    http10: bool


class RefusedRequest(Exception):
    """Input that is refused: the status and the message to answer with.

    `request` is the refused request if it is complete; default: the one that is arriving. `body` is the answer's body;
    default: made from status and message."""

    def __init__(
        self,
        status: int,
        message: str,
        request: HttpRequest | None = None,
        headers: Headers = (),
        body: bytes = b"",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.request = request
        self.headers = headers
        self.body = body or refusal(status, message)


class RequestReader:
    """The parser of one connection's requests. It calls:

    - `on_request` for each request;
    - `on_expect` when a client waits for `100 Continue`;
    - `on_head` before a body is read, with the request without its body. `on_head` returns the limit for the body in
      bytes, or raises RefusedRequest, which ends the reading."""

    def __init__(
        self,
        bounds: HttpBounds,
        on_request: Callable[[HttpRequest], None],
        on_expect: Callable[[], None],
        on_head: Callable[[HttpRequest], int] | None = None,
    ) -> None:
        self._bounds = bounds
        self._on_request = on_request
        self._on_expect = on_expect
        self._on_head = on_head
        self._parser = httptools.HttpRequestParser(self)
        self.begun = 0  # requests that have begun to arrive
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0  # of complete lines
        self._head_bytes = 0  # of an unfinished head
        self._body = bytearray()
        self._body_bytes_max = self._bounds.body_bytes_max
        self._in_head = False
        self.receiving = False  # a request has begun to arrive and is not complete

    @property
    def received_bytes(self) -> int:
        return self._header_bytes + len(self._body)

    @property
    def body_bytes(self) -> int:
        return len(self._body)

    def drop_body(self) -> None:
        """Free the partial body: the request is refused, or its client is gone."""
        self._body = bytearray()

    def so_far(self) -> HttpRequest:
        """Return what is known of the current request, to refuse it."""
        method = self._parser.get_method().decode("latin-1") if self._url else "-"
        return HttpRequest(method, _path(self._url) if self._url else "-", self._headers, b"", False, False)

    def feed(self, data: bytes) -> None:
        """Parse received bytes; raise RefusedRequest for what is refused."""
        rest = memoryview(data)
        while rest:
            rest = self._feed_parser(rest)

    def _feed_parser(self, data: memoryview) -> memoryview:
        """Parse; return the bytes that the parser has not consumed."""
        idle, begun, taken = not self.receiving, self.begun, 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            taken = upgrade.args[0]
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise RefusedRequest(400, f"malformed HTTP request: {error}") from None
        if taken:  # outside the except block: an error inside it would have the upgrade as its context, and be lost
            self._read_without_upgrade()
            return data[taken:]
        if self._in_head and self.begun == begun + idle:
            # httptools buffers an unfinished header line: count all of this head's bytes here as well.
            self._head_bytes += len(data)
            self._check_head(self._head_bytes)
        return data[:0]

    def _read_without_upgrade(self) -> None:
        """Parse the head again without its upgrade headers. A server may ignore them (some clients send them with every
        request), but the parser stops there."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise RefusedRequest(405, "this is not a proxy: CONNECT is not allowed", headers=_NO_PROXY)
        listed = [word.strip() for word in self._headers.get(b"connection", b"").split(b",")]
        kept = [word for word in listed if word.lower() not in _UPGRADE_HEADERS]
        headers = {**self._headers, b"connection": b", ".join(kept)}
        lines = [name + b": " + value for name, value in headers.items() if name not in _UPGRADE_HEADERS]
        version = self._parser.get_http_version().encode()
        head = b"\r\n".join([method + b" " + self._url + b" HTTP/" + version, *lines, b"", b""])
        self._parser = httptools.HttpRequestParser(self)
        self._feed_parser(memoryview(head))

    # -- httptools' callbacks

    def on_message_begin(self) -> None:
        self._reset()
        self.begun += 1
        self.receiving = self._in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        if not self._in_head:
            return  # trailers of a chunked body are ignored
        name = name.lower()
        if name == b"host" and name in self._headers:
            raise RefusedRequest(400, "the Host header is there twice; send one")
        if name == b"connection" and name in self._headers:
            value = self._headers[name] + b", " + value  # a list, possibly on several lines
        self._headers[name] = value

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        self._check_head(self._header_bytes)

    def _check_head(self, size: int) -> None:
        if size > self._bounds.header_bytes_max:
            raise RefusedRequest(431, f"request line and headers are over {self._bounds.header_bytes_max} bytes")

    def on_headers_complete(self) -> None:
        self._in_head = False
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise RefusedRequest(400, f"HTTP/{version} is not spoken here; use HTTP/1.1")
        if self._parser.should_upgrade():
            return  # it is parsed again
        if version == "1.1" and b"host" not in self._headers:
            raise RefusedRequest(400, "the Host header is missing, which HTTP/1.1 requires; send 'Host: localhost'")
        self._check_body_length()
        if version == "1.1" and self._headers.get(b"expect", b"").lower() == b"100-continue":
            self._on_expect()

    def _check_body_length(self) -> None:
        """Set the limit for the body that the head announces; raise RefusedRequest if it is larger."""
        length = self._headers.get(b"content-length", b"0")
        announced = int(length) if length.isdigit() else 0
        if announced > self._bounds.body_bytes_max:
            limit = self._bounds.body_bytes_max
            raise RefusedRequest(413, f"request body of {announced} bytes is over the limit of {limit}")
        if self._on_head is not None and (announced or b"transfer-encoding" in self._headers):
            self._body_bytes_max = self._on_head(self._request(b""))
            if announced > self._body_bytes_max:
                what = f"request body of {announced} bytes is over the limit of {self._body_bytes_max} for this path"
                raise RefusedRequest(413, what)

    def on_body(self, body: bytes) -> None:
        if len(self._body) + len(body) > self._body_bytes_max:
            raise RefusedRequest(413, f"request body is over the limit of {self._body_bytes_max} bytes")
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        request = self._request(bytes(self._body))
        self._reset()
        self._on_request(request)

    def _request(self, body: bytes) -> HttpRequest:
        return HttpRequest(
            self._parser.get_method().decode("latin-1"),
            _path(self._url),
            self._headers,
            body,
            self._parser.should_keep_alive(),
            self._parser.get_http_version() == "1.0",
        )


def _path(url: bytes) -> str:
    """Return the path without query, and without scheme and host if the client sent an absolute URL."""
    path = url.partition(b"?")[0]
    if not path.startswith(b"/") and b"://" in path:
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    return path.decode("latin-1")
