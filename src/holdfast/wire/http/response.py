"""The bytes of a response, its head and the pieces of a streamed body; and who makes it. Pure: no sockets, no clock."""

from __future__ import annotations

from http import HTTPStatus
from typing import Protocol

import msgspec

Headers = tuple[tuple[bytes, bytes], ...]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
RETRY_SOON: Headers = ((b"retry-after", b"1"),)
LAST_CHUNK = b"0\r\n\r\n"


class Responder(Protocol):
    """Whoever is answering the current request on a connection."""

    def client_gone(self) -> None: ...

    def client_writable(self) -> None: ...

    def cut_off(self, why: str) -> None:
        """The server must end before the answer has: say so to the client, by name."""


def head(status: int, content_type: bytes, headers: Headers, connection: bytes) -> bytes:
    """All but what tells where the body ends, and the empty line; `connection`: b"" for what the version implies."""
    lines = [_status_line(status), b"content-type: " + content_type + b"\r\n"]
    lines += [name + b": " + value + b"\r\n" for name, value in headers]
    if connection:
        lines.append(b"connection: " + connection + b"\r\n")
    return b"".join(lines)


def refusal(status: int, message: str) -> bytes:
    """The body of an answer to what is no request, or is one too many, in OpenAI's shape."""
    kind = "overloaded_error" if status == HTTPStatus.TOO_MANY_REQUESTS else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return msgspec.json.encode({"error": error})


def chunk(data: bytes) -> bytes:
    """The one place where a piece becomes a chunk: one of no bytes would be the body's end, so it becomes nothing."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


_status_lines: dict[int, bytes] = {}


def _status_line(status: int) -> bytes:
    line = _status_lines.get(status)
    if line is None:
        known = status in HTTPStatus._value2member_map_  # 499 is not in the book
        phrase = HTTPStatus(status).phrase if known else "Error"
        line = _status_lines[status] = f"HTTP/1.1 {status} {phrase}\r\n".encode()
    return line
