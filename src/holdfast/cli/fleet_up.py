"""`holdfast up --backend local` starts a store, a frontend, a control and this machine as a fleet's first node; with
`--backend ray` the nodes are those of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from holdfast.cli.fleet.written import ModelText
from holdfast.cli.up import run_up
from holdfast.core.errors import UserError
from holdfast.fleet.room import HOST
from holdfast.memory.devices.host_room import free_host_bytes
from holdfast.roles.devices import sizes_of
from holdfast.roles.hosted import NodeSite
from holdfast.roles.ray.cluster import check_installed
from holdfast.settings import handed_on
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.launch import RayLaunch, StoredLaunch, WorkerLaunch
from holdfast.spec.names import check_process_name
from holdfast.spec.plan import plan

GIB = 2**30
# Prefixes of variables passed on to replicas on other nodes; the others concern only this terminal.
OURS = ("HOLDFAST_", "DYN_", "HF_", "HOME")


def run_node(
    state_dir: Path,
    spec: DeploymentSpec,
    detach: bool,
    tied: bool = True,
    models: Sequence[ModelText] = (),
    secrets_dir: str = "",
) -> int:
    """Run the first node of a fleet and return the exit status. Invalid settings raise UserError before anything
    starts."""
    node = node_name(spec)
    totals = totals_of(spec)
    bare = _bare(structs.replace(spec, node=node))
    store = _store_of(state_dir, bare)
    site = NodeSite(
        deployment=spec.name,
        name=node,
        state_dir=str(state_dir),
        store=store,
        environ=handed_on(),
        totals=totals,
        vault_dir=spec.vault_dir,
        reach=spec.node_address,
        secrets_dir=secrets_dir,
    )
    return run_up(state_dir, bare, detach, tied, node=site, models=models)


def run_on_ray(
    state_dir: Path, spec: DeploymentSpec, detach: bool, tied: bool = True, models: Sequence[ModelText] = ()
) -> int:
    """Run a fleet on Ray and return the exit status. Invalid settings raise UserError before anything starts."""
    check_installed()
    bare = _bare(spec)
    ray = RayLaunch(
        state_dir=str(state_dir),
        name="ray",
        log_level=spec.log_level,
        store=_store_of(state_dir, bare),
        deployment=spec.name,
        address=spec.address,
        environ=tuple((name, value) for name, value in sorted(handed_on().items()) if name.startswith(OURS)),
        device_bytes=int(spec.node_gib * GIB),
        host_bytes=-1 if spec.node_host_gib < 0 else int(spec.node_host_gib * GIB),
    )
    return run_up(state_dir, bare, detach, tied, more=(ray,), models=models)


def _bare(spec: DeploymentSpec) -> DeploymentSpec:
    """Return the deployment without workers: in a fleet all workers are replicas."""
    frontend = structs.replace(spec.frontend, known=structs.replace(spec.frontend.known, fleet=True))
    return structs.replace(spec, workers=0, standbys=0, gpus=(), worker=WorkerLaunch(model=""), frontend=frontend)


def _store_of(state_dir: Path, bare: DeploymentSpec) -> str:
    return next(launch.store for launch in plan(state_dir, bare) if isinstance(launch, StoredLaunch))


def node_name(spec: DeploymentSpec) -> str:
    """Return the node's name. Raise UserError if it is invalid."""
    node = spec.node or os.uname().nodename
    try:
        check_process_name(node)
    except ValueError as error:
        raise UserError(f"--node: {error}") from error
    return node


def totals_of(spec: DeploymentSpec) -> dict[str, int]:
    """Return how much memory all replicas together may use on each device and on the host."""
    free = free_host_bytes() if spec.gpus else 0
    host = free // 2 if spec.node_host_gib < 0 else int(spec.node_host_gib * GIB)
    return {**_devices(spec), HOST: host}


def _devices(spec: DeploymentSpec) -> dict[str, int]:
    if spec.gpus:
        from holdfast.engines.torch.memory_plan import usable_bytes  # loads numpy

        sizes = sizes_of(spec.gpus)
        if not all(sizes):
            raise UserError("the driver does not report its GPUs' memory, so this machine cannot join a fleet")
        return {gpu: usable_bytes(size) for gpu, size in zip(spec.gpus, sizes, strict=True)}
    each = int(spec.node_gib * GIB) or free_host_bytes() // 2 // spec.node_devices
    return {f"host-{number + 1}": each for number in range(spec.node_devices)}
