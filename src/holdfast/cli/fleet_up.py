"""`holdfast up --backend local`: a store, a frontend and a control, and this machine as a node of their fleet."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import structs

from holdfast.cli.up import run_up
from holdfast.core.errors import UserError
from holdfast.memory.devices.host_room import free_host_bytes
from holdfast.roles.devices import sizes_of
from holdfast.roles.hosted import NodeSite
from holdfast.settings import handed_on
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.launch import StoredLaunch, WorkerLaunch
from holdfast.spec.names import check_process_name
from holdfast.spec.plan import plan

GIB = 2**30


def run_node(state_dir: Path, spec: DeploymentSpec, detach: bool, tied: bool = True) -> int:
    """The exit status. UserError before anything is started."""
    node = node_name(spec)
    totals = totals_of(spec)
    frontend = structs.replace(spec.frontend, known=structs.replace(spec.frontend.known, fleet=True))
    worker = WorkerLaunch(model="")
    bare = structs.replace(spec, node=node, workers=0, standbys=0, gpus=(), worker=worker, frontend=frontend)
    stored = next(launch for launch in plan(state_dir, bare) if isinstance(launch, StoredLaunch))
    site = NodeSite(
        deployment=spec.name,
        name=node,
        state_dir=str(state_dir),
        store=stored.store,
        environ=handed_on(),
        totals=totals,
        vault_dir=spec.vault_dir,
    )
    return run_up(state_dir, bare, detach, tied, node=site)


def node_name(spec: DeploymentSpec) -> str:
    """UserError, if it cannot be one."""
    node = spec.node or os.uname().nodename
    try:
        check_process_name(node)
    except ValueError as error:
        raise UserError(f"--node: {error}") from error
    return node


def totals_of(spec: DeploymentSpec) -> dict[str, int]:
    """What replicas may have together of each device here."""
    if spec.gpus:
        from holdfast.engines.torch.gpu.memory_plan import usable_bytes  # loads numpy

        sizes = sizes_of(spec.gpus)
        if not all(sizes):
            raise UserError("the driver does not say how much memory its GPUs have: this cannot be a node of a fleet")
        return {gpu: usable_bytes(size) for gpu, size in zip(spec.gpus, sizes, strict=True)}
    each = int(spec.node_gib * GIB) or free_host_bytes() // 2 // spec.node_devices
    return {f"host-{number + 1}": each for number in range(spec.node_devices)}
