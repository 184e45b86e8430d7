"""Isolates one deployment: its own state directory, port and environment, and all processes that run there.

Always true: `close` ends every process with this state directory, whatever started it, and removes its own folder.
Engines are identified by what their status pages report, never by their names.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from holdfast.engines.sim.chaos_server import send_fault
from holdfast.testing.clients import Stream, chat_body
from holdfast.testing.processes import kill_all, processes_in, state_of
from holdfast.testing.waiting import wait_until

COMMAND_S = 100.0  # for a `holdfast` command on a loaded machine
WAIT_S = 60.0  # for what a deployment does by itself, on a loaded machine
END_S = 60.0
# Variables for the caller's own deployments are not passed on, except for the cache of fetched models.
UNWANTED = ("HOLDFAST_", "DYN_", "GMS_", "ENGINE_ID", "FAILOVER_")
WANTED = ("HOLDFAST_CACHE_DIR",)
FIRST_PORT, PORTS = 20_000, 12_000
_ports = itertools.count()
_claims: list[socket.socket] = []  # one per port that `free_port` returned; held until this process ends


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """One engine process, as its status page reports it."""

    name: str
    pid: int
    state: str
    facts: dict[str, Any]


class DeploymentRig:
    """The state directory, port and environment of one deployment. A given `folder` is not removed."""

    def __init__(self, folder: Path | None = None, environ: Mapping[str, str] | None = None) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
        self._own_folder = folder is None
        self.port = free_port()
        kept = {name: value for name, value in os.environ.items() if name in WANTED or not name.startswith(UNWANTED)}
        self.env = kept | {"HOLDFAST_STATE_DIR": str(self.folder), **(environ or {})}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}  # started here, by name

    def __enter__(self) -> Self:
        try:
            self.begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Start the deployment and wait until it serves."""

    # -- commands and processes

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "holdfast", *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), env=self.env, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )

    def start(
        self, name: str, command: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command in the background, in its own session; its output goes to NAME.log."""
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env | dict(environ or {}),
                start_new_session=True,
            )
        return self.processes[name]

    def start_role(self, role: str, name: str, settings: dict[str, Any]) -> None:
        """Start one `holdfast` process with its launch settings."""
        # The kernel ends such a child when the *thread* that started it ends, so only the main thread may request this.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        launch = {"state_dir": str(self.folder), "name": name, "parent": parent, **settings}
        self.start(name, [sys.executable, "-m", "holdfast.roles", role, json.dumps(launch)])

    def pids(self) -> set[int]:
        """Return the pids of all processes of this deployment, whatever started them."""
        return set(processes_in(self.folder))

    def close(self) -> None:
        def left() -> set[int]:
            for process in self.processes.values():
                process.poll()
            return self.pids()

        kill_all(left)
        for process in self.processes.values():
            process.wait(END_S)
        self._remove()

    def _remove(self) -> None:
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def chaos(self, name: str, fault: str, **values: Any) -> dict[str, Any]:
        """Inject a fault into the sim engine; fail if it is refused."""
        answer = send_fault(str(self.folder / "run" / f"{name}.chaos"), {"fault": fault, **values})
        assert answer["ok"], answer
        return answer

    # -- observing

    def records(self) -> dict[str, dict[str, Any]]:
        found = {path.stem: self.record(path.stem) for path in sorted((self.folder / "run").glob("*.json"))}
        return {name: record for name, record in found.items() if record}

    def record(self, name: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "run" / f"{name}.json").read_bytes())  # type: ignore[no-any-return]
        return {}

    def engines(self) -> list[EngineSeen]:
        """Return every running engine whose status page answers. A record outlives its process, whose port another
        deployment's engine may have by now."""
        seen = []
        for name, record in self.records().items():
            if record["role"] == "worker" and record.get("status") and state_of(record["pid"]) not in ("", "Z", "X"):
                facts = get_json(record["status"], "/health")
                if facts:
                    seen.append(EngineSeen(name, record["pid"], facts["state"], facts))
        return seen

    def tokens_total(self) -> int:
        return sum(engine.facts["tokens_total"] for engine in self.engines())

    def get(self, path: str, port: int = 0) -> tuple[int, bytes]:
        return fetch(f"127.0.0.1:{port or self.port}", path, timeout_s=WAIT_S)

    def health(self, port: int = 0) -> dict[str, Any]:
        """Return the frontend's /health; {} if it does not answer."""
        return get_json(f"127.0.0.1:{port or self.port}", "/health", timeout_s=20.0)

    def stream(self, words: str = "hello", max_tokens: int = 20, **more: Any) -> Stream:
        """Request a chat answer of exactly `max_tokens` tokens."""
        return Stream(self.port, chat_body(words, max_tokens, **more))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self, characters: int = 3000) -> str:
        """Return the ends of all logs."""
        paths = [*sorted(self.folder.glob("*.log")), *sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-characters:]}" for path in paths)

    def wait_until(self, true: Callable[[], Any], what: str, bound_s: float = WAIT_S) -> float:
        """Wait until `true` holds and return the seconds it took; the error of a timeout contains the logs."""
        return wait_until(true, what, bound_s, logs=self.logs)


def fetch(
    address: str, path: str, method: str = "GET", *, timeout_s: float = WAIT_S, body: Any = None, **headers: str
) -> tuple[int, bytes]:
    """Return status and body of the response; a `body` is sent as JSON."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=timeout_s)) as connection:
        if body is not None:
            headers["content-type"] = "application/json"
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()


def get_json(address: str, path: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """Return the response's JSON, whatever its status; {} if there is none."""
    try:
        return json.loads(fetch(address, path, timeout_s=timeout_s)[1])  # type: ignore[no-any-return]
    except (OSError, ValueError, http.client.HTTPException):
        return {}


def free_port() -> int:
    """Return a free port that no other call on this machine has returned, so that it may be used later. It is below the
    ephemeral ports, so that no outgoing connection takes it meanwhile."""
    for tried in range(PORTS):
        port = FIRST_PORT + (os.getpid() * 97 + next(_ports) + tried) % PORTS
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with socket.socket() as sock, contextlib.suppress(OSError):
            claim.bind(f"\0holdfast-port-{port}")  # one process can bind this name; the kernel frees it at its end
            sock.bind(("127.0.0.1", port))
            _claims.append(claim)
            return port
        claim.close()
    raise OSError(f"none of the ports from {FIRST_PORT} to {FIRST_PORT + PORTS} is free")
