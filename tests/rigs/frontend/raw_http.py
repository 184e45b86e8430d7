"""A blocking raw HTTP client for tests: sends any bytes, reads responses one by one, and counts a process's things."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from holdfast.testing.deployment import Deployment

WAIT_S = 60.0  # a loaded machine; nothing is expected to take a tenth of it


@dataclass(frozen=True)
class Reply:
    """One response as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, checked to be in OpenAI's shape."""
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"]
        return dict(error)

    def events(self) -> list[Any]:
        """Return the data of a stream's events; [DONE] as the string."""
        texts = [text for text in self.body.decode().split("\n\n") if text.startswith("data: ")]
        return [text[6:] if text == "data: [DONE]" else json.loads(text[6:]) for text in texts]


class Raw:
    def __init__(self, port: int, receive_bytes: int = 0) -> None:
        self.sock = socket.socket()
        if receive_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(("127.0.0.1", port))
        self._buffer = b""

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()

    def send(self, data: bytes) -> Raw:
        self.sock.sendall(data)
        return self

    def post(self, path: str, body: Any, headers: str = "", version: str = "1.1") -> Raw:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if "content-type" not in headers.lower():
            headers += "content-type: application/json\r\n"
        head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-length: {len(data)}\r\n{headers}\r\n"
        return self.send(head.encode() + data)

    def get(self, path: str, headers: str = "", method: str = "GET") -> Raw:
        return self.send(f"{method} {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode())

    def _more(self) -> bool:
        data = self.sock.recv(65536)
        self._buffer += data
        return bool(data)

    def until(self, mark: bytes) -> bytes:
        """Read up to and with `mark`."""
        while mark not in self._buffer:
            assert self._more(), f"the connection ended before {mark!r}: {self._buffer[:500]!r}"
        end = self._buffer.index(mark) + len(mark)
        found, self._buffer = self._buffer[:end], self._buffer[end:]
        return found

    def exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            assert self._more(), "the connection ended inside a body"
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def reply(self, *, head_only: bool = False) -> Reply:
        """Read the next response, whole."""
        lines = self.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
        status = int(lines[0].split(" ")[1])
        if status == 100 or head_only:
            return Reply(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Reply(status, headers, self._chunks())
        if "content-length" in headers:
            return Reply(status, headers, self.exactly(int(headers["content-length"])))
        while self._more():
            pass
        body, self._buffer = self._buffer, b""
        return Reply(status, headers, body)

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.until(b"\r\n"), 16):
            body += self.exactly(size + 2)[:-2]
        self.until(b"\r\n")
        return body

    def at_end(self) -> bool:
        """The server has closed, and sent nothing more."""
        return not self._buffer and not self._more()


def ask_once(port: int, data: bytes) -> Reply:
    """Send raw bytes on a connection of their own, and return the first response."""
    with Raw(port) as raw:
        return raw.send(data).reply()


def chat(words: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "holdfast-sim", "messages": [{"role": "user", "content": words}], "max_tokens": 8, **more}


def ask(port: int, path: str, body: Any) -> Reply:
    with Raw(port) as raw:
        return raw.post(path, body).reply()


def completion(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"model": "holdfast-sim", "prompt": prompt, **more}


def padded(body: dict[str, Any]) -> dict[str, Any]:
    """Return the same request, in a body too large for the loop."""
    return {**body, "user": "x" * 300_000}


@contextlib.contextmanager
def one_more_frontend(deployment: Deployment, name: str, port: int, asked: dict[str, Any]) -> Iterator[int]:
    """Another frontend of the same deployment, with settings of its own, until the block's end; its port."""
    own_port, settings = deployment.port, deployment._frontend_settings
    deployment.port, deployment._frontend_settings = port, {**settings, **asked}
    try:
        deployment.start_frontend(name)
        deployment.wait_until(lambda: deployment.health().get("status") == "ready", f"the frontend {name!r}")
    finally:
        deployment.port, deployment._frontend_settings = own_port, settings
    yield port
    deployment.kill(name)
    del deployment.processes[name]
