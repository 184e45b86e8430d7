"""Who does nothing never uses up the descriptors that a process needs: real processes with few, and many strangers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest
from wire_rig import HELLO, Peer

from holdfast.bench.deployment import Deployment, free_port
from holdfast.core.limits import raise_descriptor_limit
from holdfast.wire.messages import Welcome

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
    until_s = time.monotonic() + 30
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
                sock.settimeout(10)
                connect(sock, address)
        yield


def page_of(deployment: Deployment, name: str) -> tuple[str, int]:
    record = json.loads((deployment.folder / "run" / f"{name}.json").read_bytes())
    host, port = record["status"].removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


def ask(deployment: Deployment, tokens: int) -> http.client.HTTPResponse:
    """A streamed answer whose head has come."""
    connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=30)
    body = {"model": "holdfast-sim", "stream": True, "max_tokens": tokens, "ignore_eos": True, "prompt": "hello"}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
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
        assert len(few.alive_workers()) == 1
        assert before.read().endswith(b"[DONE]\n\n")


def test_clients_beyond_what_can_be_answered_are_told_so(few: Deployment) -> None:
    """With as many answers under way as there can be, another client is told 429, and probes are answered still."""
    answers = [ask(few, 20_000) for _ in range(LIMIT)]
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) > LIMIT / 4
    assert b"ulimit -n" in answers[statuses.index(429)].read()
    assert few.get("/live", page_of(few, "frontend")[1])[0] == 200
    for answer in answers:
        answer.close()


def test_a_listener_without_descriptors_goes_on_once_there_are_some(few: Deployment) -> None:
    """A client that comes meanwhile waits, and is answered."""
    had = let_have(few.pid("frontend"), 1)
    try:
        client = http.client.HTTPConnection("127.0.0.1", few.port, timeout=30)
        client.request("GET", "/live")
        few.wait_until(lambda: "cannot take connections in" in few.log("frontend"), "the frontend to say so")
    finally:
        let_have(few.pid("frontend"), had)
    assert client.getresponse().status == 200
    client.close()
