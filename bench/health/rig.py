"""The deployment that is broken: real processes with a control, how faults are done to them and undone.

Always true: what a fault was told to do is undone by `undo`, and everything that was started here ends with the `with`
block.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.health.faults import Fault, On, Undo
from holdfast.core.tasks import Tasks
from holdfast.testing.clients import Received, chat_body, open_client
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import fetch
from holdfast.testing.waiting import in_thread
from tests.rigs.health.verdicts import WatchedDeployment, watched

BURNERS = 8  # processes for each core
BURN_S_MAX = 300.0  # longer than any fault lasts
BURN = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: pass"
FLOOD_CLIENTS = 8  # each asks again as soon as it is refused
FLOOD_PAUSE_S = 0.01


@dataclass(slots=True)
class FaultRig(WatchedDeployment):
    """A watched deployment, and how it is broken."""

    _flood: Counter[int] = field(default_factory=Counter)  # the answers to clients' mistakes, by status
    _flagged: int = 0
    _tasks: Tasks = field(default_factory=lambda: Tasks("bench health"))
    _burners: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _flooding: list[asyncio.Task[None]] = field(default_factory=list)

    def _falls(self, name: str) -> int:
        verdict = self.verdict(name)
        return verdict.record.standing.fall if verdict else 0

    def choose(self, faults: Sequence[Fault], rng: random.Random) -> Iterator[tuple[Fault, tuple[str, ...]]]:
        """Yield each with the workers to hit: those that fell least often first, since one that falls again must prove
        itself longer."""
        names = sorted(self.deployment.worker_names, key=lambda name: (self._falls(name), rng.random()))
        free = iter(names)
        for fault in faults:
            yield fault, (next(free),) if fault.on is On.ONE else tuple(names) if fault.on is On.ALL else ()

    def has_ended(self, name: str) -> bool:
        return self.deployment.processes[name].poll() is not None

    # -- faults

    async def inject(self, fault: Fault, names: Sequence[str]) -> None:
        if fault.on is On.MACHINE:
            self.take_cores(BURNERS, BURN_S_MAX)
        elif fault.on is On.FRONTEND:
            self._flooding += [self._tasks.spawn(self._mistakes(place), "flood") for place in range(FLOOD_CLIENTS)]
        else:
            command = dict(fault.sim)
            kind = command.pop("fault")
            hits = (in_thread(lambda name=name: self.deployment.chaos(name, kind, **command)) for name in names)
            await asyncio.gather(*hits)

    async def undo(self, fault: Fault, names: Sequence[str]) -> None:
        match fault.undo:
            case Undo.START:
                for name in names:
                    self.deployment.start_worker(name)
            case Undo.CONTINUE:
                for name in names:
                    self.deployment.signal(name, signal.SIGCONT)
            case Undo.CLEAR | Undo.RELOAD:
                await asyncio.gather(*(in_thread(self.deployment.chaos, name, "clear") for name in names))
                if fault.undo is Undo.RELOAD:
                    await asyncio.gather(*(in_thread(self._reload, name) for name in names))
            case Undo.END:
                await self.calm_down()

    def take_cores(self, each: int, seconds_max: float) -> None:
        """So many busy processes for each core that is ours, until `calm_down`; or for so long, if that never comes."""
        count = each * len(os.sched_getaffinity(0))
        self._burners += [subprocess.Popen([sys.executable, "-c", BURN.format(seconds_max)]) for _ in range(count)]

    def _reload(self, name: str) -> None:
        status, body = fetch(self.deployment.record(name)["status"], "/engine/reload", "POST", timeout_s=30.0)
        assert status == 200, body

    async def restart(self, name: str) -> None:
        """Kill it, whatever state it is in, and start another in its place."""
        await in_thread(self.deployment.kill, name)
        # In this thread: the kernel ends a child with the thread that asked for it.
        self.deployment.start_worker(name)

    async def calm_down(self) -> None:
        """No more flood, no more taken cores."""
        flooding, self._flooding = self._flooding, []
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
        burners, self._burners = self._burners, []
        for burner in burners:
            burner.kill()
        for burner in burners:
            await in_thread(burner.wait)

    async def take_notes(self) -> dict[str, Any]:
        """What is to be told beside verdicts and answers, since the last time."""
        notes: dict[str, Any] = {}
        flood, self._flood = self._flood, Counter()
        if flood:
            notes["mistakes_answered"] = {str(status): count for status, count in sorted(flood.items())}
        flagged, self._flagged = self._flagged, await in_thread(self._count_flagged)
        if self._flagged > flagged:
            notes["streams_flagged"] = self._flagged - flagged
        return notes

    def _count_flagged(self) -> int:
        """Answers that control says may be wrong, so far."""
        status = self.deployment.record("control").get("status", "")
        page = fetch(status, "/metrics")[1].decode() if status else ""
        return sum(int(float(count)) for count in re.findall(r"^holdfast_flagged_streams_total (\S+)$", page, re.M))

    async def _mistakes(self, place: int) -> None:
        """Make clients' mistakes of every kind, one after the other."""
        wrong: list[dict[str, Any]] = [
            chat_body("hello", -1),
            chat_body("hello", 5, temperature=99),
            chat_body("hello", 5, model="missing"),
            chat_body("too long " * 20_000, 5),
            chat_body("hello", 5, logit_bias={"99999999": 1}),
            {"messages": "none"},
        ]
        bodies = [msgspec.json.encode(body) for body in wrong] + [b"{", b""]
        for number in range(place, sys.maxsize):
            with contextlib.suppress(OSError):
                received = await _post(self.deployment.port, bodies[number % len(bodies)])
                self._flood[received.status] += 1
            await asyncio.sleep(FLOOD_PAUSE_S)


async def _post(port: int, body: bytes) -> Received:
    client = await open_client(port)
    try:
        return await client.request("/v1/chat/completions", body)
    finally:
        client.close()


@contextlib.asynccontextmanager
async def breakable(deployment: Deployment) -> AsyncIterator[FaultRig]:
    """Watch a deployment that runs, to break it; floods and taken cores end with the block."""
    async with watched(deployment) as seen:
        rig = FaultRig(deployment, seen.verdicts)
        try:
            yield rig
        finally:
            await rig.calm_down()
