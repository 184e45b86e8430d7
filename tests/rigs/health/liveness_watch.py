"""An observer for tests: the real watcher, over a real connection to a process that beats, ticked every 0.1 s."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

from holdfast.core.address import parse_address
from holdfast.health.liveness import TICK_LATE_S, TICK_S, Liveness, LivenessChanged, WorkerLiveness
from holdfast.health.watcher import BeatWatcher, Finding
from holdfast.wire.messages import Welcome
from holdfast.wire.net import SocketNetwork

BOUND_S = 60.0  # for what must come, on a busy machine too
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
    """A watcher with an observer that ticks it until something is so."""

    def __init__(self, child: Child, streams_open: bool) -> None:
        self.streams_open = streams_open
        self.loop = asyncio.get_running_loop()
        self.started_s = self.loop.time()
        self.log: list[tuple[float, Liveness]] = []
        self.moves = 0
        self.watcher = BeatWatcher(
            name="child",
            address=str(child.address),
            network=SocketNetwork(),
            peer="test",
            check=self.check,
            on_finding=self.found,
        )
        self.keeping = asyncio.create_task(self.watcher.keep())

    async def close(self) -> None:
        self.keeping.cancel()
        await asyncio.gather(self.keeping, return_exceptions=True)

    @property
    def liveness(self) -> WorkerLiveness:
        return self.watcher.liveness

    def check(self, welcome: Welcome) -> None:
        self.identity = welcome.process

    async def until(self, verdict: Liveness, limit_s: float = BOUND_S) -> float:
        """Seconds until the state is reached, by the observer's on-time ticks; fails past the limit."""
        took_s = await self.run(lambda: self.liveness.state is verdict, limit_s)
        assert self.liveness.state is verdict, f"{self.liveness!r} after {limit_s} s; {self.log}"
        return took_s

    async def run(self, done: Callable[[], bool], limit_s: float = BOUND_S) -> float:
        """Seconds by the observer's on-time ticks: `WorkerLiveness` counts no others, and so does its time not run
        while this process is held up."""
        ticked_s, on_time, end_s = self.loop.time(), 0, self.loop.time() + BOUND_S
        while not done() and on_time * TICK_S < limit_s and self.loop.time() < end_s:
            await asyncio.sleep(TICK_S)
            now_s = self.loop.time()
            on_time += now_s - ticked_s <= TICK_LATE_S
            ticked_s = now_s
            self.watcher.tick(now_s, streams_open=self.streams_open)
        return on_time * TICK_S

    def found(self, finding: Finding) -> None:
        if isinstance(finding, LivenessChanged):
            self.log.append((round(self.loop.time() - self.started_s, 2), finding.after))
        else:
            self.moves += 1
