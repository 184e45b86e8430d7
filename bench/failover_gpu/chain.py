"""A chain of kills: the active engine is killed, its standby wakes and is the next to be killed.

Engines are started ahead, several at once, and have everything ready before the next kill: no start disturbs a
measurement. Always true: every wait for a process has a bound; one that fails or hangs is killed by its pid, its round
is told as failed with the reason, and the chain begins anew with an empty vault.
"""

from __future__ import annotations

import json
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench import ROOT
from bench.failover_gpu.engine import Settings
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings

# Contexts of 0.5 GiB each beside what is measured (facts 6), and few enough to start side by side.
AHEAD = 6
START_S = 60.0  # imports and a context are a second; the first engine also writes weights and pool
WAKE_S = 45.0  # more than an engine's own bounds together: its reason is heard before ours
END_S = 20.0
# For all rounds of a part: they take a second each, and whoever lends the GPU lends it for minutes.
PART_S = 100.0
# The owner works this long before it is killed, so that the kill falls anywhere in its steps.
WORK_S = (0.03, 0.12)


class RoundFailed(Exception):
    """Why a round does not count."""


class EngineProcess:
    """One engine, and what it has said."""

    def __init__(self, settings: Settings, log: Path) -> None:
        command = [sys.executable, "-m", "bench.failover_gpu.child", msgspec.json.encode(settings).decode()]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
            )
        self._log = log
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # what a kill cut off was never said
                self._said.put(json.loads(line))
        self._said.put(None)

    def until(self, event: str, timeout_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                said = self._said.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise RoundFailed(f"no {event!r} from an engine within {timeout_s:.0f} s") from None
            if said is None:
                last = self._log.read_text().strip().splitlines()[-1:] or ["without a word"]
                raise RoundFailed(f"an engine ended before {event!r}: {last[0]}")
            if said["event"] == "error":
                raise RoundFailed(f"an engine failed before {event!r}: {said['error']}")
            if said["event"] == event:
                return said

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RoundFailed(f"an engine had ended before {command!r}") from None

    def kill(self) -> float:
        """SIGKILL; when."""
        killed_s = time.monotonic()
        self._process.kill()
        return killed_s

    def reap(self) -> None:
        self._process.kill()  # nothing, if it is over
        self._process.wait(END_S)
        self._listener.join(END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Chain:
    """A vault of its own and engines that follow each other. A context manager; nothing is left behind."""

    def __init__(self, settings: Settings, tell: Callable[[str], None]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hf-gpu-", dir="/tmp"))
        path = str(self._folder / "gms.sock")
        self._settings = msgspec.structs.replace(settings, path=path, lock_path=str(self._folder / "failover.lock"))
        self._vault = VaultProcesses(VaultSettings(settings.device, path), self._folder / "vault.log")
        self._tell = tell
        self._rng = random.Random(4)
        self._active: EngineProcess | None = None
        self._ready: list[EngineProcess] = []

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
        standby: EngineProcess | None = None
        try:
            if self._active is None:
                self._crown()
            standby = self._next(left)
            return self._fail_over(standby, how)
        except RoundFailed as failed:
            if standby is not None:
                standby.reap()
            self._end()
            self._vault.start()
            return {"failed": str(failed)}

    def _start(self, count: int) -> None:
        begun = [EngineProcess(self._settings, self._folder / "engines.log") for _ in range(count)]
        self._ready += begun  # first: whatever fails now, they are ended with the rest
        for engine in begun:
            try:
                engine.until("ready", START_S)
            except RoundFailed:
                self._ready.remove(engine)
                engine.reap()
                raise

    def _next(self, left: int) -> EngineProcess:
        if not self._ready:
            self._start(min(AHEAD, left))
        return self._ready.pop()

    def _crown(self) -> None:
        """The first engine, or the first after a failed round: the lock is free."""
        engine = self._next(1)
        self._active = engine
        engine.tell("arm")
        engine.until("serving", START_S)

    def _fail_over(self, standby: EngineProcess, how: str) -> dict[str, Any]:
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
