"""Every kind of process by the name of its role, and launches of all kinds as one text."""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.spec.launch import (
    ControlLaunch,
    FrontendLaunch,
    Launch,
    StoredLaunch,
    StoreLaunch,
    VaultLaunch,
    WorkerLaunch,
)
from holdfast.spec.settings import about


class RayLaunch(StoredLaunch, frozen=True):
    """Who keeps a fleet's agents on the nodes of a Ray cluster."""

    address: Annotated[
        str, about("HOST:PORT of the Ray cluster's head (empty: the cluster running on this machine).")
    ] = ""
    environ: Annotated[
        tuple[tuple[str, str], ...], about("Environment variables of the starting process, passed on to replicas.")
    ] = ()
    device_bytes: Annotated[
        int,
        about(
            "Without GPUs: memory of each device (0: half of the free host memory, divided among the devices).",
            "bytes",
            min=0,
        ),
    ] = 0
    host_bytes: Annotated[
        int,
        about(
            "Host memory per node for weights of WARM replicas (-1: half of Ray's memory with GPUs, else none).",
            "bytes",
            min=-1,
        ),
    ] = -1


ROLES: dict[str, type[Launch]] = {
    "store": StoreLaunch,
    "vault": VaultLaunch,
    "worker": WorkerLaunch,
    "frontend": FrontendLaunch,
    "control": ControlLaunch,
    "ray": RayLaunch,
}


def role_of(launch: Launch) -> str:
    return next(role for role, kind in ROLES.items() if isinstance(launch, kind))


def encode_launches(launches: list[Launch]) -> bytes:
    return msgspec.json.encode([(role_of(launch), launch) for launch in launches])


def decode_launches(data: bytes) -> list[Launch]:
    pairs = msgspec.json.decode(data, type=list[tuple[str, msgspec.Raw]])
    return [msgspec.json.decode(settings, type=ROLES[role]) for role, settings in pairs]
