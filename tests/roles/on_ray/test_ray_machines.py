"""A Ray cluster of two machines (network namespaces joined by a cable), with a fleet on both."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.testing.waiting import wait_until
from tests.rigs.two_machines import ASK, Machines, two_machines

pytestmark = [pytest.mark.processes, pytest.mark.alone]

START_S = 180.0
RAY = ("-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1", "--object-store-memory", "80000000")
DEVICES = ("--resources", '{"holdfast_device": 1}', "--disable-usage-stats")
TEXT = ("/v1/completions", "300")


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed here; `make test-ray` installs it into .venv-ray")
    monkeypatch.setenv("RAY_agent_register_timeout_ms", "300000")  # they start slowly on a loaded machine
    with two_machines() as made:
        yield made


def join(machines: Machines, machine: str, *words: str) -> None:
    machines.start(machine, *RAY, *DEVICES, "--node-ip-address", machines.hosts[machine], *words)


def test_frontends_reach_replicas_of_the_other_machine_and_outlive_its_loss(machines: Machines) -> None:
    """With a store that both reach, engines listen at their Ray node's own address. With the cable cut in mid-answer
    every answer is the one that it would have been."""
    near = machines.hosts["near"]
    head, store = f"{near}:6379", ("--store", f"tcp://{near}:7000")
    join(machines, "near", "--head", "--port", "6379", "--include-dashboard", "false")
    machines.start("near", "-m", "holdfast", "store", "--address", "tcp://0.0.0.0:7000")

    def told(*words: str) -> str:
        state = {**os.environ, "HOLDFAST_STATE_DIR": str(machines.folder / "near")}
        command = ["ip", "netns", "exec", machines.spaces["near"], sys.executable, "-m", "holdfast", *words, *store]
        done = subprocess.run(command, env=state, capture_output=True, text=True, timeout=START_S, check=False)
        return done.stdout if done.returncode == 0 else ""

    def listening() -> set[str]:
        """Hosts at which engines that serve do."""
        found = json.loads(told("models", "chat", "--json") or "{}").get("replicas", [])
        nodes = [one["node"] for one in found if one["phase"] == "ready"]
        records = [path for node in nodes for path in (machines.folder / "near/ray" / node / "run").glob("*.json")]
        return {host for path in records if (host := host_of(path))}

    def up() -> bool:
        return bool(told("up", "--backend", "ray", "--address", head, "--node-gib", "0.3", "--detach"))

    wait_until(up, "a fleet on the head", START_S)
    join(machines, "far", "--address", head)
    wait_until(lambda: told("nodes", "--json").count('"alive": true') == 2, "both nodes", START_S)
    engine = ("--engine", "sim", "--vault-gib", "0.1", "--sim-tpot-ms", "10", "--served-name", "holdfast-sim")
    told("deploy", "chat", *engine, "--memory-gib", "0.2", "--wanted", "2", "--max", "2", "--per-node", "1")
    wait_until(lambda: listening() == set(machines.hosts.values()), "a replica on each", START_S)
    whole = text_of(machines.get("near", 8000, *TEXT)[1])
    ask = ("-c", ASK, "127.0.0.1", "8000", *TEXT)
    clients = [machines.start("near", *ask, stdin=subprocess.PIPE) for _ in range(4)]
    running = ("near", 8000, "/v1/requests")
    wait_until(lambda: machines.get(*running)[1].count('"RUNNING"') == 4, "all to run", START_S)
    machines.cut_cable()
    for client in clients:
        assert client.stdout is not None
        status, _, body = client.stdout.readline().partition(" ")
        assert (status, text_of(ast.literal_eval(body))) == ("200", whole)
    wait_until(lambda: listening() == {near}, "the machine to be missed", START_S)
    assert text_of(machines.get("near", 8000, *TEXT)[1]) == whole


def host_of(path: Path) -> str:
    """Where an engine listens, by its record; "": it is none, or on a socket of its machine."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return ""
    is_engine = record["role"] == "worker" and record["address"].startswith("tcp://")
    return str(record["address"]).removeprefix("tcp://").rpartition(":")[0] if is_engine else ""


def text_of(body: str) -> str:
    found: str = json.loads(body)["choices"][0]["text"]
    return found
