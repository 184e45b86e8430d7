"""A fleet as its commands show it: tables for people, objects for programs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from holdfast.cli.deployments.words import age
from holdfast.cli.fleet.observed import ObservedFleet
from holdfast.cli.requests import WAITS, RequestRow
from holdfast.cli.screen import Screen
from holdfast.cli.terminal import Cell
from holdfast.fleet.desired import Cordon, Level
from holdfast.fleet.observed import Health, LeasedMemory, Node, Replica, ReplicaPhase
from holdfast.fleet.records import DesiredModel, NodeRecord
from holdfast.fleet.scaling import Scaling
from holdfast.spec.engines import GIB

MODELS = ("model", "name", "version", "desired", "hot", "warm", "floor", "age")
MORE_OF_MODELS = ("state", "running", "waiting")  # of `-o wide`
REPLICAS = ("replica", "node", "level", "phase", "running", "since", "version")
MORE_OF_REPLICAS = ("requests",)
REQUESTS_MAX = 4  # named for each replica; `get requests` lists all
STATE_COLOURS = {"READY": "green", "BUSY": "green", "PROVISIONING": "yellow"}
NODES = ("node", "device", "leased", "total", "replicas", "agent", "reported")
COLOURS = {ReplicaPhase.READY: "green", ReplicaPhase.GONE: "red"}


# -- for programs


class RequestShown(msgspec.Struct, frozen=True, kw_only=True):
    """A request on a replica."""

    id: str
    started_unix_s: float | None


class ReplicaShown(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    id: str
    version: str
    node: str
    devices: tuple[str, ...]
    level: str
    phase: str
    running: int
    since_unix_s: float
    health: str = "sound"  # of one that is up: "sound", "unchecked", "doubted", "unfit" or "away"
    ill_why: str = ""
    requests: tuple[RequestShown, ...] | None = None  # those on it; None: no frontend was asked


class ModelShown(msgspec.Struct, frozen=True, kw_only=True):
    """One model; its desired fields are None where only its replicas are left."""

    key: str
    name: str | None = None  # by which clients ask for it
    version: str | None = None
    generation: int | None = None
    wanted: int | None = None  # HOT, now
    hot: int = 0  # that are READY, and so are
    warm: int = 0
    replicas_min: int | None = None
    replicas_max: int | None = None
    floor: str | None = None
    dedicated: bool | None = None
    nodes: tuple[str, ...] = ()
    per_node_max: int | None = None
    devices: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    autoscale: Scaling | None = None
    at_unix_s: float | None = None
    unmet: str = ""  # why a replica is missing
    # BUSY: a replica runs a request; READY: one could; PROVISIONING: none serves, and one should; STOPPED: none should.
    state: str = ""
    running: int = 0  # requests on replicas, as nodes report them
    waiting: int | None = None  # requests without a replica; None: no frontend was asked
    replicas: tuple[ReplicaShown, ...] = ()


class MemoryShown(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    total_bytes: int
    leased_bytes: int
    leases: dict[str, int]


class NodeShown(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    alive: bool
    devices: tuple[MemoryShown, ...]
    host: MemoryShown
    replicas: tuple[ReplicaShown, ...]
    agent_host: str
    agent_pid: int
    told_unix_s: float | None
    cordon: Cordon | None = None  # None: it takes new replicas

    @property
    def title(self) -> str:
        """Return its name and, where it is not simply in use, its state."""
        states = ["" if self.alive else "lost" if self.agent_host else "gone"]
        if self.cordon is not None:
            drains = "draining" if self.replicas else "drained"
            states.append(drains if self.cordon.drain else "cordoned")
        told = ", ".join(filter(None, states))
        return f"{self.name} ({told})" if told else self.name


def model_shown(observed: ObservedFleet, key: str, requests: Sequence[RequestRow] | None = None) -> ModelShown:
    """Return a model as commands show it; `requests`: those of all models, if frontends were asked."""
    desired, hot = observed.desired.get(key), len(observed.ready(key, Level.HOT))
    own = [one for one in requests if one.model == (desired.name if desired else key)] if requests is not None else None
    running = sum(one.running for one in observed.replicas(key))
    if own is not None:
        running = max(running, sum(one.state not in WAITS for one in own))
    wanted = desired is not None and desired.model.hot > 0
    found: dict[str, Any] = {
        "state": "BUSY" if hot and running else "READY" if hot else "PROVISIONING" if wanted else "STOPPED",
        "running": running,
        "waiting": sum(one.state in WAITS for one in own) if own is not None else None,
        "hot": hot,
        "warm": len(observed.ready(key, Level.WARM)),
        "unmet": observed.record.unmet.get(key, ""),
        "replicas": tuple(_replica(one, own) for one in observed.replicas(key)),
    }
    return ModelShown(key=key, **found, **(_wanted(desired) if desired is not None else {}))


def _wanted(desired: DesiredModel) -> dict[str, Any]:
    model = desired.model
    return {
        "name": desired.name,
        "version": model.version,
        "generation": model.generation,
        "wanted": model.hot,
        "replicas_min": model.replicas_min,
        "replicas_max": model.replicas_max,
        "floor": model.floor.word,
        "dedicated": model.dedicated,
        "nodes": tuple(sorted(model.nodes)),
        "per_node_max": model.per_node_max,
        "devices": model.devices,
        "device_bytes": model.device_bytes,
        "host_bytes": model.host_bytes,
        "autoscale": desired.scaling,
        "at_unix_s": desired.at_unix_s,
    }


def _replica(one: Replica, requests: Sequence[RequestRow] | None = None) -> ReplicaShown:
    return ReplicaShown(
        name=one.name,
        id=one.id,
        version=one.version,
        node=one.node,
        devices=one.devices,
        level=one.level.word,
        phase=str(one.phase),
        running=one.running,
        since_unix_s=one.since_s,
        health=str(one.health),
        ill_why=one.ill_why,
        requests=tuple(_on_replica(one, requests)) if requests is not None else None,
    )


def _on_replica(replica: Replica, requests: Sequence[RequestRow]) -> Iterator[RequestShown]:
    """Yield the requests on a replica. Its processes' names end with its serial, which no other of its model has."""
    for one in requests:
        if one.replica.rpartition("-")[2] == str(replica.serial) and one.state not in WAITS:
            yield RequestShown(id=one.id, started_unix_s=one.started)


def nodes_shown(observed: ObservedFleet) -> list[NodeShown]:
    """Return all nodes as commands show them, with those that are gone and still cordoned."""
    return [node_shown(observed, name) for name in sorted({*observed.nodes, *observed.cordons})]


def node_shown(observed: ObservedFleet, name: str) -> NodeShown:
    """Return a node as commands show it."""
    record, lost = observed.nodes.get(name, NodeRecord(node=Node(name=name, alive=False))), observed.record.lost
    node = record.node
    return NodeShown(
        name=node.name,
        alive=node.alive and name not in lost,
        devices=tuple(_memory(name, memory) for name, memory in sorted(node.devices.items())),
        host=_memory("host", node.host),
        replicas=tuple(map(_replica, record.replicas)),
        agent_host=record.host,
        agent_pid=record.pid,
        told_unix_s=record.at_unix_s or None,
        cordon=observed.cordons.get(name),
    )


def _memory(name: str, memory: LeasedMemory) -> MemoryShown:
    leases = dict(memory.leases)
    return MemoryShown(name=name, total_bytes=memory.total_bytes, leased_bytes=sum(leases.values()), leases=leases)


# -- for people


def show_models(screen: Screen, models: Sequence[ModelShown], now_s: float, *, wide: bool = False) -> None:
    """Show the models, then their replicas; `wide`: also each model's state, and the requests on each replica."""
    titles = (*MODELS, *MORE_OF_MODELS) if wide else MODELS
    cells = [_model_row(one, now_s, wide=wide) for one in models]
    screen.terminal.table(titles, cells, right=("desired", "hot", "warm", "running", "waiting"))
    for one in models:
        if one.unmet:
            screen.line(f"  {one.key}: {one.unmet}", style="yellow")
    rows = [_replica_row(each, one.version, now_s, wide=wide) for one in models for each in one.replicas]
    if rows:
        screen.line()
        screen.terminal.table((*REPLICAS, *MORE_OF_REPLICAS) if wide else REPLICAS, rows, right=("running",))


def _model_row(one: ModelShown, now_s: float, *, wide: bool) -> list[Cell]:
    if one.wanted is None or one.floor is None or one.at_unix_s is None:
        return [(one.key, ""), ("removed; its replicas leave", "yellow")]
    colour = "green" if one.hot == one.wanted else "yellow"
    told = (one.floor, "") if one.autoscale is None else (f"{one.floor}, autoscaled", "")
    counts: list[Cell] = [(str(one.wanted), ""), (str(one.hot), colour), (str(one.warm), "")]
    names: list[Cell] = [(one.key, ""), (one.name or "", ""), (one.version or "", "")]
    waiting = "–" if one.waiting is None else str(one.waiting)
    state: list[Cell] = [(one.state, STATE_COLOURS.get(one.state, "")), (str(one.running), ""), (waiting, "")]
    return [*names, *counts, told, (age(now_s - one.at_unix_s), ""), *(state if wide else ())]


def _replica_row(one: ReplicaShown, version: str | None, now_s: float, *, wide: bool) -> list[Cell]:
    requests = one.requests or ()
    named = [f"{each.id} ({age(now_s - each.started_unix_s)})" for each in requests if each.started_unix_s is not None]
    more = [f"and {len(named) - REQUESTS_MAX} more"] if len(named) > REQUESTS_MAX else []
    return [
        (one.name, ""),
        (" ".join((one.node, *one.devices)), ""),
        (one.level, ""),
        (one.phase, COLOURS.get(ReplicaPhase(one.phase), "yellow"))
        if one.health == Health.SOUND
        else (one.health, "red"),
        (str(one.running), ""),
        (age(now_s - one.since_unix_s) if one.since_unix_s else "", ""),
        (one.version, "" if one.version == version else "yellow"),
        *([(", ".join((*named[:REQUESTS_MAX], *more)), "")] if wide else ()),
    ]


def show_nodes(screen: Screen, nodes: Sequence[NodeShown], now_s: float) -> None:
    """Show a line for each device, and one for the host's memory."""
    rows = [row for node in nodes for row in _node_rows(node, now_s)]
    screen.terminal.table(NODES, rows, right=("leased", "total", "replicas"))


def _node_rows(node: NodeShown, now_s: float) -> list[list[Cell]]:
    agent = f"{node.agent_host} pid {node.agent_pid}" if node.agent_pid else ""
    told = f"{age(now_s - node.told_unix_s)} ago" if node.told_unix_s is not None else ""
    rows = []
    for place, memory in enumerate((*node.devices, node.host)):
        here = sum(name in memory.leases for name in (one.name for one in node.replicas))
        full = "yellow" if memory.leased_bytes > memory.total_bytes else ""
        size: list[Cell] = [(_gib(memory.leased_bytes), full), (_gib(memory.total_bytes), ""), (str(here), "")]
        colour = "red" if not node.alive else "yellow" if node.cordon is not None else ""
        whose: list[Cell] = [(node.title if not place else "", colour), (memory.name, "")]
        rows.append([*whose, *size, (agent if not place else "", ""), (told if not place else "", "")])
    return rows


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
