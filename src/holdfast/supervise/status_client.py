"""Ask a process's status page: one request, one JSON object, a bound on time and size."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from holdfast.core.address import Address, TcpAddress
from holdfast.core.ports import Network

ANSWER_BYTES_MAX = 1024 * 1024  # facts of one process; a frontend lists its workers in them


class _Answer(asyncio.Protocol):
    """Collects what comes until the other side closes."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        if len(self.received) > ANSWER_BYTES_MAX and self._transport is not None:
            self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def get_facts(address: Address, network: Network, bound_s: float, path: str = "/health") -> dict[str, Any] | None:
    """The facts shown at `path`, or None if there was no such answer in time."""
    answer = await _get(address, network, bound_s, path)
    return None if answer is None else _facts(answer)


async def get_page(address: Address, network: Network, bound_s: float, path: str) -> bytes | None:
    """What stands at `path`, or None if there was no 200 in time."""
    head, _, body = (await _get(address, network, bound_s, path) or b"").partition(b"\r\n\r\n")
    return body if head.partition(b"\r\n")[0].split()[1:2] == [b"200"] else None


async def get_status(address: Address, network: Network, bound_s: float, path: str) -> tuple[int | None, str]:
    """The status code at `path`, or None if no answer came in time; and the reason it gives, if any."""
    answer = await _get(address, network, bound_s, path) or b""
    words = answer.partition(b"\r\n")[0].split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        return None, ""
    return int(words[1]), str((_facts(answer) or {}).get("reason") or "")


async def post_action(address: Address, network: Network, bound_s: float, path: str) -> tuple[int | None, str]:
    """Have it do what stands at `path`: the status code, or None where no answer came in time; and what it says."""
    answer = await _get(address, network, bound_s, path, "POST") or b""
    words = answer.partition(b"\r\n")[0].split()
    code = int(words[1]) if words[1:] and words[1].isdigit() else None
    return code, str((_facts(answer) or {}).get("message") or "")


async def _get(address: Address, network: Network, bound_s: float, path: str, method: str = "GET") -> bytes | None:
    host = f"{address.host}:{address.port}" if isinstance(address, TcpAddress) else "localhost"
    length = "content-length: 0\r\n" if method == "POST" else ""
    request = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n{length}connection: close\r\n\r\n"
    transport: asyncio.Transport | None = None
    answer = _Answer()
    try:
        async with asyncio.timeout(bound_s):
            transport = await network.connect(address, lambda: answer, bound_s)
            transport.write(request.encode())
            await answer.over
    except (OSError, TimeoutError):
        return None
    finally:
        if transport is not None:
            transport.abort()
    return bytes(answer.received)


def _facts(answer: bytes) -> dict[str, Any] | None:
    """The JSON object in an HTTP answer, whatever its status: "not ready" has facts too."""
    try:
        return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=dict[str, Any])
    except msgspec.DecodeError:
        return None
