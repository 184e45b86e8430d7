"""A chain of kills: the active engine is killed, its standby wakes and is the next to be killed.

Engines are started ahead, several at once, and have everything ready before the next kill: no start disturbs a
measurement. Always true: every wait for a process has a bound; one that fails or hangs is killed by its pid, its round
is told as failed with the reason, and the chain begins again with an empty vault.

`python -m bench.failover_gpu.chain JSON` is such an engine: it stands by, wins the lock, wakes, works, and is killed;
commands come on stdin, one JSON object per event goes to stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench import ROOT
from bench.failover_gpu.engine import DirectEngine, Engine, Settings, say, trace_driver
from bench.failover_gpu.late import LateEngine, play_queue
from bench.failover_gpu.pool import VaultEngine
from holdfast.memory.client.calls import VaultRefused
from holdfast.memory.devices import DeviceError
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from tests.rigs.children import Child, ChildFailed

# Contexts of 0.5 GiB each beside what is measured (facts 6), and few enough to start side by side.
AHEAD = 6
START_S = 60.0  # imports and a context are a second; the first engine also writes weights and pool
WAKE_S = 45.0  # more than an engine's own bounds together: its reason is heard before ours
END_S = 20.0
# For all rounds of a part: they take a second each, and a GPU is lent for minutes.
PART_S = 100.0
# The owner works this long before it is killed, so that the kill falls anywhere in its steps.
WORK_S = (0.03, 0.12)


class Chain:
    """A vault of its own and engines that follow each other. A context manager; nothing is left behind."""

    def __init__(self, settings: Settings, tell: Callable[[str], None]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hf-gpu-", dir="/tmp"))
        path = str(self._folder / "gms.sock")
        self._settings = msgspec.structs.replace(settings, path=path, lock_path=str(self._folder / "failover.lock"))
        self._vault = VaultProcesses(VaultSettings(settings.device, path), self._folder / "vault.log")
        self._tell = tell
        self._rng = random.Random(4)
        self._active: Child | None = None
        self._ready: list[Child] = []

    def __enter__(self) -> Chain:
        self._vault.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        for engine in (self._active, *self._ready):
            if engine is not None:
                engine.reap()
        self._active, self._ready = None, []
        self._vault.stop()

    def rounds(self, count: int, how: str = "") -> list[dict[str, Any]]:
        """So many kills; each as its figures, or with `failed`."""
        rows = []
        deadline_s = time.monotonic() + PART_S
        for number in range(count):
            late = time.monotonic() > deadline_s
            row = {"failed": f"not tried: {PART_S:.0f} s are over"} if late else self.round(how, count - number)
            rows.append(row)
            self._tell(f"{number + 1}/{count} {json.dumps(row)}")
        return rows

    def round(self, how: str, left: int) -> dict[str, Any]:
        standby: Child | None = None
        try:
            if self._active is None:
                self._crown()
            standby = self._next(left)
            return self._fail_over(standby, how)
        except ChildFailed as failed:
            if standby is not None:
                standby.reap()
            self._end()
            self._vault.start()
            return {"failed": str(failed)}

    def _start(self, count: int) -> None:
        words = ("-m", "bench.failover_gpu.chain", msgspec.json.encode(self._settings).decode())
        log = self._folder / "engines.log"
        begun = [Child(*words, log=log, folder=ROOT) for _ in range(count)]
        self._ready += begun  # first: whatever fails now, they are ended with the rest
        for engine in begun:
            try:
                engine.until("ready", START_S)
            except ChildFailed:
                self._ready.remove(engine)
                engine.reap()
                raise

    def _next(self, left: int) -> Child:
        if not self._ready:
            self._start(min(AHEAD, left))
        return self._ready.pop()

    def _crown(self) -> None:
        """The first engine, or the first after a failed round: the lock is free."""
        engine = self._next(1)
        self._active = engine
        engine.tell("arm")
        engine.until("serving", START_S)

    def _fail_over(self, standby: Child, how: str) -> dict[str, Any]:
        active = self._active
        assert active is not None
        standby.tell(f"arm {how}")
        standby.until("armed", END_S)
        time.sleep(self._rng.uniform(*WORK_S))
        row: dict[str, Any] = {}
        if self._settings.part == "late":
            active.tell("plant")
            row = {"planted": active.until("planted", START_S)["queued_ms"]}
        killed_s = active.kill()
        woke = standby.until("woke", WAKE_S)
        active.reap()
        self._active = standby
        standby.until("serving", END_S)
        row |= {f"{name}_ms": round((at_s - killed_s) * 1000, 3) for name, at_s in woke["marks"].items()}
        return row | {name: value for name, value in woke.items() if name not in ("event", "marks")}


# -- the process of an engine

KINDS: dict[str, type[Engine]] = {"direct": DirectEngine, "vault": VaultEngine, "late": LateEngine}


async def serve_commands(engine: Engine) -> None:
    """One at a time from stdin, until it ends."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command, _, how = line.strip().partition(" ")
        if command == "arm":
            await engine.wait()
            facts = await engine.wake(fenced=how != "unfenced")
            say("woke", marks=engine.marks, **facts)
            await engine.serve()
            say("serving")
        elif command == "plant":
            say("planted", **await engine.plant())


async def run(settings: Settings) -> None:
    if settings.part == "queue":
        await play_queue(settings)
        return
    engine = KINDS[settings.part](settings)
    trace_driver(engine.driver_calls)
    await engine.start()
    say("ready", pid=os.getpid())
    await serve_commands(engine)


async def live(settings: Settings) -> None:
    """Threads that wait for the lock or keep the GPU busy end with the process only, and the loop would wait for them:
    so it is left from inside, with the reason said."""
    try:
        await run(settings)
    except (DeviceError, VaultRefused, OSError, AssertionError) as error:
        say("error", error=f"{type(error).__name__}: {error}")
        traceback.print_exc()
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(0)


if __name__ == "__main__":
    asyncio.run(live(msgspec.json.decode(sys.argv[1], type=Settings)))
