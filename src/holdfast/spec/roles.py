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

    address: Annotated[str, about("Of its head, HOST:PORT; empty: the one that runs on this machine.")] = ""
    environ: Annotated[tuple[tuple[str, str], ...], about("Of whoever starts it: replicas have it, too.")] = ()
    device_bytes: Annotated[
        int, about("What replicas may have of each device that is no GPU; 0: half of what is free.", "bytes", min=0)
    ] = 0
    host_bytes: Annotated[
        int,
        about(
            "Of each node, for weights of WARM replicas; -1: half of Ray's beside GPUs, else none.", "bytes", min=-1
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
