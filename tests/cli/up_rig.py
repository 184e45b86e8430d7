"""A place of its own for `holdfast up`: a short state directory, a free port, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.ps import look_at_all
from holdfast.testing.place import free_port

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
        """What `holdfast ps --json` says, without the start of a Python for every look."""
        said = msgspec.json.encode(asyncio.run(look_at_all(self.state_dir)))
        return {process["name"]: process for process in json.loads(said)}

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
        return self.answering(max_tokens).whole()

    def answering(self, max_tokens: int) -> Answering:
        """One streamed answer, of which the first words are here and the last may come later."""
        body = {"model": self.model, "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
        return Answering(self.port, body | {"messages": [{"role": "user", "content": "hello"}]})

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


class Answering(threading.Thread):
    """A stream that is read as it comes, and when each of its words came. Made once the first one is here, so that
    whatever is done next is done in the middle of it."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.at_s: list[float] = []
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        self._answer = self._connection.getresponse()
        while not self.at_s and (line := self._answer.readline()):
            self._take(line)
        self.start()

    def _take(self, line: bytes) -> None:
        self.text += line.decode()
        if b'"delta":{"content"' in line:
            self.at_s.append(time.monotonic())

    def run(self) -> None:
        with contextlib.closing(self._connection), contextlib.suppress(OSError, http.client.HTTPException):
            for line in self._answer:
                self._take(line)

    def whole(self, bound_s: float = START_S) -> str:
        """All of it, once it has ended."""
        self.join(bound_s)
        assert not self.is_alive(), f"an answer that did not end within {bound_s:g} s"
        return self.text
