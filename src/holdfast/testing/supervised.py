"""Runs a deployment as a user starts it, with `holdfast up`: vault, engines, frontend and supervisor.

For tests and benchmarks that kill engines and expect the supervisor to restore redundancy. Always true: leaving the
`with` block ends every process; waits are bounded, and their errors say what was waited for.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.failover.journal import Term, read_terms
from holdfast.testing.processes import KEEPER, VAULT, vault_processes
from holdfast.testing.rig import WAIT_S, DeploymentRig, EngineSeen
from holdfast.testing.waiting import wait_until

START_S = 60.0
END_S = 20.0
LOOK_EVERY_S = 0.05  # each look requests every engine's status page
UP = "up"


class Supervised(DeploymentRig):
    """A `holdfast up` with these options, by default with the sim engine. Use it as a context manager."""

    def __init__(
        self,
        *options: str,
        group: str = "worker-1",
        environ: dict[str, str] | None = None,
        start_s: float = START_S,
        folder: Path | None = None,
        descriptors: int = 0,
    ) -> None:
        super().__init__(folder, environ)
        self._descriptors = descriptors  # file descriptors allowed per process; 0: this process's limit
        self._group = group
        self._start_s = start_s
        self.workers = int(options[options.index("--workers") + 1]) if "--workers" in options else 1
        engine = () if "--engine" in options else ("--engine", "sim", "--allow-chaos")
        self._options = ("--port", str(self.port), *engine, *options)

    def begin(self) -> None:
        limit = f"--nofile={self._descriptors}:{self._descriptors}"
        limited = ("prlimit", limit) if self._descriptors else ()
        self.start(UP, [*limited, *self.command("up", *self._options)])
        self.wait_until(self.restored, "one active and one standby engine", self._start_s)
        self.wait_until(lambda: self.health().get("status") == "ready", "the frontend to find the active one")

    def close(self) -> None:
        """Send Ctrl-C, then SIGKILL if it takes too long. Processes that outlive this are not killed, so that tests see
        them."""
        for name, process in self.processes.items():
            if name != UP:  # a process started beside `up`
                process.kill()
                process.wait(END_S)
        up = self.processes[UP]
        if up.poll() is None:
            up.send_signal(signal.SIGINT)
            try:
                up.wait(END_S)
            except subprocess.TimeoutExpired:
                up.kill()
                up.wait(END_S)
        self._remove()

    def start_control(self, levels: dict[str, Any] | None = None, **health: Any) -> None:
        """Start a control for a deployment without one (`--controls 0`), with settings that `up` does not have."""
        settings = {"store": f"unix://{self.folder}/run/store.sock", "deployment": "local", "health": health}
        self.start_role("control", "control", settings | ({"levels": levels} if levels else {}))

    # -- what runs

    @property
    def supervisor_pid(self) -> int:
        return self.processes[UP].pid

    def engine(self, state: str) -> EngineSeen | None:
        return next((engine for engine in self.engines() if engine.state == state), None)

    def active(self) -> EngineSeen:
        found = self.engine("active")
        assert found is not None, "no engine is active"
        return found

    def restored(self) -> bool:
        """Return True if each worker has an active engine and a ready standby."""
        engines = self.engines()
        active = [engine.facts["group"] for engine in engines if engine.state == "active"]
        ready = {engine.facts["group"] for engine in engines if engine.state == "standby" and engine.facts["ready"]}
        return len(active) == self.workers and ready == set(active)

    def vault_pids(self) -> tuple[int, int]:
        found = {role: pid for pid, role in vault_processes(f"{self.folder}/").items()}
        return found[VAULT], found[KEEPER]

    def terms(self) -> list[Term]:
        return read_terms(self.folder / "run" / "journals" / self._group)

    def lasting(self) -> dict[str, int]:
        """Return the pids of the processes that survive every failover, by name."""
        vault, keeper = self.vault_pids()
        kept = {name: record["pid"] for name, record in self.records().items() if record["role"] != "worker"}
        return kept | {"supervisor": self.supervisor_pid, f"{VAULT}-process": vault, KEEPER: keeper}

    # -- waits

    def wait_restored(self, but_not: int, bound_s: float = WAIT_S) -> float:
        """Wait until an engine other than process `but_not` is active and another is its standby; return the
        seconds."""

        def met() -> bool:
            leading = self.engine("active")
            return leading is not None and leading.pid != but_not and self.restored()

        return self.wait_until(met, "a new leader and a new standby", bound_s)

    def wait_until(self, true: Callable[[], Any], what: str, bound_s: float = WAIT_S) -> float:
        """Wait as `DeploymentRig` does; fail at once if `holdfast up` has ended."""

        def ended() -> str:
            return "" if self.processes[UP].poll() is None else "`holdfast up` ended"

        return wait_until(true, what, bound_s, every_s=LOOK_EVERY_S, ended=ended, logs=self.logs)
