"""Computes the processes of a deployment. No I/O.

Always true: the same deployment gives the same settings byte for byte, so that the next `up` recognises its processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from holdfast.core.address import TcpAddress
from holdfast.spec.deployment import ENGINE_LETTERS, DeploymentSpec, DeviceSlot, device_slots, pairs_on
from holdfast.spec.launch import ControlLaunch, FrontendLaunch, Launch, StoreLaunch, VaultLaunch, WorkerLaunch
from holdfast.spec.names import own_page, socket_path


def plan(state_dir: Path, spec: DeploymentSpec) -> list[Launch]:
    """Return all processes that should run, grouped by role; raise UserError if the deployment is invalid."""
    spec.check(state_dir)
    common: dict[str, Any] = {"state_dir": str(state_dir), "log_level": spec.log_level}
    own_store = f"unix://{state_dir}/run/store.sock"
    stored = common | {"store": spec.store or own_store, "deployment": spec.name}
    launches: list[Launch] = []
    if not spec.store:
        launches.append(StoreLaunch(name="store", address=own_store, **common))
    taken = device_slots(spec.gpus, spec.workers, spec.ranks)
    for number, own in enumerate(taken, 1):
        vaults = list(_vaults(state_dir, number, own, spec, common)) if spec.standbys else []
        engines = _engines(state_dir, number, vaults, spec, stored)
        launches += [*vaults, *(replace(engine, device_pairs=pairs_on(taken)) for engine in engines)]
    launches += [_frontend(state_dir, number, spec, stored) for number in range(1, spec.frontends + 1)]
    # Last: serving does not wait for control.
    return [*launches, *(_control(state_dir, number, spec, stored) for number in range(1, spec.controls + 1))]


def _vaults(
    state_dir: Path, number: int, own: list[DeviceSlot], spec: DeploymentSpec, common: dict[str, Any]
) -> Iterator[VaultLaunch]:
    """Yield a vault for each rank's device."""
    for rank, slot in enumerate(own, 1):
        name = f"vault-{number}" + (f"-r{rank}" if rank > 1 else "")
        socket = socket_path(spec.vaults_in(state_dir), slot.socket_name)
        yield VaultLaunch(name=name, device=slot.device, socket_path=socket, **common)


def _engines(
    state_dir: Path, number: int, vaults: list[VaultLaunch], spec: DeploymentSpec, stored: dict[str, Any]
) -> Iterator[WorkerLaunch]:
    """Yield the engines that share the vaults' memory (the lock elects the active one); without vaults, one worker."""
    group = f"worker-{number}"
    if not vaults:
        yield _worker(state_dir, group, spec.status_port_of(number, 0), spec, stored)
        return
    first, *others = vaults
    for engine_id, letter in enumerate(ENGINE_LETTERS[: spec.standbys + 1]):
        failover = replace(
            spec.worker.failover,
            vault_socket=first.socket_path,
            device=first.device,
            engine_id=engine_id,
            more_vaults=tuple((vault.socket_path, vault.device) for vault in others),
        )
        yield replace(
            _worker(state_dir, f"{group}{letter}", spec.status_port_of(number, engine_id), spec, stored),
            failover=failover,
            standbys=spec.standbys,
            lock=f"flock://{state_dir}/run/{group}.lock",
            group=group,
        )


def _worker(state_dir: Path, name: str, status_port: int, spec: DeploymentSpec, stored: dict[str, Any]) -> WorkerLaunch:
    return replace(
        spec.worker,
        name=name,
        address=f"unix://{state_dir}/run/{name}.sock",
        beat_address=f"unix://{state_dir}/run/{name}.beat",
        status_address=str(TcpAddress(spec.status_host, status_port)),
        status_any=True,
        **stored,
    )


def _control(state_dir: Path, number: int, spec: DeploymentSpec, stored: dict[str, Any]) -> ControlLaunch:
    levels = spec.control.levels
    return replace(
        spec.control,
        name=_one_of("control", number),
        # Control uses these two values, but they are set for workers and frontends.
        levels=replace(
            levels,
            slo=replace(levels.slo, workers=spec.workers),
            times=replace(levels.times, hold_s=spec.frontend.holds.hold_s),
        ),
        status_address=str(TcpAddress(spec.status_host, spec.control_port_of(number))),
        status_any=True,
        **stored,
    )


def _frontend(state_dir: Path, number: int, spec: DeploymentSpec, stored: dict[str, Any]) -> FrontendLaunch:
    name = _one_of("frontend", number)
    return replace(
        spec.frontend,
        name=name,
        address=str(TcpAddress(spec.host, spec.port)),
        status_address=own_page(state_dir, name),
        known=replace(spec.frontend.known, models=(spec.worker.model,) if spec.workers else ()),
        **stored,
    )


def _one_of(role: str, number: int) -> str:
    """Return a process's name: the role, with a number from the second process on."""
    return role if number == 1 else f"{role}-{number}"
