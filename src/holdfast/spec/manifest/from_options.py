"""Writes what the options of `holdfast up` or `holdfast deploy` ask for as a manifest. No I/O.

Always true: what is written is read by `checking.check` like any manifest, and `holdfast up -f` serves the same with it
as `holdfast up` with the options. Options about the machine (devices, store, ports of status pages) are not in it, and
secrets are references: their values are looked for where the manifest is used, and refused if they are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from holdfast.core.errors import Refused
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.launch import WorkerLaunch
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.parts import as_plain
from holdfast.spec.manifest.secrets import INHERITED
from holdfast.spec.manifest.typed import PATTERNS, ControlBlock, FrontendBlock, WorkerBlock, block_from
from holdfast.spec.manifest.types import API_VERSION, FRONTEND, KIND, PLANNER, WORKER, Manifest
from holdfast.spec.manifest.yaml_text import in_yaml

API_KEYS, ENGINE_TOKEN = INHERITED
DEFAULT = WorkerLaunch().source
Plain = dict[str, Any]  # in a manifest's form


def manifest_from(spec: DeploymentSpec) -> Manifest:
    """Return the manifest of a deployment; raise Refused if no manifest can say it."""
    checked = check(text_from(spec).encode())
    if checked.manifest is None:
        raise Refused("; ".join(str(problem) for problem in checked.problems))
    return checked.manifest


def text_from(spec: DeploymentSpec) -> str:
    """Return the text of `manifest_from`."""
    if spec.backend:
        raise Refused("a manifest has the models of a fleet, and `holdfast deploy` adds one; leave --backend out")
    if not spec.controls:
        raise Refused("--controls 0 cannot be written as a manifest, whose deployment always has a control")
    services: Plain = {}
    if spec.workers:
        source = "" if spec.worker.source == DEFAULT else spec.worker.source
        worker = replace(spec.worker, source=source)
        name = {"modelName": spec.worker.model} if spec.worker.model else {}
        services["worker"] = {
            "componentType": WORKER,
            "replicas": spec.workers,
            **name,
            **(shared_memory(spec.ranks, spec.standbys) if spec.standbys else {}),
            **_secret(spec.name, ENGINE_TOKEN, spec.worker.engine_token),
            "worker": worker_settings(worker),
        }
    services["frontend"] = {
        "componentType": FRONTEND,
        "replicas": spec.frontends,
        **_secret(spec.name, API_KEYS, spec.frontend.api_keys),
        "frontend": _frontend(spec),
    }
    times = replace(spec.control.levels.times, hold_s=spec.frontend.holds.hold_s)  # as `spec.plan` sets it
    control = replace(spec.control, levels=replace(spec.control.levels, times=times))
    services["control"] = {
        "componentType": PLANNER,
        "replicas": spec.controls,
        **_secret(spec.name, ENGINE_TOKEN, spec.control.engine_token),
        "control": as_plain(block_from(ControlBlock, "control", control)),
    }
    return manifest_text(spec.name, services)


def manifest_text(deployment: str, services: Mapping[str, Plain]) -> str:
    whose = {"metadata": {"name": deployment}, "spec": {"services": dict(services)}}
    return in_yaml({"apiVersion": API_VERSION, "kind": KIND, **whose})


def shared_memory(devices: int, standbys: int) -> Plain:
    """Return the fields of a worker whose engines keep their memory in vaults."""
    limits = {"limits": {"gpu": str(devices)}}
    return {"resources": limits, "failover": {"enabled": True, "numShadows": standbys}}


def worker_settings(worker: WorkerLaunch) -> Any:
    return as_plain(block_from(WorkerBlock, "worker", worker))


def _frontend(spec: DeploymentSpec) -> Any:
    """Return the settings of frontends. The usual host and port are left out, so that `up -f --port` may say them; a
    model that will have workers is known before they are there, as `spec.plan` has it."""
    models = (spec.worker.model,) if spec.workers and spec.worker.model else ()
    frontend = replace(spec.frontend, known=replace(spec.frontend.known, models=models))
    usual, pattern = DeploymentSpec(""), PATTERNS["frontend"]
    assert isinstance(pattern, DeploymentSpec)
    host = pattern.host if spec.host == usual.host else spec.host
    port = pattern.port if spec.port == usual.port else spec.port
    return as_plain(block_from(FrontendBlock, "frontend", replace(spec, host=host, port=port, frontend=frontend)))


def _secret(deployment: str, variable: str, value: object) -> Plain:
    """Return a reference in place of a secret's value."""
    if not value:
        return {}
    source = {"secretKeyRef": {"name": deployment, "key": variable}}
    return {"envs": [{"name": variable, "valueFrom": source}]}
