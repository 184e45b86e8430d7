"""Calls etcd's JSON gateway over HTTP, and defines its requests and answers; the only file that imports aiohttp.

Always true: every request has a timeout; if an endpoint does not answer, the next one is used, and `generation` counts
those moves, so that watches can be restarted. msgspec turns bytes into base64 and back; numbers come as strings and are
decoded leniently. Fields that etcd leaves out are zero values.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TypeVar

import msgspec

from holdfast.core.backoff import Backoff
from holdfast.core.errors import UserError
from holdfast.wire.net import tuned_socket

try:
    import aiohttp
except ImportError as error:
    raise UserError("an etcd:// store needs aiohttp; run: pip install 'holdfast-llm[etcd]'") from error

# A line of a watch holds one fragment (up to etcd's request limit, 1.5 MiB) in base64, with a margin.
LINE_BYTES_MAX = 8 * 1024 * 1024
# Limit for connecting a watch's stream.
STREAM_START_S = 3.0
# Watches (one connection each) and concurrent calls of one process.
CONNECTIONS_MAX = 128


# gRPC status codes that are handled differently.
CODE_CANCELLED = 1
CODE_NOT_FOUND = 5
CODE_RESOURCE_EXHAUSTED = 8
# Cancelled, DeadlineExceeded, Unavailable: another member may answer, or the same one later.
CODES_TRY_AGAIN = frozenset({CODE_CANCELLED, 4, 14})


class EtcdUnreachable(Exception):
    """No endpoint answered, or those that answered cannot serve now."""


class EtcdError(Exception):
    """etcd refused a request, or its answer cannot be read."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Header(msgspec.Struct, frozen=True):
    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class RangeRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    key: bytes
    range_end: bytes = b""
    limit: int = 0
    revision: int = 0
    count_only: bool = False


class RangeResponse(msgspec.Struct, frozen=True):
    header: Header
    kvs: list[KeyValue] = []
    more: bool = False


class FoundKeys(msgspec.Struct, frozen=True):
    """The answer to a range request within a transaction."""

    kvs: list[KeyValue] = []


class TxnPart(msgspec.Struct, frozen=True):
    response_range: FoundKeys = FoundKeys()


class TxnResponse(msgspec.Struct, frozen=True):
    succeeded: bool = False
    responses: list[TxnPart] = []


class PutRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    key: bytes
    value: bytes
    lease: int = 0


class GrantResponse(msgspec.Struct, frozen=True):
    ID: int


class KeepAlive(msgspec.Struct, frozen=True):
    TTL: int = 0  # 0: the lease does not exist any more


class KeepAliveResponse(msgspec.Struct, frozen=True):
    result: KeepAlive


class Empty(msgspec.Struct, frozen=True):
    """An answer with ignored content."""


class Event(msgspec.Struct, frozen=True):
    kv: KeyValue
    type: str = "PUT"


class WatchResult(msgspec.Struct, frozen=True):
    header: Header
    created: bool = False
    canceled: bool = False
    fragment: bool = False  # more of the same revision follows
    events: list[Event] = []


class StreamError(msgspec.Struct, frozen=True):
    message: str = ""
    grpc_code: int = 2


class WatchLine(msgspec.Struct, frozen=True):
    result: WatchResult | None = None
    error: StreamError | None = None


Answer = TypeVar("Answer")


def read(body: bytes, kind: type[Answer]) -> Answer:
    """Return the decoded answer; raise EtcdError if it cannot be decoded (it is not from etcd)."""
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EtcdError(2, f"the answer is not etcd's: {error}") from error


class EtcdGateway:
    """Calls and streams to one of several endpoints, given as host:port."""

    def __init__(self, endpoints: tuple[str, ...], rng: random.Random) -> None:
        assert endpoints
        self._rng = rng
        self._endpoints = endpoints
        self._index = 0
        self._session: aiohttp.ClientSession | None = None
        self.generation = 0

    async def __aenter__(self) -> EtcdGateway:
        # A watch may be silent for hours: without keepalive probes it would not notice that the server's host is gone.
        connector = aiohttp.TCPConnector(
            limit=CONNECTIONS_MAX, force_close=False, socket_factory=lambda info: tuned_socket(*info[:3])
        )
        # The environment's proxies are for other hosts, not for the cluster's own store.
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(), trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        session, self._session = self._session, None
        await session.close()

    async def call(self, path: str, request: object, kind: type[Answer], timeout_s: float) -> Answer:
        """Ask each endpoint at most once, within `timeout_s` in total; raise EtcdUnreachable if none answers."""
        body = msgspec.json.encode(request)
        share_s = timeout_s / len(self._endpoints)
        failures = []
        for _ in self._endpoints:
            index = self._index
            try:
                async with asyncio.timeout(share_s):
                    return read(await self._post(index, path, body), kind)
            except TimeoutError:
                failures.append(f"{self._endpoints[index]}: no answer in {share_s:g} s")
            except EtcdUnreachable as error:
                failures.append(f"{self._endpoints[index]}: {error}")
            self._leave(index)
        raise EtcdUnreachable("; ".join(failures))

    async def ask(self, path: str, request: object, kind: type[Answer], timeout_s: float) -> Answer:
        """Repeat `call` until it is answered; raise TimeoutError after `timeout_s`. Only for idempotent requests; all
        of ours are."""
        backoff = Backoff(self._rng)
        async with asyncio.timeout(timeout_s):
            while self._session is not None:
                with contextlib.suppress(EtcdUnreachable):
                    return await self.call(path, request, kind, timeout_s)
                await asyncio.sleep(backoff.next_s())
        raise EtcdError(CODE_CANCELLED, "this client was closed")

    async def _post(self, index: int, path: str, body: bytes) -> bytes:
        if self._session is None:
            raise EtcdUnreachable("not started")
        try:
            async with self._session.post(self._url(index, path), data=io.BytesIO(body)) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise EtcdUnreachable(str(error) or type(error).__name__) from error
        if response.status != 200:
            raise _failure(response.status, answer)
        return answer

    async def watch(self, request: object) -> AsyncGenerator[WatchResult, None]:
        """Yield the lines of a watch; raise EtcdUnreachable when the stream ends."""
        if self._session is None:
            raise EtcdUnreachable("not started")
        index = self._index
        timeout = aiohttp.ClientTimeout(sock_connect=STREAM_START_S)
        try:
            async with self._session.post(
                self._url(index, "watch"), data=msgspec.json.encode(request), timeout=timeout
            ) as response:
                if response.status != 200:
                    raise _failure(response.status, await response.read())
                async for line in _lines(response.content):
                    yield _result(read(line, WatchLine))
        except (aiohttp.ClientError, OSError) as error:
            raise EtcdUnreachable(str(error) or type(error).__name__) from error
        raise EtcdUnreachable("the watch's stream ended")

    def _url(self, index: int, path: str) -> str:
        return f"http://{self._endpoints[index]}/v3/{path}"

    def _leave(self, index: int) -> None:
        """Switch to the next endpoint, unless another call has already done so."""
        if len(self._endpoints) > 1 and self._index == index:
            self._index = (index + 1) % len(self._endpoints)
            self.generation += 1


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    buffer = bytearray()
    async for chunk in content.iter_any():
        buffer += chunk
        *lines, rest = buffer.split(b"\n")
        buffer = rest
        for line in lines:
            if line:
                yield bytes(line)
        if len(buffer) > LINE_BYTES_MAX:
            raise EtcdError(2, f"a line of a watch is over {LINE_BYTES_MAX} bytes")


def _result(line: WatchLine) -> WatchResult:
    if line.result is not None:
        return line.result
    if line.error is None:
        raise EtcdError(2, "a line of a watch has neither result nor error")
    if line.error.grpc_code in CODES_TRY_AGAIN:
        raise EtcdUnreachable(line.error.message)
    raise EtcdError(line.error.grpc_code, line.error.message)


class _Failure(msgspec.Struct):
    code: int = 2
    message: str = ""
    error: str = ""


def _failure(status: int, body: bytes) -> EtcdError | EtcdUnreachable:
    try:
        failure = read(body, _Failure)
    except EtcdError:
        return EtcdError(2, f"HTTP {status}; is this etcd's JSON gateway?")
    text = failure.message or failure.error or f"HTTP {status}"
    return EtcdUnreachable(text) if failure.code in CODES_TRY_AGAIN else EtcdError(failure.code, text)
