"""A blocking peer of a worker's sockets, and what the worker under fire must still be afterwards."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from holdfast.core.requests import GenerateRequest, Output, Sampling
from holdfast.testing.deployment import Deployment
from holdfast.testing.processes import fd_count, rss_bytes, thread_count
from holdfast.testing.waiting import BOUND_S
from holdfast.wire.frames import FrameSplitter, encode
from holdfast.wire.messages import VERSION, Hello, Message, Refused, Step, Welcome, decode_to_frontend

HELLO = {"data": encode(Hello(VERSION, "data", "fuzz")), "beat": encode(Hello(VERSION, "beat", "fuzz"))}


class Peer:
    """Connects to one of the worker's sockets, and blocks."""

    def __init__(self, place: str | tuple[str, int]) -> None:
        """Connect to a path, or to a host and port."""
        self.sock = socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET)
        self.sock.settimeout(BOUND_S)
        self.sock.connect(place)
        self._splitter = FrameSplitter()
        self._pending: list[Message] = []

    def send(self, data: bytes) -> Peer:
        # It may be refused meanwhile; what it was told can still be read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(data)
        return self

    def next(self) -> Message | None:
        """The next message, None at the connection's end."""
        while not self._pending:
            try:
                data = self.sock.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._pending += [decode_to_frontend(payload) for payload in self._splitter.feed(data)]
        return self._pending.pop(0)

    def refusal(self) -> Refused:
        """Whatever comes before it, the worker ends it with a reason and closes."""
        messages = []
        while (message := self.next()) is not None:
            messages.append(message)
        assert messages, "closed without a reason"
        assert isinstance(messages[-1], Refused), messages
        assert messages[-1].reason
        return messages[-1]

    def outputs(self, stream: int) -> Output:
        """Return the last output of a stream."""
        while True:
            message = self.next()
            assert isinstance(message, Step), message
            for output in message.outputs:
                if output.stream == stream and (output.finish or output.failure):
                    return output


class Target:
    """The worker under fire, and what it held before."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.pid = deployment.pid("worker-0")
        self.paths = {
            purpose: f"{deployment.folder}/run/worker-0.{end}" for purpose, end in (("data", "sock"), ("beat", "beat"))
        }
        self.held = self.count()
        self.rss = self.rss_bytes()

    def count(self) -> tuple[int, int]:
        return fd_count(self.pid), thread_count(self.pid)

    def rss_bytes(self) -> int:
        return rss_bytes(self.pid)

    def peer(self, purpose: str) -> Peer:
        return Peer(self.paths[purpose])

    def greeted(self) -> Peer:
        peer = self.peer("data").send(HELLO["data"])
        assert isinstance(peer.next(), Welcome)
        return peer

    def is_idle(self) -> bool:
        facts = self.deployment.worker_facts("worker-0")
        return (facts["status"], facts["running"], facts["waiting"]) == ("ready", 0, 0)

    def judge(self) -> None:
        """Everything is as it was."""
        deployment = self.deployment
        assert deployment.processes["worker-0"].poll() is None
        deployment.wait_until(lambda: self.count() <= self.held, f"descriptors and threads to be {self.held} again")
        deployment.wait_until(lambda: deployment.worker_facts("worker-0")["streams"] == 0, "no stream to be left")
        deployment.wait_until(self.is_idle, "the worker to be idle")
        assert self.rss_bytes() < self.rss + 96 * 1024 * 1024
        deployment.wait_until(lambda: len(deployment.alive_workers()) == 1, "the worker to be well")
        assert "Traceback" not in deployment.log("worker-0")


def request(**changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"request_id": "r", "tokens": [70, 71, 72], "prompt_len": 3, "sampling": Sampling(4, 1)}
    return GenerateRequest(**(fields | changes))
