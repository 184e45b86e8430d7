"""Workers and frontends on two machines (network namespaces joined by a cable that can be cut). Real processes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.testing.waiting import wait_until
from tests.rigs.two_machines import ASK, ENDLESS, Machines, two_machines

START_S = 90.0


@pytest.fixture
def machines() -> Iterator[Machines]:
    with two_machines() as made:
        yield made


@pytest.mark.long
def test_a_worker_serves_a_frontend_on_another_machine_and_notices_that_it_is_gone(machines: Machines) -> None:
    """The frontend finds it by the address it advertises and is served; when the frontend's machine is cut off in
    mid-answer, the worker stops making tokens for it within the half minute that its connection's probes take."""
    store = f"tcp://{machines.hosts['near']}:7000"
    holdfast = ("-m", "holdfast")
    machines.start("near", *holdfast, "store", "--address", "tcp://0.0.0.0:7000")
    reached = ("--address", "tcp://0.0.0.0:0", "--advertise", machines.hosts["near"])
    status = ("--status-address", "tcp://0.0.0.0:9090")
    machines.start("near", *holdfast, "worker", "--store", store, *reached, *status)
    machines.start("far", *holdfast, "frontend", "--store", store, "--port", "8000")
    wait_until(lambda: machines.get("far", 8000, "/health")[0] == 200, "the frontend to have its worker", START_S)
    answered, body = machines.get("far", 8000, "/v1/completions", "3")
    assert answered == 200, body
    client = machines.start("far", "-c", ASK, "127.0.0.1", "8000", "/v1/completions", ENDLESS, stdin=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline().startswith("200 ")

    def streams() -> int:
        return int(json.loads(machines.get("near", 9090, "/health")[1])["streams"])

    assert streams() == 1
    machines.cut_cable()
    gone_s = wait_until(lambda: streams() == 0, "the worker to let go of a frontend that is gone", START_S)
    assert gone_s > 1.0, "a look at a cable that was not cut"


@pytest.mark.long
def test_a_fleet_on_two_machines_outlives_the_loss_of_one(machines: Machines) -> None:
    """A replica on each, both serve the one frontend; when a machine is cut off in mid-answer all answers are the ones
    that they would have been, and when it is back its replica is."""
    store = ("--store", f"tcp://{machines.hosts['near']}:7000")
    machines.start("near", "-m", "holdfast", "store", "--address", "tcp://0.0.0.0:7000")
    for machine, words in (("near", ("up", "--backend", "local", "--status-port", "0")), ("far", ("node",))):
        node = ("--node", machine, "--node-address", machines.hosts[machine], "--node-gib", "0.3")
        machines.start(machine, "-m", "holdfast", *words, *store, *node)

    def told(*words: str) -> str:
        state = {**os.environ, "HOLDFAST_STATE_DIR": str(machines.folder / "near")}
        command = ["ip", "netns", "exec", machines.spaces["near"], sys.executable, "-m", "holdfast", *words, *store]
        done = subprocess.run(command, env=state, capture_output=True, text=True, timeout=START_S, check=False)
        return done.stdout if done.returncode == 0 else ""

    def serve_on() -> list[str]:
        found = json.loads(told("models", "chat", "--json") or "{}").get("replicas", [])
        return sorted(one["node"] for one in found if one["phase"] == "ready")

    wait_until(lambda: '"far"' in told("nodes", "--json"), "both nodes", START_S)
    engine = ("--engine", "sim", "--vault-gib", "0.1", "--sim-tpot-ms", "10", "--served-name", "holdfast-sim")
    told("deploy", "chat", *engine, "--memory-gib", "0.2", "--wanted", "2", "--max", "2", "--per-node", "1")
    wait_until(lambda: serve_on() == ["far", "near"], "a replica on each", START_S)
    ask = ("8000", "/v1/completions", "300")
    whole = text_of(machines.get("near", 8000, *ask[1:])[1])
    clients = [machines.start("near", "-c", ASK, "127.0.0.1", *ask, stdin=subprocess.PIPE) for _ in range(4)]
    health = ("near", 8000, "/v1/requests")
    wait_until(lambda: machines.get(*health)[1].count('"RUNNING"') == 4, "all to run", START_S)
    machines.cut_cable()
    for client in clients:
        assert client.stdout is not None
        status, _, body = client.stdout.readline().partition(" ")
        assert (status, text_of(ast.literal_eval(body))) == ("200", whole)
    wait_until(lambda: serve_on() == ["near"], "the machine to be missed", START_S)
    machines.mend_cable()
    wait_until(lambda: serve_on() == ["far", "near"], "it to be back", START_S)


def text_of(body: str) -> str:
    found: str = json.loads(body)["choices"][0]["text"]
    return found
