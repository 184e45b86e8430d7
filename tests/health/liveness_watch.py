"""An observer in real time for tests: a beat connection, a tick every 0.1 s, the judge and the real probe."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from holdfast.core.address import TcpAddress, UnixAddress, parse_address
from holdfast.health.liveness import TICK_S, Judge
from holdfast.health.probe import is_local, probe
from holdfast.health.verdicts import Effect, Judged, MoveStreams, StartProbe, StopProbe, Verdict
from holdfast.wire.frames import FrameSplitter
from holdfast.wire.messages import VERSION, Beat, Hello, Message, Welcome, decode_to_frontend, encode

CHILD = Path(__file__).parent / "beat_child.py"


class Child:
    """A `beat_child` process; its mode is changed by a word."""

    def __init__(self, address: str = "tcp://127.0.0.1:0", nice: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), address, str(nice)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = parse_address(self.process.stdout.readline().strip())

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()


class Watch:
    """Drives one judge over one real connection until something is so."""

    def __init__(self, child: Child, streams_open: bool) -> None:
        self.judge = Judge("child")
        self.streams_open = streams_open
        self.started = time.monotonic()
        self.log: list[tuple[float, Verdict]] = []
        self.moves = 0
        self.probing = False
        self.tick_at = self.started
        self.splitter = FrameSplitter()
        self.sock = connect(child)
        self.sock.sendall(encode(Hello(VERSION, "beat", "test")))

    def close(self) -> None:
        self.sock.close()

    def until(self, verdict: Verdict, limit_s: float) -> float:
        """Seconds until the judge says so; fails past the limit."""
        began = time.monotonic()
        self.run(lambda: self.judge.verdict is verdict, limit_s)
        assert self.judge.verdict is verdict, f"{self.judge!r} after {limit_s} s; {self.log}"
        return time.monotonic() - began

    def run(self, done: Callable[[], bool], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not done() and time.monotonic() < end:
            wait_s = max(0.0, min(self.tick_at, end) - time.monotonic())
            if self.sock.fileno() >= 0 and select.select([self.sock], [], [], wait_s)[0]:
                self.receive()
            now = time.monotonic()
            if now >= self.tick_at:
                self.tick_at = now + TICK_S
                self.take(self.judge.on_tick(now, self.streams_open))
                if self.probing:
                    self.look()

    def receive(self) -> None:
        data = self.sock.recv(65536)
        if not data:
            self.sock.close()
            self.take(self.judge.on_disconnected(time.monotonic()))
        for payload in self.splitter.feed(data):
            self.hear(decode_to_frontend(payload))

    def hear(self, message: Message) -> None:
        now = time.monotonic()
        if isinstance(message, Beat):
            self.take(self.judge.on_beat(now, message))
            return
        assert isinstance(message, Welcome), message
        self.identity = message.process
        self.take(self.judge.on_connected(now, is_local(message.process)))

    def look(self) -> None:
        self.take(self.judge.on_probe(time.monotonic(), probe(self.identity)))

    def take(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Judged):
                self.log.append((round(time.monotonic() - self.started, 2), effect.after))
            self.moves += isinstance(effect, MoveStreams)
            if isinstance(effect, StartProbe | StopProbe):
                self.probing = isinstance(effect, StartProbe)
                if self.probing:
                    self.look()


def connect(child: Child) -> socket.socket:
    address = child.address
    if isinstance(address, UnixAddress):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.path)
        return sock
    assert isinstance(address, TcpAddress)
    return socket.create_connection((address.host, address.port), timeout=5)
