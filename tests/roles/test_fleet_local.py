"""A fleet on one machine, by its commands: real processes, killed and replaced while requests are answered."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

import pytest

from holdfast.testing.place import Place
from holdfast.testing.processes import kill_group
from holdfast.testing.waiting import wait_until

SIM = ("--engine", "sim", "--vault-gib", "0.1", "--sim-ttft-ms", "5")
UP = ("up", "--backend", "local", "--detach", "--node", "n1", "--node-devices", "2", "--node-gib", "0.5")
BOUND_S = 90.0  # on a loaded machine


class FleetPlace(Place):
    def begin(self) -> None:
        self.up()

    def up(self) -> None:
        said = self.run(*UP, "--port", str(self.port), "--status-port", "0")
        assert said.returncode == 0, said

    def told(self, *words: str) -> str:
        said = self.run(*words)
        assert said.returncode == 0, said
        return said.stdout

    def model(self, key: str) -> dict[str, Any]:
        return json.loads(self.told("models", key, "--json"))  # type: ignore[no-any-return]

    def leased(self) -> dict[str, tuple[int, int]]:
        """What is leased of each device, and what there is."""
        (node,) = json.loads(self.told("nodes", "--json"))
        return {one["name"]: (one["leased_bytes"], one["total_bytes"]) for one in node["devices"]}

    def engine_pids(self) -> dict[str, int]:
        return {name: one["pid"] for name, one in self.records().items() if one["role"] == "worker"}

    def ask(self, model: str, number: int, tokens: int = 40) -> list[int]:
        body = {"model": model, "prompt": f"story {number}", "max_tokens": tokens, "seed": number}
        body |= {"ignore_eos": True, "return_token_ids": True}
        request = Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=BOUND_S) as answer:
            found: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return found


@pytest.fixture
def fleet() -> Iterator[FleetPlace]:
    with FleetPlace() as place:
        yield place


def _meanwhile(fleet: FleetPlace, model: str, deed: Callable[[], Any]) -> None:
    """Do something while clients ask, and go on after it for a while; every answer must be the one from before."""
    first = {number: fleet.ask(model, number) for number in range(4)}
    is_done = threading.Event()

    def ask_on() -> None:
        more = 8
        while more:
            for number, tokens in first.items():
                assert fleet.ask(model, number) == tokens
                more -= is_done.is_set() and more > 0

    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(ask_on) for _ in range(4)]
        try:
            deed()
        finally:
            is_done.set()
        for one in asking:
            one.result(BOUND_S)


@pytest.mark.long
def test_a_model_is_deployed_scaled_and_evicted(fleet: FleetPlace) -> None:
    """Every request meanwhile has the answer that it always has; no device is over its lease, and nothing is left."""
    fleet.told("deploy", "chat", *SIM, "--max", "3", "--wait")
    tokens = fleet.ask("chat", 1)
    assert len(tokens) == 40
    _meanwhile(fleet, "chat", lambda: fleet.told("scale", "chat", "3", "--wait"))
    replicas = fleet.model("chat")["replicas"]
    assert {one["name"] for one in replicas} == {f"ModelActor:chat:r{number}" for number in (1, 2, 3)}
    assert all(leased <= total for leased, total in fleet.leased().values())
    _meanwhile(fleet, "chat", lambda: fleet.told("scale", "chat", "1", "--wait"))
    assert fleet.ask("chat", 1) == tokens
    fleet.told("evict", "chat", "--wait")
    assert fleet.engine_pids() == {}
    assert {leased for leased, _ in fleet.leased().values()} == {0}


@pytest.mark.long
def test_whoever_is_killed_nothing_is_lost_or_started_twice(fleet: FleetPlace) -> None:
    """Engines, the control and the node's agent: what is wanted comes to be, and who lives is the same process."""
    fleet.told("deploy", "chat", *SIM, "--wanted", "2", "--wait")

    def kill_and_see(name: str) -> None:
        kill_group(fleet.record(name)["pid"])

    def engine_dies() -> None:
        for name in list(fleet.engine_pids())[:2]:
            kill_and_see(name)
        fleet.told("models", "--json")

    _meanwhile(fleet, "chat", engine_dies)
    # Its control dies in the middle of a change: the next one goes on from what is written.
    pids = fleet.engine_pids()

    def control_dies() -> None:
        fleet.told("scale", "chat", "1")
        kill_and_see("control")
        wait_until(lambda: fleet.model("chat")["hot"] == 1, "one replica to be left", BOUND_S, every_s=0.2)

    _meanwhile(fleet, "chat", control_dies)
    left = fleet.engine_pids()
    assert set(left.items()) <= set(pids.items()), "who stayed is who was there"
    # The supervisor, which is the node's agent: the next one adopts what runs.
    (supervisor,) = {one["agent_pid"] for one in json.loads(fleet.told("nodes", "--json"))}
    os.kill(supervisor, signal.SIGKILL)

    def begin_again() -> None:
        fleet.up()
        wait_until(lambda: fleet.model("chat")["hot"] == 1, "the node to tell of it again", BOUND_S, every_s=0.2)

    _meanwhile(fleet, "chat", begin_again)
    assert fleet.engine_pids() == left
    fleet.told("scale", "chat", "2", "--wait")
    assert len(fleet.model("chat")["replicas"]) == 2
