"""What unfinished request bodies may cost a frontend, with real processes: memory stays bounded, others are served."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from holdfast.core.procfs import read_text
from holdfast.testing.deployment import Deployment
from holdfast.wire.http.request import HttpBounds
from tests.rigs.frontend.raw_http import Raw, chat

KEY = "sesame"
CLIENTS = 24
BODY_BYTES = HttpBounds().body_bytes_max - 1024
MIB = 2**20

pytestmark = [pytest.mark.processes, pytest.mark.alone]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(workers=1, frontend={"api_keys": [KEY]}) as made:
        yield made


def memory_mib(deployment: Deployment, field: str) -> float:
    """A line of the frontend's /proc/PID/status: VmRSS, or VmHWM for the most it ever had."""
    text = read_text(f"/proc/{deployment.processes['frontend'].pid}/status") or ""
    (line,) = [line for line in text.splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) / 1024


def head(authorization: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json"]
    return "\r\n".join([*lines, f"{authorization}content-length: {BODY_BYTES}", "", ""]).encode()


def fill(port: int, authorization: str) -> socket.socket:
    """Send all of a large body but its last byte, or as much as the frontend takes."""
    sock = socket.create_connection(("127.0.0.1", port), 60.0)
    with contextlib.suppress(OSError):
        sock.sendall(head(authorization))
        sock.sendall(b" " * (BODY_BYTES - 1))
    return sock


@pytest.mark.parametrize("authorization", ["", f"authorization: Bearer {KEY}\r\n"], ids=["no-key", "key"])
def test_bodies_that_never_end_do_not_fill_the_memory(deployment: Deployment, authorization: str) -> None:
    """Neither without a key, where none of a body is kept, nor with one, where all connections have a budget. Another
    client is served while they are there, and what they sent is gone when they are."""
    bound_mib = HttpBounds().buffered_bytes_max / MIB if authorization else 0
    with Raw(deployment.port) as raw:  # memory that any first request takes is not theirs
        assert raw.post("/v1/chat/completions", chat(), f"authorization: Bearer {KEY}\r\n").reply().status == 200
    before_mib = memory_mib(deployment, "VmRSS")
    socks: list[socket.socket] = []
    fillers = [
        threading.Thread(target=lambda: socks.append(fill(deployment.port, authorization)), daemon=True)
        for _ in range(CLIENTS)
    ]
    for filler in fillers:
        filler.start()
    with Raw(deployment.port) as raw:
        assert raw.post("/v1/chat/completions", chat(), f"authorization: Bearer {KEY}\r\n").reply().status == 200
    for filler in fillers:
        filler.join(60.0)
    with Raw(deployment.port) as raw:
        assert raw.post("/v1/chat/completions", chat(), f"authorization: Bearer {KEY}\r\n").reply().status == 200
    most_mib = memory_mib(deployment, "VmHWM")
    assert most_mib - before_mib < 1.5 * bound_mib + 64, (before_mib, most_mib)
    for sock in socks:
        sock.close()
    deployment.wait_until(
        lambda: memory_mib(deployment, "VmRSS") < before_mib + 64, "what was sent to be gone from memory"
    )


def test_a_request_without_a_key_is_refused_before_its_body(deployment: Deployment) -> None:
    """At the end of its head; and where no key is needed no large body is read."""
    with Raw(deployment.port) as raw:
        reply = raw.send(head("")).reply()
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert raw.at_end()
    with Raw(deployment.port) as raw:
        raw.send(f"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: {BODY_BYTES}\r\n\r\n".encode())
        assert raw.reply().status == 413
