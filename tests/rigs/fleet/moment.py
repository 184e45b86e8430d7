"""A fleet at one moment in few words, for tests of what one pass of the planner says."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.fleet.actions import Action, PendingAction, Verb, replica_name
from holdfast.fleet.desired import HYSTERESIS, Level, Model
from holdfast.fleet.observed import LeasedMemory, Node, Observed, Replica
from holdfast.fleet.planner import plan
from holdfast.health.records import Demand

NOW_S = 10_000.0
LONG_AGO_S = 5_000.0
RESIDENT_S, COOLDOWN_S, LINGER_S = HYSTERESIS.resident_s, HYSTERESIS.cooldown_s, HYSTERESIS.linger_s


def model(key: str = "a", size: int = 40, **fields: object) -> Model:
    return Model(**{"key": key, "wanted": 1, "replicas_max": 8, "device_bytes": size, "host_bytes": size, **fields})


def node(name: str = "n", gpus: int = 1, size: int = 80, host: int = 0, **leases: int) -> Node:
    """Return a node with leases as `a1=40`, on its first device."""
    granted = {replica_name(name[:-1], int(name[-1])): much for name, much in leases.items()}
    devices = {f"gpu{number}": LeasedMemory(size, granted if number == 0 else {}) for number in range(gpus)}
    return Node(name=name, devices=devices, host=LeasedMemory(host))


def replica(key: str = "a", serial: int = 1, size: int = 40, **fields: object) -> Replica:
    said = {"node": "n", "devices": ("gpu0",), "device_bytes": size, "host_bytes": size, "since_s": LONG_AGO_S}
    return Replica(**{"model": key, "serial": serial, **said, **fields})


def warm(key: str = "a", serial: int = 1, **fields: object) -> Replica:
    return replica(key, serial, **{"level": Level.WARM, "devices": (), **fields})


def observe(nodes: list[Node], replicas: list[Replica] = [], **rest: Mapping[str, object]) -> Observed:  # noqa: B006
    return Observed(nodes={one.name: one for one in nodes}, replicas={one.name: one for one in replicas}, **rest)


def pending(action: Action, *, overdue: bool = False) -> dict[str, PendingAction]:
    return {action.id: PendingAction(action, overdue)}


def planned_words(models: list[Model], observed: Observed, now_s: float = NOW_S) -> list[str]:
    """Return the actions as words, e.g. `place a1 n`."""
    actions = plan(models, observed, now_s).actions
    return [f"{one.verb} {one.model}{one.serial} {one.node}" for one in actions]


PLACED = Action(
    verb=Verb.PLACE, model="a", serial=1, node="n", deadline_s=NOW_S + 60, devices=("gpu0",), device_bytes=40
)
ASKED = {"demand": {"b": Demand(1, NOW_S - 5)}}
