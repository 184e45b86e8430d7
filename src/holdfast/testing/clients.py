"""Streaming clients that cost little: they keep raw bytes with their times, and are read afterwards."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any, cast


@dataclass(slots=True)
class Received:
    """One response, as it came: (seconds, bytes). The loop's clock counts whole milliseconds on uvloop: too coarse."""

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
        """The body, chunk framing taken off."""
        return b"".join(data for _, data in self._dechunked())

    def events(self) -> list[tuple[float, str]]:
        """Server-sent events and comments, each with the time its last byte came."""
        events: list[tuple[float, str]] = []
        rest = b""
        for at_s, data in self._dechunked():
            *whole, rest = (rest + data).split(b"\n\n")
            events += [(at_s, text.decode()) for text in whole]
        return events

    def chunks(self) -> list[tuple[float, dict[str, Any]]]:
        """The JSON of all data events."""
        return [
            (at_s, json.loads(text.removeprefix("data: ")))
            for at_s, text in self.events()
            if text.startswith("data: {")
        ]

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


@dataclass(slots=True)
class Answer:
    """A stream, read: what the client saw."""

    text: str
    tokens: list[int]
    finish: str | None
    done: bool  # [DONE] came
    error: dict[str, Any] | None
    resumed: int
    exact: bool | None
    gaps_s: list[float]  # between chunks with content
    token_times_s: list[float]
    logprobs: list[float]
    waiting: int  # ": waiting" comments


def read_answer(received: Received, index: int = 0) -> Answer:
    """Put one choice of a streamed answer together."""
    answer = Answer("", [], None, False, None, 0, None, [], [], [], 0)
    for at_s, text in received.events():
        if text == ": waiting":
            answer.waiting += 1
        elif text == "data: [DONE]":
            answer.done = True
        elif text.startswith("data: {"):
            _read_chunk(answer, at_s, json.loads(text[6:]), index)
    times = answer.token_times_s
    answer.gaps_s = [later - earlier for earlier, later in itertools.pairwise(times)]
    return answer


def _read_chunk(answer: Answer, at_s: float, chunk: dict[str, Any], index: int) -> None:
    if "error" in chunk:
        answer.error = chunk["error"]
        return
    for choice in chunk["choices"]:
        if choice["index"] != index:
            continue
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        answer.text += text
        answer.tokens += choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        answer.logprobs += [entry["logprob"] for entry in logprobs.get("content", [])]
        answer.logprobs += logprobs.get("token_logprobs", [])
        if text or choice.get("token_ids"):
            answer.token_times_s.append(at_s)
        if choice["finish_reason"] is not None:
            answer.finish = choice["finish_reason"]
            answer.resumed = chunk["holdfast"]["resumed"]
            answer.exact = chunk["holdfast"]["exact"]


class StreamClient(asyncio.Protocol):
    """One connection, used for one request after another."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = Received()
        self._over: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received.pieces.append((time.perf_counter(), data))
        last_chunk = data.endswith(b"0\r\n\r\n") and (len(data) == 5 or data[-7:-5] == b"\r\n")
        if last_chunk or (b"content-length:" in self._received.pieces[0][1][:1024] and self._is_whole()):
            self._finish()

    def _is_whole(self) -> bool:
        raw = b"".join(data for _, data in self._received.pieces)
        head, found, body = raw.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        return bool(found) and len(body) >= length

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._over is not None and not self._over.done():
            self._received.error = f"connection lost: {exc}"
            self._over.set_result(None)

    def _finish(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def request(self, path: str, body: bytes, headers: str = "") -> Received:
        """Send a POST and keep everything that comes back."""
        if self._transport is None:
            return Received(error="not connected")
        self._received = Received(sent_s=time.perf_counter())
        self._over = self._loop.create_future()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n{headers}\r\n"
        self._transport.write(head.encode() + body)
        await self._over
        return self._received

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def open_client(port: int) -> StreamClient:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(StreamClient, "127.0.0.1", port)
    return client


async def ask(port: int, path: str, body: dict[str, Any]) -> Received:
    """One request on a connection of its own."""
    client = await open_client(port)
    try:
        return await client.request(path, json.dumps(body).encode())
    finally:
        client.close()


def chat_body(words: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A streaming chat request that runs to its full length."""
    return {
        "model": "holdfast-sim",
        "messages": [{"role": "user", "content": words}],
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **more,
    }
