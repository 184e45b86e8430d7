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

    enabled: Annotated[bool, about("Set the number of replicas by traffic.", flag="--autoscale", **_SCALING)]
    wait_seconds: Annotated[
        float,
        about(
            "Add a replica if a request is queued for longer than this.", "s", min=0, flag="--scale-wait-s", **_SCALING
        ),
    ] = 2.0
    kv_high: Annotated[
        float, about("Add a replica at this fraction of KV used.", min=0, max=1, flag="--scale-kv-high", **_SCALING)
    ] = 0.9
    kv_low: Annotated[
        float,
        about(
            "Remove a replica if the rest would stay at or below this fraction of KV used.",
            min=0,
            max=1,
            flag="--scale-kv-low",
            **_SCALING,
        ),
    ] = 0.6
    up_after_seconds: Annotated[
        float, about("Add a replica after this long with too few.", "s", min=0, flag="--scale-up-after-s", **_SCALING)
    ] = 3.0
    down_after_seconds: Annotated[
        float,
        about("Remove a replica after this long with too many.", "s", min=0, flag="--scale-down-after-s", **_SCALING),
    ] = 60.0
    up_every_seconds: Annotated[
        float,
        about(
            "Minimum time from the last scaling step to a scale-up.", "s", min=0, flag="--scale-up-every-s", **_SCALING
        ),
    ] = 30.0
    down_every_seconds: Annotated[
        float,
        about(
            "Minimum time from the last scaling step to a scale-down.",
            "s",
            min=0,
            flag="--scale-down-every-s",
            **_SCALING,
        ),
    ] = 60.0
    idle_seconds: Annotated[
        float,
        about(
            "Scale to zero after this time without requests (0: never).", "s", min=0, flag="--scale-idle-s", **_SCALING
        ),
    ] = 300.0
    devices_max: Annotated[
        int,
        about(
            "Maximum number of devices for all replicas together (0: no limit).",
            min=0,
            flag="--scale-devices-max",
            **_SCALING,
        ),
    ] = 0


class Fleet(Section, frozen=True):
    """How a fleet keeps a worker service; its `replicas` is how many are to be HOT now."""

    replicas_min: Annotated[
        int,
        about(
            "Minimum number of replicas kept at the floor or hotter.", min=0, max=REPLICAS_MAX, flag="--min", **_DEPLOY
        ),
    ] = 0
    replicas_max: Annotated[
        int | None,
        about(
            "Upper bound on replicas (default, or 0: the largest of the count deployed, the minimum and 1).",
            min=0,
            max=REPLICAS_MAX,
            flag="--max",
            **_DEPLOY,
        ),
    ] = None
    floor: Annotated[
        str | None,
        about(
            "Level at which the minimum is kept: hot (device), warm (host memory), cold (disk); default: hot with"
            " a minimum, else cold.",
            choices=FLOORS,
            **_DEPLOY,
        ),
    ] = None
    dedicated: Annotated[bool, about("Never evict this model to make room for others.", **_DEPLOY)] = False
    nodes: Annotated[
        tuple[str, ...],
        about("Node where replicas may run; may be repeated (none: any node).", flag="--node", **_DEPLOY),
    ] = ()
    per_node: Annotated[
        int,
        about("Maximum number of HOT replicas on one node (0: as many as fit).", min=0, max=REPLICAS_MAX, **_DEPLOY),
    ] = 0
    memory_gib: Annotated[
        float,
        about(
            "Memory of a replica on each device, weights plus KV (0: computed from the engine's options).",
            "GiB",
            min=0,
            max=GIB_MAX,
            **_DEPLOY,
        ),
    ] = 0.0
    host_gib: Annotated[
        float, about("Host memory of a WARM replica (0: it is never WARM).", "GiB", min=0, max=GIB_MAX, **_DEPLOY)
    ] = 0.0
    ready_seconds: Annotated[
        float, about("Time limit for a replica to start serving.", "s", over=0, flag="--ready-s", **_DEPLOY)
    ] = 600.0
    drain_seconds: Annotated[
        float,
        about(
            "Time that running requests have to finish when a replica is removed.",
            "s",
            min=0,
            flag="--drain-s",
            **_DEPLOY,
        ),
    ] = 30.0
    autoscale: Annotated[Autoscale, about("Set the number of replicas by traffic.")] = Autoscale(enabled=False)

    @property
    def level(self) -> str:
        """The floor, also where nobody says one."""
        return self.floor or (FLOORS[0] if self.replicas_min else FLOORS[-1])

    idle: ClassVar[Names] = {"wanted": "replicas is read"}
