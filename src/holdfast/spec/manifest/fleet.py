"""Defines a manifest's settings for a worker's replicas in a fleet: number, level, placement, memory, scaling.

The options of `holdfast deploy` are these fields. Only a fleet reads them (docs/fleet.md). Except for the memory, they
do not change a replica's own settings.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from holdfast.spec.manifest.parts import Names, Section
from holdfast.spec.settings import GIB_MAX, about

FLOORS = ("hot", "warm", "cold")
REPLICAS_MAX = 256  # replicas of one service
DEVICES_MAX = 64  # devices of one replica, all on one node


class Autoscale(Section, frozen=True):
    """Settings for adding and removing replicas (`fleet.scaling`)."""

    enabled: Annotated[bool, about("Set the number of replicas by traffic.", flag="--autoscale", expert=False)]
    wait_seconds: Annotated[
        float, about("Add a replica if a request is queued for longer than this.", "s", min=0, flag="--scale-wait-s")
    ] = 2.0
    kv_high: Annotated[
        float, about("Add a replica at this fraction of KV used.", min=0, max=1, flag="--scale-kv-high")
    ] = 0.9
    kv_low: Annotated[
        float,
        about(
            "Remove a replica if the rest would stay at or below this fraction of KV used.",
            min=0,
            max=1,
            flag="--scale-kv-low",
        ),
    ] = 0.6
    up_after_seconds: Annotated[
        float, about("Add a replica after this long with too few.", "s", min=0, flag="--scale-up-after-s")
    ] = 3.0
    down_after_seconds: Annotated[
        float, about("Remove a replica after this long with too many.", "s", min=0, flag="--scale-down-after-s")
    ] = 60.0
    up_every_seconds: Annotated[
        float, about("Minimum time from the last scaling step to a scale-up.", "s", min=0, flag="--scale-up-every-s")
    ] = 30.0
    down_every_seconds: Annotated[
        float,
        about("Minimum time from the last scaling step to a scale-down.", "s", min=0, flag="--scale-down-every-s"),
    ] = 60.0
    idle_seconds: Annotated[
        float, about("Scale to zero after this time without requests (0: never).", "s", min=0, flag="--scale-idle-s")
    ] = 300.0
    devices_max: Annotated[
        int,
        about("Maximum number of devices for all replicas together (0: no limit).", min=0, flag="--scale-devices-max"),
    ] = 0


class Fleet(Section, frozen=True):
    """Settings of a worker service in a fleet; the service's `replicas` is the desired number of HOT replicas."""

    replicas_min: Annotated[
        int, about("Minimum number of replicas kept at the floor or hotter.", min=0, max=REPLICAS_MAX, flag="--min")
    ] = 0
    replicas_max: Annotated[
        int | None,
        about(
            "Upper bound on replicas (default, or 0: the largest of the count deployed, the minimum and 1).",
            min=0,
            max=REPLICAS_MAX,
            flag="--max",
        ),
    ] = None
    floor: Annotated[
        str | None,
        about(
            "Level at which the minimum is kept: hot (device), warm (host memory), cold (disk); default: hot with"
            " a minimum, else cold.",
            choices=FLOORS,
        ),
    ] = None
    dedicated: Annotated[bool, about("Never evict this model to make room for others.")] = False
    nodes: Annotated[
        tuple[str, ...], about("Node where replicas may run; may be repeated (none: any node).", flag="--node")
    ] = ()
    per_node: Annotated[
        int,
        about("Maximum number of HOT replicas on one node (0: as many as fit).", min=0, max=REPLICAS_MAX, expert=True),
    ] = 0
    memory_gib: Annotated[
        float,
        about(
            "Memory of a replica on each device, weights plus KV (0: computed from the engine's options).",
            "GiB",
            min=0,
            max=GIB_MAX,
            expert=True,
        ),
    ] = 0.0
    host_gib: Annotated[
        float, about("Host memory of a WARM replica (0: it is never WARM).", "GiB", min=0, max=GIB_MAX, expert=True)
    ] = 0.0
    ready_seconds: Annotated[
        float, about("Time limit for a replica to start serving.", "s", over=0, flag="--ready-s", expert=True)
    ] = 600.0
    drain_seconds: Annotated[
        float,
        about(
            "Time that running requests have to finish when a replica is removed.",
            "s",
            min=0,
            flag="--drain-s",
            expert=True,
        ),
    ] = 30.0
    autoscale: Annotated[Autoscale, about("Set the number of replicas by traffic.", panel="Scaling", expert=True)] = (
        Autoscale(enabled=False)
    )

    @property
    def level(self) -> str:
        """Return the floor, or its default."""
        return self.floor or (FLOORS[0] if self.replicas_min else FLOORS[-1])

    idle: ClassVar[Names] = {"wanted": "replicas is read"}
