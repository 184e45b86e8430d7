"""A Ray cluster of three nodes on this machine, by Ray's own cluster utilities, and a fleet on it by its commands."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.testing.answers import Answer
from holdfast.testing.clients import Stream
from holdfast.testing.processes import kill_together
from tests.rigs.fleet.fleet_rig import FleetRig

BOUND_S = 180.0  # on a loaded machine: an actor's process alone took 6 s there
DEVICES = 2  # of each node
GIB = 0.5  # of each device
STREAMS, TOKENS = 6, 400  # 8 s each: a stopped actor is killed in the middle of them
SIM = ("--engine", "sim", "--vault-gib", "0.1", "--sim-ttft-ms", "5", "--sim-tpot-ms", "20", "--memory-gib", "0.2")


class RayRig(FleetRig):
    """`cluster`: a `ray.cluster_utils.Cluster` whose nodes all have devices; `host_gib`: what each has for WARM."""

    def __init__(self, cluster: Any, host_gib: float = 0.0) -> None:
        super().__init__()
        self.cluster = cluster
        self.host_gib = host_gib

    def begin(self) -> None:
        self.up()
        self.wait_until(lambda: len(self.nodes()) == len(self.cluster.list_all_nodes()), "an agent on each", BOUND_S)

    def close(self) -> None:
        """With what it has on the cluster, which is the next one's too."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.run("down")
        super().close()

    def up(self) -> None:
        self.told(*self.up_words(), "--detach")

    def up_words(self) -> tuple[str, ...]:
        ports = ("--port", str(self.port), "--status-port", "0")
        has = ("--node-gib", str(GIB), "--node-host-gib", str(self.host_gib))
        return ("up", "--backend", "ray", "--address", self.cluster.address, *has, *ports)

    # -- looking

    def nodes(self) -> dict[str, dict[str, Any]]:
        """None, before the first agent has said anything."""
        said = self.run("nodes", "--json")
        return {one["name"]: one for one in json.loads(said.stdout)} if said.returncode == 0 else {}

    def folder_of(self, node: str) -> Path:
        return self.folder / "ray" / node

    def ready(self, key: str) -> dict[str, str]:
        """The node of each replica that serves, by its name."""
        return {one["name"]: one["node"] for one in self.model(key)["replicas"] if one["phase"] == "ready"}

    def record_of(self, replica: str) -> dict[str, Any]:
        """What a replica's actor wrote down of itself."""
        (path,) = (self.folder / "ray").glob(f"*/run/{replica.replace(':', '-')}.json")
        return json.loads(path.read_bytes())  # type: ignore[no-any-return]

    def actor_pids(self) -> dict[str, int]:
        """Of every process that writes itself down on the cluster's nodes: actors, vaults, engines; not agents."""
        found = {}
        for path in (self.folder / "ray").glob("*/run/*.json"):
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(path.read_bytes())
                found[record["name"]] = record["pid"]
        found.pop("agent", None)
        return found

    def listed(self, what: str, state: str) -> dict[str, Any]:
        """Actors or placement groups that Ray has in this state, by name."""
        said = json.loads(self.ray("list", what, "--format", "json", "--detail", "--limit", "1000"))
        return {one["name"]: one for one in said if one["state"] == state}

    def ray_node(self, name: str) -> Any:
        return next(node for node in self.cluster.list_all_nodes() if node.node_id.startswith(name))

    def ray(self, *words: str) -> str:
        """What a command of Ray's says."""
        command = [str(Path(sys.executable).parent / "ray"), *words, "--address", self.cluster.address]
        said = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=BOUND_S, check=False)
        assert said.returncode == 0, said
        return said.stdout

    # -- breaking

    def kill_actor(self, replica: str) -> None:
        os.kill(self.record_of(replica)["pid"], signal.SIGKILL)

    def stop_actor(self, replica: str) -> int:
        pid: int = self.record_of(replica)["pid"]
        os.kill(pid, signal.SIGSTOP)
        return pid

    def raylet_of(self, node: str) -> int:
        from ray._private.ray_constants import PROCESS_TYPE_RAYLET

        pid: int = self.ray_node(node).all_processes[PROCESS_TYPE_RAYLET][0].process.pid
        return pid

    def kill_raylet(self, node: str) -> None:
        os.kill(self.raylet_of(node), signal.SIGKILL)

    def kill_node(self, node: str) -> None:
        """Kill the raylet and all of its node at one stroke."""
        raylet = self.raylet_of(node)
        kill_together(pid for pid in _all() if pid == raylet or raylet in _ancestors(pid))

    def mend(self, node: str) -> None:
        """Another in the place of a node that was broken."""
        self.cluster.remove_node(self.ray_node(node), allow_graceful=False)
        add_node(self.cluster)

    # -- asking

    def streams(self, model: str = "chat") -> list[Stream]:
        more = {"model": model, "return_token_ids": True}
        return [self.stream(f"story {number}", TOKENS, seed=number, **more) for number in range(STREAMS)]

    def returned(self, key: str, count: int, without: str, since_s: float) -> float:
        """Seconds until so many serve again, and the one that was broken is not among them."""

        def back() -> bool:
            there = self.ready(key)
            return len(there) == count and without not in there and without not in there.values()

        self.wait_until(back, f"{count} replicas of {key} without {without}", BOUND_S)
        return time.monotonic() - since_s


@contextlib.contextmanager
def made_cluster(nodes: int, **settings: str) -> Iterator[Any]:
    """Make one with Ray's own utilities; `settings`: of Ray, for it and for all nodes that join."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed here; `make test-ray` installs it into .venv-ray")
    # They start slowly on a loaded machine.
    patched = {"RAY_agent_register_timeout_ms": "300000", **{f"RAY_{name}": value for name, value in settings.items()}}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patched.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "resources": {"holdfast_device": DEVICES}, "object_store_memory": 80 * 2**20}
        made = Cluster(initialize_head=True, head_node_args=head | {"include_dashboard": True, "dashboard_port": 0})
        try:
            for _ in range(nodes - 1):
                add_node(made)
            made.wait_for_nodes(BOUND_S)
            yield made
        finally:
            made.shutdown()


def answers(streams: list[Stream]) -> list[Answer]:
    return [one.answer(BOUND_S) for one in streams]


def note(fault: str, figures: dict[str, float]) -> None:
    """What it cost, into `$HOLDFAST_RAY_FIGURES`, if that is a file's name."""
    print(fault, figures)
    if path := os.environ.get("HOLDFAST_RAY_FIGURES"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"fault": fault, **{key: round(value, 2) for key, value in figures.items()}}) + "\n")


def add_node(cluster: Any) -> None:
    cluster.add_node(num_cpus=1, resources={"holdfast_device": DEVICES}, object_store_memory=80 * 2**20)


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            break
        found.append(pid)
    return found
