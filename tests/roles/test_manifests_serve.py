"""Manifests as real processes: the plan of this machine starts, serves, and keeps deployments apart."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.roles.model_names import named
from holdfast.spec.launch import FrontendLaunch, Launch, role_of
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.local import Machine
from holdfast.spec.manifest.whole import whole
from holdfast.testing.rig import END_S, DeploymentRig, fetch, free_port

pytestmark = pytest.mark.processes
EXAMPLES = Path(__file__).parents[2] / "examples"
FIRST = ("store", "vault")  # as a supervisor starts them, before the others
TOKENS = 200  # four seconds and more: an answer runs still when its engine is killed


class Manifests(DeploymentRig):
    """Every process of some manifests, which share a store; no control, which nobody waits for."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        (self.folder / "run").mkdir()
        (self.folder / "gms").mkdir()
        self.ports = [free_port() for _ in texts]
        self.launches: dict[str, Launch] = {}
        for port, text in zip(self.ports, texts, strict=True):
            manifest = check(text.encode()).manifest
            assert manifest is not None
            machine = Machine(self.folder, self.env, port=port)
            self.launches |= {launch.name: launch for launch in whole(manifest, machine, (), named)}

    def begin(self) -> None:
        for early in (True, False):
            names = [name for name, launch in self.launches.items() if (role_of(launch) in FIRST) is early]
            for name in (name for name in names if role_of(self.launches[name]) != "control"):
                self._launch(self.launches[name])
            for name in names if early else ():
                self.wait_until(lambda name=name: self.record(name).get("address"), f"{name} to be ready")
        there = [launch.address for launch in self.launches.values() if isinstance(launch, FrontendLaunch)]
        for port in self.ports:
            if f"tcp://127.0.0.1:{port}" in there:
                self.wait_until(lambda port=port: self.health(port).get("status") == "ready", "it to serve")

    def _launch(self, launch: Launch) -> None:
        settings = msgspec.json.encode(msgspec.structs.replace(launch, parent=os.getpid())).decode()
        self.start(launch.name, [sys.executable, "-P", "-m", "holdfast.roles", role_of(launch), settings])

    def models(self, port: int) -> list[str]:
        return sorted(one["id"] for one in json.loads(self.get("/v1/models", port)[1])["data"])

    def ask(self, port: int, model: str) -> tuple[int, dict[str, Any]]:
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        status, answer = fetch(f"127.0.0.1:{port}", "/v1/chat/completions", "POST", body=body)
        return status, json.loads(answer)


def test_a_failover_pair_of_a_manifest_takes_over() -> None:
    """Its active engine is killed in mid-answer, and the one beside it in the pod goes on."""
    with Manifests((EXAMPLES / "failover.yaml").read_text()) as rig:
        (port,) = rig.ports
        rig.wait_until(lambda: len(rig.health(port).get("workers", [])) == 2, "both engines to be known")
        active = next(one["name"] for one in rig.health(port)["workers"] if one["active"])
        assert rig.models(port) == ["holdfast-sim"]
        rig.port = port
        stream = rig.stream(max_tokens=TOKENS, model="holdfast-sim").wait_tokens(5)
        rig.processes[active].send_signal(signal.SIGKILL)
        answer = stream.answer()
        assert (answer.wrong, answer.resumed, answer.exact) == ("", 1, True)
        assert [one["name"] for one in rig.health(port)["workers"] if one["active"]] != [active]


def test_deployments_with_the_same_components_are_apart() -> None:
    """One store, the same names of services, and one deployment's name begins with the other's: each frontend knows its
    own models only, and the end of one is nothing to the other."""
    text = (EXAMPLES / "two-models.yaml").read_text().replace("replicas: 2", "replicas: 1")
    other = text.replace("name: two-models", "name: two-models-more").replace("modelName: ", "modelName: other-")
    with Manifests(text, other) as rig:
        first, second = rig.ports
        for port in rig.ports:
            rig.wait_until(lambda port=port: len(rig.models(port)) == 2, "both models")
        assert rig.models(first) == ["large", "small"]
        assert rig.models(second) == ["other-large", "other-small"]
        assert rig.ask(first, "small")[0] == rig.ask(second, "other-large")[0] == 200
        assert rig.ask(first, "other-small")[0] == rig.ask(second, "large")[0] == 404
        for name, process in rig.processes.items():
            if name.startswith("two-models-more-"):
                process.terminate()
                process.wait(END_S)
        assert rig.ask(first, "large")[0] == 200
        assert rig.models(first) == ["large", "small"]


ONLY = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: NAME}
spec:
  services:
    Worker: {componentType: worker, modelName: of-NAME, extraPodSpec: {mainContainer: {args: [--engine, sim]}}}
"""
DOOR = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: door}
spec:
  shares: [chat, code]
  services:
    Frontend: {componentType: frontend}
"""


def test_a_frontend_serves_the_deployments_that_its_own_shares() -> None:
    """Those that it names, no other whose name begins alike, and a frontend of its own serves none of them; whose
    workers end takes nothing from the others."""
    names = ("chat", "code", "chat-more")
    with_door = "  services:\n    Frontend: {componentType: frontend}"
    lone = ONLY.replace("NAME", "chat-more").replace("  services:", with_door)
    with Manifests(DOOR, lone, *(ONLY.replace("NAME", name) for name in names[:2])) as rig:
        door, own = rig.ports[:2]
        rig.wait_until(lambda: len(rig.models(door)) == 2, "both models")
        assert (rig.models(door), rig.models(own)) == (["of-chat", "of-code"], ["of-chat-more"])
        assert [rig.ask(door, f"of-{name}")[0] for name in names] == [200, 200, 404]
        assert [rig.ask(own, f"of-{name}")[0] for name in names] == [404, 404, 200]
        for name, process in rig.processes.items():
            if name.startswith("chat-worker-"):
                process.terminate()
                process.wait(END_S)
        assert rig.ask(door, "of-code")[0] == 200


def test_two_frontends_of_one_manifest_share_its_port() -> None:
    """As replicas of one service do."""
    manifest = check((EXAMPLES / "two-models.yaml").read_bytes()).manifest
    assert manifest is not None
    launches = whole(manifest, Machine(Path("/tmp/hf"), {"HOME": "/"}, port=81), (), named)
    frontends = [launch for launch in launches if isinstance(launch, FrontendLaunch)]
    assert [launch.address for launch in frontends] == ["tcp://127.0.0.1:81"] * 2
    assert len({launch.status_address for launch in frontends}) == 2
