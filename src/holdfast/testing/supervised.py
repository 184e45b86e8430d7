"""A deployment as a person starts it, `holdfast up`, in a folder of its own: vault, engines, frontend, supervisor.

For benchmarks and tests that kill engines and expect redundancy to come back by itself. Always true: leaving the `with`
block ends everything; waits are bounded and say what they waited for; engines are told apart by what they say of
themselves, never by their names.
"""

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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.engines.sim import send_fault
from holdfast.failover.journal import Term, read_terms
from holdfast.testing.deployment import free_port

START_S = 60.0
RESTORE_S = 30.0
END_S = 20.0


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """One engine process, as its own status page tells."""

    name: str
    pid: int
    state: str
    facts: dict[str, Any]


class Supervised:
    """`holdfast up` with these options; the sim engine unless they name one. Use it as a context manager."""

    def __init__(
        self,
        *options: str,
        group: str = "worker-1",
        environ: dict[str, str] | None = None,
        start_s: float = START_S,
        folder: Path | None = None,
        descriptors: int = 0,
    ) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
        self._own_folder = folder is None
        self._descriptors = descriptors  # that each process may have open; 0: as many as this one
        self.port = free_port()
        self._group = group
        self._start_s = start_s
        engine = () if "--engine" in options else ("--engine", "sim", "--allow-chaos")
        self._options = ("--port", str(self.port), *engine, *options)
        self._environ = os.environ | {"HOLDFAST_STATE_DIR": str(self.folder)} | (environ or {})
        self._environ.pop("GMS_SOCKET_DIR", None)
        self._up: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Supervised:
        command = [sys.executable, "-m", "holdfast", "up", *self._options]
        if self._descriptors:
            command = ["prlimit", f"--nofile={self._descriptors}:{self._descriptors}", *command]
        with open(self.folder / "up.out", "ab") as log:
            self._up = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ, start_new_session=True
            )
        try:
            self.wait_until(self.restored, "one active and one standby engine", self._start_s)
            self.wait_until(lambda: self.health().get("status") == "ready", "the frontend to find the active one")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        up = self._up
        if up is not None and up.poll() is None:
            up.send_signal(signal.SIGINT)
            try:
                up.wait(END_S)
            except subprocess.TimeoutExpired:
                up.kill()
                up.wait(END_S)
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- who is there

    @property
    def supervisor_pid(self) -> int:
        assert self._up is not None
        return self._up.pid

    def records(self) -> dict[str, dict[str, Any]]:
        """What every process wrote down about itself, by name."""
        found = {}
        for path in sorted((self.folder / "run").glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                found[path.stem] = json.loads(path.read_bytes())
        return found

    def engines(self) -> list[EngineSeen]:
        """Every engine that answers."""
        seen = []
        for name, record in self.records().items():
            if record["role"] == "worker" and record.get("status"):
                facts = get_json(record["status"], "/health")
                if facts:
                    seen.append(EngineSeen(name, record["pid"], facts["state"], facts))
        return seen

    def engine(self, state: str) -> EngineSeen | None:
        return next((engine for engine in self.engines() if engine.state == state), None)

    def active(self) -> EngineSeen:
        found = self.engine("active")
        assert found is not None, "no engine is active"
        return found

    def restored(self) -> bool:
        """One is active, another stands by and is ready."""
        engines = self.engines()
        ready = [engine for engine in engines if engine.state == "standby" and engine.facts["ready"]]
        return bool(ready) and sum(engine.state == "active" for engine in engines) == 1

    def vault_pids(self) -> tuple[int, int]:
        """The vault's and its keeper's pid."""
        launcher = next(r["pid"] for r in self.records().values() if r["role"] == "vault")
        family = {pid: words for pid, words in children_of(launcher).items() if "holdfast.memory" in words}
        vault = next(pid for pid, words in family.items() if "holdfast.memory.vault.server" in words.split(" -- ")[0])
        keeper = next(pid for pid, words in family.items() if "holdfast.memory.vault.keeper" in words.split(" -- ")[0])
        return vault, keeper

    def terms(self) -> list[Term]:
        return read_terms(self.folder / "run" / "journals" / self._group)

    def processes(self) -> dict[str, int]:
        """Those that live through every failover, by name, with their pids."""
        vault, keeper = self.vault_pids()
        kept = {name: record["pid"] for name, record in self.records().items() if record["role"] != "worker"}
        return kept | {"supervisor": self.supervisor_pid, "vault-process": vault, "keeper": keeper}

    # -- acts

    def chaos(self, name: str, fault: str, **values: Any) -> None:
        answer = send_fault(str(self.folder / "run" / f"{name}.chaos"), {"fault": fault, **values})
        assert answer["ok"], answer

    def wait_restored(self, but_not: int, timeout_s: float = RESTORE_S) -> float:
        """Until an engine other than the process `but_not` leads and another stands by; seconds it took."""

        def met() -> bool:
            leading = self.engine("active")
            return leading is not None and leading.pid != but_not and self.restored()

        return self.wait_until(met, "a new leader and a new standby", timeout_s)

    def wait_until(self, true: Callable[[], bool], what: str, timeout_s: float = RESTORE_S) -> float:
        began_s = time.monotonic()
        while not true():
            assert self._up is not None
            ended = self._up.poll() is not None
            if ended or time.monotonic() - began_s > timeout_s:
                why = "`holdfast up` ended" if ended else f"waited {timeout_s:g} s"
                raise TimeoutError(f"{why}: no {what}\n{self.logs()}")
            time.sleep(0.05)
        return time.monotonic() - began_s

    def logs(self) -> str:
        paths = [self.folder / "up.out", *sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def health(self) -> dict[str, Any]:
        return get_json(f"tcp://127.0.0.1:{self.port}", "/health")

    def tokens_total(self) -> int:
        """Tokens made by the engines that live now."""
        return sum(engine.facts["tokens_total"] for engine in self.engines())


def get_json(address: str, path: str) -> dict[str, Any]:
    """The answer, whatever its status; {} if there is none."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())  # type: ignore[no-any-return]
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    finally:
        connection.close()


def children_of(pid: int) -> dict[int, str]:
    """All descendants and their command lines, as /proc shows them now."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    found: dict[int, str] = {}
    grown = {pid}
    while grown:
        grown = {child for child, parent in parents.items() if parent in grown and child not in found}
        for child in grown:
            with contextlib.suppress(OSError):
                found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def kill_group(pid: int) -> None:
    """SIGKILL to an engine and all its processes: each engine leads a group of its own."""
    assert os.getpgid(pid) == pid, "an engine leads its process group"
    os.killpg(pid, signal.SIGKILL)


async def in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and max."""
    ordered = sorted(values)
    at = {"p50": len(ordered) // 2, "p99": min(len(ordered) - 1, len(ordered) * 99 // 100), "max": len(ordered) - 1}
    return {name: round(ordered[place], 1) for name, place in at.items()} if ordered else dict.fromkeys(at, 0.0)
