"""Deployments as the scenarios want them, written as manifests. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

NAME = "roll"
MODEL = "holdfast-sim"
FRONTEND, WORKER, PREFILL, DECODE = "Frontend", "Worker", "Prefill", "Decode"
DEADLINE_S = 60  # without progress: long against a start on a busy machine, short against a person's patience


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a deployment the scenarios change. A sim answers in 20 ms a token, so that answers outlast a drain."""

    workers: int = 2
    frontends: int = 1
    image: str = "holdfast:1.0"
    frontend_image: str = "holdfast:1.0"
    model: str = MODEL
    engine: tuple[str, ...] = ("--engine", "sim", "--sim-tpot-ms", "20")
    args: tuple[str, ...] = ()
    frontend_args: tuple[str, ...] = ()
    envs: tuple[tuple[str, str], ...] = ()
    failover: bool = False
    split: bool = False  # into prefill and decode workers
    deadline_s: int = DEADLINE_S
    inexact: bool = False

    def manifest(self) -> str:
        services = {FRONTEND: self._service("frontend", self.frontends, self.frontend_image, *self.frontend_args)}
        for name in (DECODE, PREFILL) if self.split else (WORKER,):
            own = self._service("worker", self.workers, self.image, *self.engine, *self.args)
            own |= {"modelName": self.model} | ({"subComponentType": name.lower()} if self.split else {})
            if self.envs:
                own["envs"] = [{"name": key, "value": value} for key, value in self.envs]
            if self.failover:
                own |= {"failover": {"enabled": True}, "resources": {"limits": {"gpu": "1"}}}
            services[name] = own
        whole = {"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoGraphDeployment"}
        return json.dumps(whole | {"metadata": {"name": NAME}, "spec": {"services": services}}, indent=1)

    def _service(self, kind: str, replicas: int, image: str, *args: str) -> dict[str, Any]:
        rollout: dict[str, Any] = {"progressDeadlineSeconds": self.deadline_s}
        rollout |= {"inexact": True} if self.inexact and kind == "worker" else {}
        container: dict[str, Any] = {"image": image} | ({"args": list(args)} if args else {})
        pod = {"extraPodSpec": {"mainContainer": container}}
        return {"componentType": kind, "replicas": replicas, "rollout": rollout, **pod}


PLAIN = Shape()
