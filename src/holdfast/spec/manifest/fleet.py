"""What a manifest says of a worker's replicas in a fleet: how many there may be, how near to a GPU, where, how large.

The options of `holdfast deploy` are these fields. Only a fleet reads them (docs/fleet.md); what a replica is told does
not depend on them, but for the memory that it may have.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from holdfast.spec.manifest.parts import Names, Section
from holdfast.spec.settings import GIB_MAX, about

FLOORS = ("hot", "warm", "cold")
REPLICAS_MAX = 256  # of one service
DEVICES_MAX = 64  # of one replica, all on one node

_DEPLOY = {"commands": ("deploy",), "panel": "The fleet"}
_SCALING = {"commands": ("deploy",), "panel": "Scaling"}


class Autoscale(Section, frozen=True):
    """When one more or one less is wanted (`fleet.scaling`)."""

    enabled: Annotated[bool, about("Whether its traffic says how many.", flag="--autoscale", **_SCALING)]
    wait_seconds: Annotated[
        float, about("The first in line may wait so long.", "s", min=0, flag="--scale-wait-s", **_SCALING)
    ] = 2.0
    kv_high: Annotated[
        float, about("With more of its KV used, one more.", min=0, max=1, flag="--scale-kv-high", **_SCALING)
    ] = 0.9
    kv_low: Annotated[
        float, about("With no more used without it, one less.", min=0, max=1, flag="--scale-kv-low", **_SCALING)
    ] = 0.6
    up_after_seconds: Annotated[
        float, about("There must be too few for so long.", "s", min=0, flag="--scale-up-after-s", **_SCALING)
    ] = 3.0
    down_after_seconds: Annotated[
        float, about("There must be too many for so long.", "s", min=0, flag="--scale-down-after-s", **_SCALING)
    ] = 60.0
    up_every_seconds: Annotated[
        float, about("Between two more.", "s", min=0, flag="--scale-up-every-s", **_SCALING)
    ] = 30.0
    down_every_seconds: Annotated[
        float, about("Between two less.", "s", min=0, flag="--scale-down-every-s", **_SCALING)
    ] = 60.0
    idle_seconds: Annotated[
        float, about("Without a request for so long, to none; 0: never.", "s", min=0, flag="--scale-idle-s", **_SCALING)
    ] = 300.0
    devices_max: Annotated[
        int,
        about("Devices that all of them may have; 0: what they need.", min=0, flag="--scale-devices-max", **_SCALING),
    ] = 0


class Fleet(Section, frozen=True):
    """How a fleet keeps a worker service; its `replicas` is how many are to be HOT now."""

    replicas_min: Annotated[
        int, about("So many are kept, at the floor or above.", min=0, max=REPLICAS_MAX, flag="--min", **_DEPLOY)
    ] = 0
    replicas_max: Annotated[
        int | None,
        about(
            "Upper bound on replicas; default, or 0: as many as are wanted when it is deployed, at least 1.",
            min=0,
            max=REPLICAS_MAX,
            flag="--max",
            **_DEPLOY,
        ),
    ] = None
    floor: Annotated[
        str | None,
        about("GPU, host memory or disk; default: hot, if some are kept, else cold.", choices=FLOORS, **_DEPLOY),
    ] = None
    dedicated: Annotated[bool, about("Whether nobody takes its place.", **_DEPLOY)] = False
    nodes: Annotated[
        tuple[str, ...], about("Where it may be; none: anywhere. May be repeated.", flag="--node", **_DEPLOY)
    ] = ()
    per_node: Annotated[
        int, about("HOT ones on one node; 0: as many as fit.", min=0, max=REPLICAS_MAX, **_DEPLOY)
    ] = 0
    memory_gib: Annotated[
        float,
        about("On each device, weights and KV; 0: by its engine's options.", "GiB", min=0, max=GIB_MAX, **_DEPLOY),
    ] = 0.0
    host_gib: Annotated[
        float, about("In host memory when WARM; 0: it never is.", "GiB", min=0, max=GIB_MAX, **_DEPLOY)
    ] = 0.0
    ready_seconds: Annotated[
        float, about("How long one may take until it serves.", "s", over=0, flag="--ready-s", **_DEPLOY)
    ] = 600.0
    drain_seconds: Annotated[
        float, about("How long its requests may take to end when it leaves.", "s", min=0, flag="--drain-s", **_DEPLOY)
    ] = 30.0
    autoscale: Annotated[Autoscale, about("Whether its traffic says how many.")] = Autoscale(enabled=False)

    @property
    def level(self) -> str:
        """The floor, also where nobody says one."""
        return self.floor or (FLOORS[0] if self.replicas_min else FLOORS[-1])

    idle: ClassVar[Names] = {"wanted": "replicas is read"}
