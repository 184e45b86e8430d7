"""The deployments that are given alarms: pairs under a supervisor, plain workers on GPUs that a pipe tells of, a fleet,
and a manifest. All of real processes with the sim engine.

Always true: a site that has begun has a control that leads, and was asked known questions often enough to be judged.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

from bench.harm.watch import TPOT_MS
from bench.rollouts.shapes import Shape
from holdfast.testing.deployment import Deployment
from holdfast.testing.processes import vault_processes
from holdfast.testing.rig import DeploymentRig, fetch, get_json
from holdfast.testing.supervised import Supervised
from tests.rigs.fleet.fleet_rig import FIRST, FleetRig

# The interval decides how soon a wrong answer is found, and nothing else; every threshold is the default.
JUDGING: dict[str, Any] = {"canary_interval_s": 2.0, "canary_share": 1.0}
PACE = {"ttft_ms": 20.0, "tpot_ms": float(TPOT_MS)}
KNOWN = 5  # canaries that each worker has passed when the site has begun: four are learnt, and one is compared
START_S = 120.0
SIM = "holdfast-sim"
KEEPER, VAULT = "keeper", "vault"


class Site(Protocol):
    """The deployment that a cell runs on."""

    port: int
    served: str

    def verdicts(self) -> list[str]:
        """Return what control holds against workers now, each with its reason."""

    def logs(self, characters: int = 3000) -> str: ...


def verdicts_of(page: dict[str, Any]) -> list[str]:
    found = [one for one in page.get("verdicts", []) if one["status"] != "HEALTHY" or one["breaker"] != "closed"]
    told = [f"{one['name']} {one['status']} {one['weight']:g}, breaker {one['breaker']}" for one in found]
    told = [f"{text}: {one['reason']}"[:200] for text, one in zip(told, found, strict=True)]
    level = page.get("level", {})
    return told + ([f"level {level['level']}: {level['reason']}"] if level.get("level") else [])


class _Judged(DeploymentRig):
    """One whose control is asked by its own page."""

    served = SIM

    def page(self, path: str = "/health") -> dict[str, Any]:
        status = self.record("control").get("status", "")
        return get_json(status, path) if status else {}

    def verdicts(self) -> list[str]:
        return verdicts_of(self.page())

    def is_known(self, workers: int) -> bool:
        """Return True if so many workers have passed enough canaries and none is doubted."""
        status = self.record("control").get("status", "")
        with contextlib.suppress(OSError):
            text = fetch(status, "/metrics")[1].decode() if status else ""
            mark = 'holdfast_health_checks_total{check_type="canary",result="passed",worker_id="'
            passed = re.findall(rf'^{re.escape(mark)}[^"]+"}} (\S+)$', text, re.M)
            doubted = [one for one in self.page().get("verdicts", []) if one["status"] != "HEALTHY"]
            return sum(float(count) >= KNOWN for count in passed) >= workers and not doubted
        return False


class Pairs(_Judged, Supervised):
    """Runs workers of an active engine and a standby each, under a supervisor."""

    def __init__(self, workers: int, *more: str, levels: dict[str, Any] | None = None) -> None:
        pace = ("--sim-ttft-ms", f"{PACE['ttft_ms']:g}", "--sim-tpot-ms", f"{PACE['tpot_ms']:g}")
        options = ("--workers", str(workers), "--controls", "0", "--status-port", "0", *pace, *more)
        super().__init__(*options, start_s=START_S)
        self._levels = levels

    def begin(self) -> None:
        super().begin()
        self.start_control(self._levels, **JUDGING)
        self.wait_until(lambda: self.is_known(self.workers), "every worker's first canaries", START_S)

    def names(self, state: str, *numbers: int) -> list[str]:
        """Engines in this state, of these workers or of all."""
        groups = {f"worker-{number}" for number in numbers or range(1, self.workers + 1)}
        return [one.name for one in self.engines() if one.state == state and one.facts["group"] in groups]

    def order(self, names: list[str], kind: str, **values: Any) -> None:
        """A fault of each of these engines; one that is over by now does not answer."""
        for name in names:
            with contextlib.suppress(OSError):
                self.chaos(name, kind, **values)

    def clear(self) -> None:
        self.order([engine.name for engine in self.engines()], "clear")

    def signal(self, number: signal.Signals, state: str, *numbers: int) -> set[int]:
        """To the engines in this state; their pids."""
        names = self.names(state, *numbers)
        pids = {engine.pid for engine in self.engines() if engine.name in names}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
        return pids


class OnGpus(_Judged, Deployment):
    """Plain workers, each on a GPU of its own, and a kernel's log that is a pipe."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, dict(PACE))
        self._pipe = self.folder / "kmsg"
        os.mkfifo(self._pipe)
        self._log = os.open(self._pipe, os.O_RDWR | os.O_NONBLOCK)
        self._lines = 0
        self._control_settings = {"health": JUDGING | {"kernel_log": str(self._pipe), "nvml": ""}}

    def begin(self) -> None:
        super().begin()
        self.wait_until(lambda: self.is_known(len(self.worker_names)), "every worker's first canaries", START_S)

    def close(self) -> None:
        os.close(self._log)
        super().close()

    def start_worker(self, name: str, **other: Any) -> None:
        gpu = self._gpu(name)
        super().start_worker(name, gpus=[(gpu, f"GPU-of-{gpu}")], **other)

    def _gpu(self, name: str) -> str:
        return f"0000:{0x3B + self.worker_names.index(name):02x}:00"

    def xid(self, number: int, *names: str) -> None:
        for name in names or self.worker_names:
            self._lines += 1
            text = f"NVRM: Xid (PCI:{self._gpu(name)}): {number}, GPU has fallen off the bus."
            os.write(self._log, f"6,{self._lines},{self._lines}000,-;{text}\n".encode())


class Fleet(FleetRig):
    """Runs a fleet of one node, with replicas of one model."""

    served = "ant"

    def __init__(self, replicas: int) -> None:
        super().__init__(devices=2, gib=0.4)
        self.replicas = replicas

    def begin(self) -> None:
        super().begin()
        pace = ("--sim-ttft-ms", f"{PACE['ttft_ms']:g}", "--sim-tpot-ms", f"{PACE['tpot_ms']:g}")
        words = ("--engine", "sim", "--vault-gib", "0.18", *pace, "--memory-gib", "0.2")
        count = str(self.replicas)
        self.told(
            "deploy", self.served, *words, "--max", "2", "--wanted", count, "--wait", "--timeout", f"{START_S:g}s"
        )

    def verdicts(self) -> list[str]:
        record = next((one for one in self.records().values() if one["role"] == "control"), {})
        return verdicts_of(get_json(record["status"], "/health")) if record.get("status") else []

    def pause_agent(self, seconds: float) -> None:
        """The node tells nothing for so long, and its replicas serve on."""
        pid = self.agent_pid(FIRST)
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    def kill_replica(self) -> None:
        """Kill the engines and the vault of one replica."""
        socket = self.vault_sockets(FIRST)[0]
        device = socket.rpartition("gms_")[2].removesuffix(".sock")
        engines = [one["pid"] for one in self.processes_of(FIRST).values() if one["role"] == "worker"]
        marks = {pid: (self.folder / "run").joinpath(f"{name}.launch") for name, pid in self.engine_pids().items()}
        own = [pid for pid in engines if pid in marks and device in _text(marks[pid])]
        for pid in [*(own or engines), *vault_processes(socket)]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _text(path: Any) -> str:
    try:
        return str(path.read_text())
    except OSError:
        return ""


class Rolled(DeploymentRig):
    """A manifest's deployment, which changes."""

    served = SIM

    def __init__(self, workers: int) -> None:
        super().__init__()
        self._shape = Shape(workers=workers)

    def begin(self) -> None:
        self._told("up", "-f", self._file(self._shape), "--detach", "--port", str(self.port))

    def verdicts(self) -> list[str]:
        record = next((one for one in self.records().values() if one["role"] == "control"), {})
        return verdicts_of(get_json(record["status"], "/health")) if record.get("status") else []

    def update(self, *args: str) -> str:
        """Apply another set of workers, with these arguments, and return what became of it."""
        shape = Shape(workers=self._shape.workers, image="holdfast:1.1", args=args)
        said = self.run("apply", "-f", self._file(shape), "--wait", "--timeout", "90s")
        return f"status {said.returncode}: {(said.stdout + said.stderr)[-300:]}"

    def _file(self, shape: Shape) -> str:
        path = self.folder / f"{shape.image.replace(':', '-')}.json"
        path.write_text(shape.manifest())
        return str(path)

    def _told(self, *words: str) -> None:
        said = self.run(*words)
        assert said.returncode == 0, said


Begin = Callable[[], Any]
