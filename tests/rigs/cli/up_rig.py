"""A `holdfast up` with a state directory and port of its own, and what its commands show there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.status import look_at_all
from holdfast.testing import rig
from holdfast.testing.answers import Answer
from holdfast.testing.clients import Stream
from holdfast.testing.waiting import wait_until
from tests.rigs.cli.in_process import said_here

START_S = 60.0  # a loaded CI machine
PAIR = ("--engine", "sim", "--vault-gib", "0.0625")
# Workers without vaults and election: quicker, where that is not the point.
PLAIN = ("--engine", "sim", "--standbys", "0", "--workers", "2")


def until(true: Any, what: str, bound_s: float = START_S) -> float:
    return wait_until(true, what, bound_s)


class UpRig(rig.DeploymentRig):
    """Where one deployment of this shape lives."""

    def __init__(self, *shape: str) -> None:
        super().__init__()
        self.shape = shape or PLAIN
        self.pace = ("--sim-tpot-ms", "5") if "sim" in self.shape else ()
        self.model = "holdfast-sim"
        self.started: list[subprocess.Popen[Any]] = []

    @property
    def state_dir(self) -> Path:
        return self.folder

    def close(self) -> None:
        self.processes |= {f"started-{process.pid}": process for process in self.started}
        super().close()

    # -- the command

    def up(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("up", "--detach", "--port", str(self.port), *self.pace, *self.shape, *words)

    def say(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """As `run`, in this very process: for commands that end before anything is started."""
        return said_here(words, self.env | environ)

    def begin(self, *words: str, **environ: str) -> subprocess.Popen[bytes]:
        """One command in a session of its own."""
        return self.start(f"{len(self.processes)}", self.command(*words), environ)

    def up_here(self, *words: str) -> subprocess.Popen[bytes]:
        """`holdfast up` in the foreground of a session of its own, its screen shown in full."""
        (self.folder / "screen.log").unlink(missing_ok=True)
        self.start("screen", self.command("up", "--port", str(self.port), *self.pace, *self.shape, *words))
        process = self.processes["screen"]
        until(lambda: "Logs are in" in self.screen() or process.poll() is not None, "everything to be up")
        assert process.poll() is None, self.screen()
        return process

    def screen(self) -> str:
        """What the foreground `up` has shown so far."""
        return self.log("screen")

    def ps(self) -> dict[str, dict[str, Any]]:
        """What `holdfast status --json` says, without the start of a Python for every look."""
        said = msgspec.json.encode(asyncio.run(look_at_all(self.state_dir)))
        return {process["name"]: process for process in json.loads(said)}

    # -- looking

    def by_state(self) -> dict[str, dict[str, Any]]:
        """The engines of one pair by what they are now; both or fewer."""
        return {status["state"]: status for status in self.ps().values() if status["role"] == "worker"}

    def until_whole(self, active: str = "") -> dict[str, dict[str, Any]]:
        """An active, and it is the one that is named, and a standby, neither in doubt about its memory."""
        found: dict[str, dict[str, Any]] = {}

        def is_whole() -> bool:
            found.clear()
            found.update(self.by_state())
            whole = set(found) == {"active", "standby"} and not any(engine["note"] for engine in found.values())
            return whole and found["active"]["name"] in (active or found["active"]["name"],)

        until(is_whole, f"an active {active} and a standby")
        return found

    def pids_of(self, *names: str) -> dict[str, int]:
        """By name, as they wrote themselves down; `up` does not wait for control to do so."""
        until(lambda: all(self.record(name).get("pid") for name in names), f"records of {names}")
        return {name: self.record(name)["pid"] for name in names}

    def lose_supervisor(self) -> None:
        """SIGKILL, and until it is gone."""
        os.kill(pid := self.lock()["pid"], signal.SIGKILL)
        until(lambda: pid not in self.pids(), "the supervisor to be gone")

    def must_be_gone(self) -> None:
        until(lambda: not self.pids(), "every process to be gone")

    def lock(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.state_dir / "up.lock").read_bytes())  # type: ignore[no-any-return]
        return {}

    def back(self, name: str, before: int) -> bool:
        """Whether another process than `before` is ready under this name."""
        record = self.record(name)
        return record.get("state") == "ready" and record["pid"] != before

    def chat(self, max_tokens: int = 20) -> Answer:
        return self.stream(max_tokens=max_tokens, model=self.model).answer()

    def answering(self, max_tokens: int) -> Stream:
        """A streamed answer whose first words are here: whatever is done next is done in the middle of it."""
        return self.stream(max_tokens=max_tokens, model=self.model).wait_tokens()


class Asker:
    """Asks without a key until it is stopped, on a new connection each time, and keeps the statuses."""

    def __init__(self, rig: UpRig) -> None:
        self._rig = rig
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self.statuses: set[int] = set()

    def _ask(self) -> None:
        while not self._over.wait(0.05):
            try:
                self.statuses.add(self._rig.get("/v1/models")[0])
            except OSError:
                self.statuses.add(0)

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60.0)
