"""Encodes responses: the head and the chunks of a streamed body. No I/O, no clock."""

from __future__ import annotations

from http import HTTPStatus
from typing import Protocol

import msgspec

Headers = tuple[tuple[bytes, bytes], ...]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
RETRY_SOON: Headers = ((b"retry-after", b"1"),)
LAST_CHUNK = b"0\r\n\r\n"


class Responder(Protocol):
    def client_gone(self) -> None: ...

    def client_writable(self) -> None: ...

    def cut_off(self, why: str) -> None:
        """End the answer early with a named error for the client: the server is closing."""


def head(status: int, content_type: bytes, headers: Headers, connection: bytes) -> bytes:
    """Return the head without the body's length or transfer encoding and without the empty line. `connection` b"": the
    HTTP version's default."""
    lines = [_status_line(status), b"content-type: " + content_type + b"\r\n"]
    lines += [name + b": " + value + b"\r\n" for name, value in headers]
    if connection:
        lines.append(b"connection: " + connection + b"\r\n")
    return b"".join(lines)


def refusal(status: int, message: str) -> bytes:
    """Return the body of a refusal, in the shape of OpenAI's errors."""
    kind = "overloaded_error" if status == HTTPStatus.TOO_MANY_REQUESTS else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return msgspec.json.encode({"error": error})


def chunk(data: bytes) -> bytes:
    """Return data as a chunk. Empty data gives b"": an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


_status_lines: dict[int, bytes] = {}


def _status_line(status: int) -> bytes:
    line = _status_lines.get(status)
    if line is None:
        known = status in HTTPStatus._value2member_map_  # 499 is not in the standard
        phrase = HTTPStatus(status).phrase if known else "Error"
        line = _status_lines[status] = f"HTTP/1.1 {status} {phrase}\r\n".encode()
    return line
