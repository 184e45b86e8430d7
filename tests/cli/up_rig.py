"""A place of its own for `holdfast up`: a short state directory, a free port, and nothing left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.bench.deployment import free_port

START_S = 60.0  # a loaded CI machine
# Workers without vaults and election: quicker, where that is not the point.
PLAIN = ("--engine", "sim", "--standbys", "0", "--workers", "2")


def until(true: Callable[[], Any], what: str, bound_s: float = START_S) -> float:
    """Wait for something; seconds it took."""
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() - began_s < bound_s, f"waited {bound_s:g} s for {what}"
        time.sleep(0.02)
    return time.monotonic() - began_s


class Place:
    """Where one deployment lives."""

    def __init__(self, *shape: str) -> None:
        self.shape = shape or PLAIN
        self.pace = ("--sim-tpot-ms", "5") if "sim" in self.shape else ()
        self.state_dir = Path(tempfile.mkdtemp(prefix="hfup-", dir="/tmp"))
        self.port = free_port()
        self.model = "holdfast-sim"
        unwanted = ("HOLDFAST_", "DYN_", "GMS_", "ENGINE_ID", "FAILOVER_")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        self.env["HOLDFAST_STATE_DIR"] = str(self.state_dir)
        self.started: list[subprocess.Popen[bytes]] = []

    # -- the command

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "holdfast", *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), env=self.env, capture_output=True, text=True, timeout=START_S, check=False
        )

    def up(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`holdfast up --detach`."""
        return self.run("up", "--detach", "--port", str(self.port), *self.pace, *self.shape, *words)

    def up_here(self, *words: str) -> subprocess.Popen[bytes]:
        """`holdfast up` in the foreground of a session of its own, its screen shown in full."""
        with (self.state_dir / "screen").open("wb") as screen:
            process = subprocess.Popen(
                self.command("up", "--port", str(self.port), *self.pace, *self.shape, *words),
                env=self.env,
                stdout=screen,
                stderr=screen,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.started.append(process)
        until(lambda: "Logs are in" in self.screen() or process.poll() is not None, "everything to be up")
        assert process.poll() is None, self.screen()
        return process

    def screen(self) -> str:
        """What the foreground `up` has shown so far."""
        return (self.state_dir / "screen").read_text()

    def ps(self) -> dict[str, dict[str, Any]]:
        done = self.run("ps", "--json")
        assert done.returncode == 0, done.stderr
        return {process["name"]: process for process in json.loads(done.stdout)}

    # -- looking

    def lock(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.state_dir / "up.lock").read_bytes())  # type: ignore[no-any-return]
        return {}

    def record(self, name: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.state_dir / "run" / f"{name}.json").read_bytes())  # type: ignore[no-any-return]
        return {}

    def back(self, name: str, before: int) -> bool:
        """Whether another process than `before` is ready under this name."""
        record = self.record(name)
        return record.get("state") == "ready" and record["pid"] != before

    def health(self) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return json.loads(connection.getresponse().read())  # type: ignore[no-any-return]
        except (OSError, ValueError, http.client.HTTPException):
            return {}
        finally:
            connection.close()

    def chat(self, max_tokens: int = 20) -> str:
        """One streamed answer, as it came."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        body = {"model": self.model, "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
        body["messages"] = [{"role": "user", "content": "hello"}]
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def pids(self) -> set[int]:
        """Every process of this place, whoever started it: all inherit the state directory in their environment."""
        mark = f"HOLDFAST_STATE_DIR={self.state_dir}".encode()
        found = set()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
        return found

    def close(self) -> None:
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.started:
                process.poll()
        shutil.rmtree(self.state_dir, ignore_errors=True)
