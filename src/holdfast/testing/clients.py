"""Implements streaming clients: cheap ones for many streams, which record raw bytes with their times and parse them
afterwards; and one in a thread, with the standard library's HTTP client, for callers without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any, cast

from holdfast.testing.answers import Answer, Event, events_of, read_events
from holdfast.testing.waiting import wait_until

STREAM_S = 60.0  # held streams continue within 30 s; a loaded machine needs time for the answer


@dataclass(slots=True)
class Received:
    """One response as it came: (seconds, bytes). Times are of `perf_counter`: uvloop's clock has only milliseconds."""

    sent_s: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""

    @property
    def status(self) -> int:
        head = self.pieces[0][1][:16] if self.pieces else b""
        return int(head.split(b" ")[1]) if head.startswith(b"HTTP/") else 0

    @property
    def first_s(self) -> float:
        return self.pieces[0][0] - self.sent_s

    def head(self) -> str:
        return b"".join(data for _, data in self.pieces).partition(b"\r\n\r\n")[0].decode("latin-1")

    def body(self) -> bytes:
        """Return the body without its chunk framing."""
        return b"".join(data for _, data in self._dechunked())

    def events(self) -> list[tuple[float, str]]:
        """Return server-sent events and comments, each with the time of its last byte."""
        events: list[tuple[float, str]] = []
        rest = b""
        for at_s, data in self._dechunked():
            *whole, rest = (rest + data).split(b"\n\n")
            events += [(at_s, text.decode()) for text in whole]
        return events

    def _dechunked(self) -> list[tuple[float, bytes]]:
        out: list[tuple[float, bytes]] = []
        buffer = b""
        in_head = True
        chunked = True
        for at_s, data in self.pieces:
            buffer += data
            if in_head:
                head, found, rest = buffer.partition(b"\r\n\r\n")
                if not found:
                    continue
                in_head, buffer = False, rest
                chunked = b"transfer-encoding: chunked" in head.lower()
            if not chunked:
                out.append((at_s, buffer))
                buffer = b""
                continue
            buffer = _take_chunks(buffer, at_s, out)
        return out


def _take_chunks(buffer: bytes, at_s: float, out: list[tuple[float, bytes]]) -> bytes:
    while True:
        size_text, found, rest = buffer.partition(b"\r\n")
        if not found:
            return buffer
        size = int(size_text, 16)
        if len(rest) < size + 2:
            return buffer
        if size:
            out.append((at_s, rest[:size]))
        buffer = rest[size + 2 :]


def read_answer(received: Received, index: int = 0) -> Answer:
    """Return one choice of a streamed answer; for a refusal, the response's text is its error."""
    if received.status != 200:
        why = received.error or received.body()[:300].decode(errors="replace")
        return Answer(error={"message": f"status {received.status} {why}"})
    return read_events(received.events(), index)


class StreamClient(asyncio.Protocol):
    """One connection, for consecutive requests."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.received = Received()  # the current response
        self._over: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received.pieces.append((time.perf_counter(), data))
        last_chunk = data.endswith(b"0\r\n\r\n") and (len(data) == 5 or data[-7:-5] == b"\r\n")
        if last_chunk or (b"content-length:" in self.received.pieces[0][1][:1024] and self._is_whole()):
            self._finish()

    def _is_whole(self) -> bool:
        raw = b"".join(data for _, data in self.received.pieces)
        head, found, body = raw.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        return bool(found) and len(body) >= length

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._over is not None and not self._over.done():
            self.received.error = f"connection lost: {exc}"
            self._over.set_result(None)

    def _finish(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def request(self, path: str, body: bytes, headers: str = "") -> Received:
        """Send a POST and return the whole response."""
        if self._transport is None:
            return Received(error="not connected")
        self.received = Received(sent_s=time.perf_counter())
        self._over = self._loop.create_future()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n{headers}\r\n"
        self._transport.write(head.encode() + body)
        await self._over
        return self.received

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def open_client(port: int) -> StreamClient:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(StreamClient, "127.0.0.1", port)
    return client


async def ask(port: int, path: str, body: dict[str, Any]) -> Received:
    """Send one request on a new connection and return the response."""
    client = await open_client(port)
    try:
        return await client.request(path, json.dumps(body).encode())
    finally:
        client.close()


def chat_body(words: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "holdfast-sim",
        "messages": [{"role": "user", "content": words}],
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **more,
    }


class Stream:
    """One streamed answer, read in a thread as it comes."""

    def __init__(self, port: int, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str) -> None:
        self.events: list[Event] = []
        self._why = ""  # why it ended early
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=STREAM_S)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **sent})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.closing(self._connection):
            try:
                response = self._connection.getresponse()
                if response.status != 200:
                    self._why = f"status {response.status}: {response.read(300)!r}"
                for event in events_of(response):
                    self.events.append(event)
            except (OSError, http.client.HTTPException) as error:
                self._why = f"{type(error).__name__}: {error}"

    def so_far(self) -> Answer:
        return read_events(list(self.events))

    def wait_tokens(self, count: int = 1) -> Stream:
        """Wait until `count` pieces of the answer have come, so that the caller can act in the middle of it."""
        wait_until(
            lambda: len(self.so_far().token_times_s) >= count,
            f"{count} pieces of an answer",
            STREAM_S,
            ended=lambda: "" if self._thread.is_alive() else f"the answer ended ({self._why})",
        )
        return self

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def answer(self, bound_s: float = STREAM_S) -> Answer:
        """Return the whole answer once it has ended."""
        self._thread.join(bound_s)
        assert not self._thread.is_alive(), f"an answer that did not end within {bound_s:g} s"
        found = self.so_far()
        found.error = found.error or ({"message": self._why} if self._why else None)
        return found

    def text(self) -> str:
        """Return the events, one per line, once the answer has ended."""
        self.answer()
        return "\n".join(text for _, text in self.events)
