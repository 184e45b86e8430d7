"""Who does nothing never uses up the descriptors that a process needs: real processes with few, and many strangers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from holdfast.core.limits import raise_descriptor_limit
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import free_port
from holdfast.testing.waiting import BOUND_S
from holdfast.wire.messages import Welcome
from tests.rigs.wire_peer import HELLO, Peer

LIMIT = 128
STRANGERS = 200  # more than that, at each door


@pytest.fixture(scope="module")
def few() -> Iterator[Deployment]:
    """A worker and a frontend that have `LIMIT` descriptors."""
    raise_descriptor_limit()
    page = f"tcp://127.0.0.1:{free_port()}"
    with Deployment(workers=1, sim={"ttft_ms": 1, "tpot_ms": 5}, frontend={"status_address": page}) as made:
        for name in ("worker-0", "frontend"):
            let_have(made.pid(name), LIMIT)
        yield made


def let_have(pid: int, count: int) -> int:
    """How many it could have before."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, hard))
    return soft


def connect(sock: socket.socket, address: str | tuple[str, int]) -> None:
    """A Unix socket says at once that its line is full; it moves on."""
    until_s = time.monotonic() + BOUND_S
    while True:
        try:
            return sock.connect(address)
        except BlockingIOError:
            assert time.monotonic() < until_s, f"nobody is taken in at {address}"
            time.sleep(0.01)


@contextlib.contextmanager
def strangers(*where: str | tuple[str, int]) -> Iterator[None]:
    """They connect, and that is all they do."""
    with contextlib.ExitStack() as stack:
        for address in where:
            family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
            for _ in range(STRANGERS):
                sock = stack.enter_context(socket.socket(family))
                sock.settimeout(BOUND_S)
                connect(sock, address)
        yield


def page_of(deployment: Deployment, name: str) -> tuple[str, int]:
    record = json.loads((deployment.folder / "run" / f"{name}.json").read_bytes())
    host, port = record["status"].removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


def ask(deployment: Deployment, tokens: int, name: str = "anybody") -> http.client.HTTPResponse:
    """A streamed answer whose head has come."""
    connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=BOUND_S)
    body = {"model": "holdfast-sim", "stream": True, "max_tokens": tokens, "ignore_eos": True, "prompt": "hello"}
    headers = {"content-type": "application/json", "x-request-id": name}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


def test_strangers_at_a_workers_doors_keep_nobody_out(few: Deployment) -> None:
    """Sockets for frontends, beats and probes, each with more strangers than there are descriptors: a frontend is
    welcomed, an observer too, probes are answered, and answers go on."""
    paths = {purpose: f"{few.folder}/run/worker-0.{end}" for purpose, end in (("data", "sock"), ("beat", "beat"))}
    with strangers(*paths.values(), page_of(few, "worker-0")):
        for purpose, path in paths.items():
            peer = Peer(path).send(HELLO[purpose])
            assert isinstance(peer.next(), Welcome), purpose
            peer.sock.close()
        assert few.worker_facts("worker-0")["status"] == "ready"
        assert len(os.listdir(f"/proc/{few.pid('worker-0')}/fd")) < LIMIT
        answer = ask(few, 20)
        assert answer.read().endswith(b"[DONE]\n\n")


def test_idle_clients_of_a_frontend_keep_nobody_out(few: Deployment) -> None:
    """Clients without a request make room for those with one; an answer under way is none of theirs."""
    before = ask(few, 400)
    with strangers(("127.0.0.1", few.port), page_of(few, "frontend")):
        assert few.get("/live")[0] == 200
        assert few.get("/live", page_of(few, "frontend")[1])[0] == 200
        assert ask(few, 20).read().endswith(b"[DONE]\n\n")
        few.wait_until(lambda: len(few.alive_workers()) == 1, "the worker to be well")
        assert before.read().endswith(b"[DONE]\n\n")


def test_clients_beyond_what_can_be_answered_are_told_so(few: Deployment) -> None:
    """With as many answers under way as there can be, another client is told 429 under its own name, and probes are
    answered still, also at the door that is full, and beside strangers."""
    answers = [ask(few, 20_000, f"client-{place}") for place in range(LIMIT)]
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) > LIMIT / 4
    assert [answer.headers["x-request-id"] for answer in answers] == [f"client-{place}" for place in range(LIMIT)]
    assert b"ulimit -n" in answers[statuses.index(429)].read()
    with strangers(("127.0.0.1", few.port)):
        for path in ("/live", "/health", "/metrics"):
            assert few.get(path)[0] == 200, path
        assert ask(few, 1).status == 429
    assert few.get("/live", page_of(few, "frontend")[1])[0] == 200
    assert len(os.listdir(f"/proc/{few.pid('frontend')}/fd")) < LIMIT
    for answer in answers:
        answer.close()


def test_whoever_comes_at_once_with_a_request_is_answered(few: Deployment) -> None:
    """More clients than places, all before the first is read: each has its answer or its refusal, nobody is reset."""
    body = b'{"model":"holdfast-sim","stream":true,"max_tokens":200,"ignore_eos":true,"prompt":"hello"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    statuses: list[bytes] = []
    had = let_have(few.pid("frontend"), LIMIT - 8)  # no whole number of accepts fills it
    with contextlib.ExitStack() as stack:
        stack.callback(let_have, few.pid("frontend"), had)
        os.kill(few.pid("frontend"), signal.SIGSTOP)
        try:
            door = ("127.0.0.1", few.port)
            crowd = [stack.enter_context(socket.create_connection(door, BOUND_S)) for _ in range(LIMIT)]
            for client in crowd:
                client.sendall(request)
        finally:
            os.kill(few.pid("frontend"), signal.SIGCONT)
        for client in crowd:
            answer = b"".join(iter(lambda client=client: client.recv(65536), b""))  # type: ignore[misc]
            assert b"429" in answer or answer.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"), answer[-200:]
            statuses.append(answer[9:12])
    assert set(statuses) == {b"200", b"429"}


def test_a_listener_without_descriptors_goes_on_once_there_are_some(few: Deployment) -> None:
    """A client that comes meanwhile waits, and is answered."""
    had = let_have(few.pid("frontend"), 1)
    try:
        client = http.client.HTTPConnection("127.0.0.1", few.port, timeout=BOUND_S)
        client.request("GET", "/live")
        few.wait_until(lambda: "cannot take connections in" in few.log("frontend"), "the frontend to say so")
    finally:
        let_have(few.pid("frontend"), had)
    assert client.getresponse().status == 200
    client.close()
