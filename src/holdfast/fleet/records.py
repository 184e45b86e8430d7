"""The stored records of a fleet: desired models, nodes, the orders of each node, and the controller's own record.

Commands write desired models and cordons, and nothing else. A node's agent writes its own record, leased, whole and in
order. The one controller writes orders and, before them, the fleet's record: the serials it has used, what failed, and,
for frontends, which replicas get no new requests and why a model has no worker.

Always true: a desired model is changed only from what was read, so that of two concurrent changes the second sees the
first. Orders and the fleet's record have one writer: a controller that finds another's name there orders nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct

from holdfast.core.errors import UserError
from holdfast.discovery.keys import CORDONS, FLEETS, MODELS, NODES, ORDERS
from holdfast.fleet.actions import Action, Tries
from holdfast.fleet.desired import Cordon, Model
from holdfast.fleet.observed import Node, Replica
from holdfast.fleet.scaling import Scaling
from holdfast.health.bounds import Count, UnixS
from holdfast.spec.names import pod_name


class DesiredModel(Struct, frozen=True, kw_only=True):
    """The desired state of one model, as it was last set."""

    name: str  # that clients use
    model: Model
    manifest: str  # its text: one worker service, named like the model's key
    scaling: Scaling | None = None  # None: an operator sets the number
    at_unix_s: UnixS = 0.0


class NodeRecord(Struct, frozen=True, kw_only=True):
    """A node at one moment, as its agent reports it."""

    node: Node
    replicas: tuple[Replica, ...] = ()
    # Results of actions that are still in its orders: why each failed. "": it is done.
    answers: Mapping[str, str] = {}
    number: Count = 0  # of this record, by this agent
    at_unix_s: UnixS = 0.0  # when it was written; 0: not known
    again_s: float = 0.0  # within which it is written again though nothing changed; 0: it is not
    pid: int = 0
    host: str = ""
    processes: Mapping[str, tuple[str, ...]] = {}  # of each replica, by its name; named as in `holdfast status`


class Orders(Struct, frozen=True, kw_only=True):
    """What one node is to do, and is not known to have done."""

    by: str = ""  # the controller
    actions: tuple[Action, ...] = ()
    overdue: frozenset[str] = frozenset()  # ids of those past their deadline


class FleetRecord(Struct, frozen=True, kw_only=True):
    """What a controller must not forget, which replicas get no new requests, and which models miss a replica."""

    by: str = ""
    serials: Mapping[str, int] = {}
    tries: Mapping[str, Tries] = {}
    idle: tuple[str, ...] = ()  # replicas that get no new requests, by `process_name`
    unmet: Mapping[str, str] = {}  # models that miss a replica, and why
    hopeless: tuple[
        str, ...
    ] = ()  # of those: models that cannot be placed with the current nodes; waiting requests are failed
    lost: tuple[str, ...] = ()  # nodes that did not report in time: their last report does not count
    stands: tuple[str, ...] = ()  # of those: replicas are up, none serves, and no other comes
    whys: Mapping[str, str] = {}  # models that failed to start, and why they last did
    cordoned: tuple[str, ...] = ()  # nodes whose cordon the controller knows of: orders after this obey it


T = TypeVar("T", DesiredModel, Cordon, NodeRecord, Orders, FleetRecord)


def desired_key(deployment: str, model: str) -> str:
    return f"{MODELS}{deployment}/{model}"


def node_key(deployment: str, node: str) -> str:
    return f"{NODES}{deployment}/{node}"


def cordon_key(deployment: str, node: str) -> str:
    return f"{CORDONS}{deployment}/{node}"


def orders_key(deployment: str, node: str) -> str:
    return f"{ORDERS}{deployment}/{node}"


def fleet_key(deployment: str) -> str:
    return FLEETS + deployment


def process_name(deployment: str, model: str, version: str, serial: int) -> str:
    """Return the name of a replica's worker, without an engine's suffix."""
    return f"{pod_name(deployment, model, version)}-{serial}"


def read(kind: type[T], key: str, data: bytes) -> T:
    """Decode a record; raise UserError if it cannot be read."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise UserError(f"the store's {key} cannot be read: {error}") from error


def read_all(kind: type[T], prefix: str, values: Mapping[str, bytes]) -> dict[str, T]:
    """Return the records under a prefix that can be read, by the rest of their key."""
    found = {}
    for key, data in values.items():
        if key.startswith(prefix):
            try:
                found[key.removeprefix(prefix)] = msgspec.json.decode(data, type=kind)
            except (msgspec.DecodeError, ValueError):
                continue
    return found
