"""A fleet as its commands show it: tables for people, objects for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.cli.deployments.words import age
from holdfast.cli.fleet.observed import ObservedFleet
from holdfast.cli.screen import Screen
from holdfast.cli.terminal import Cell
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import Health, LeasedMemory, Replica, ReplicaPhase
from holdfast.fleet.records import DesiredModel, NodeRecord
from holdfast.fleet.scaling import Scaling
from holdfast.spec.engines import GIB

MODELS = ("model", "name", "version", "desired", "hot", "warm", "floor", "age")
REPLICAS = ("replica", "node", "level", "phase", "running", "since", "version")
NODES = ("node", "device", "leased", "total", "replicas", "agent", "reported")
COLOURS = {ReplicaPhase.READY: "green", ReplicaPhase.GONE: "red"}


# -- for programs


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


def model_shown(observed: ObservedFleet, key: str) -> ModelShown:
    desired = observed.desired.get(key)
    found: dict[str, Any] = {
        "hot": len(observed.ready(key, Level.HOT)),
        "warm": len(observed.ready(key, Level.WARM)),
        "unmet": observed.record.unmet.get(key, ""),
        "replicas": tuple(map(_replica, observed.replicas(key))),
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


def _replica(one: Replica) -> ReplicaShown:
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
    )


def node_shown(record: NodeRecord, *, lost: bool = False) -> NodeShown:
    """Return a node as commands show it. `lost`: it did not report in time."""
    node = record.node
    return NodeShown(
        name=node.name,
        alive=node.alive and not lost,
        devices=tuple(_memory(name, memory) for name, memory in sorted(node.devices.items())),
        host=_memory("host", node.host),
        replicas=tuple(map(_replica, record.replicas)),
        agent_host=record.host,
        agent_pid=record.pid,
        told_unix_s=record.at_unix_s or None,
    )


def _memory(name: str, memory: LeasedMemory) -> MemoryShown:
    leases = dict(memory.leases)
    return MemoryShown(name=name, total_bytes=memory.total_bytes, leased_bytes=sum(leases.values()), leases=leases)


# -- for people


def show_models(screen: Screen, models: Sequence[ModelShown], now_s: float) -> None:
    screen.terminal.table(MODELS, [_model_row(one, now_s) for one in models], right=("desired", "hot", "warm"))
    for one in models:
        if one.unmet:
            screen.line(f"  {one.key}: {one.unmet}", style="yellow")
    rows = [_replica_row(each, one.version, now_s) for one in models for each in one.replicas]
    if rows:
        screen.line()
        screen.terminal.table(REPLICAS, rows, right=("running",))


def _model_row(one: ModelShown, now_s: float) -> list[Cell]:
    if one.wanted is None or one.floor is None or one.at_unix_s is None:
        return [(one.key, ""), ("removed; its replicas leave", "yellow")]
    colour = "green" if one.hot == one.wanted else "yellow"
    told = (one.floor, "") if one.autoscale is None else (f"{one.floor}, autoscaled", "")
    counts: list[Cell] = [(str(one.wanted), ""), (str(one.hot), colour), (str(one.warm), "")]
    names: list[Cell] = [(one.key, ""), (one.name or "", ""), (one.version or "", "")]
    return [*names, *counts, told, (age(now_s - one.at_unix_s), "")]


def _replica_row(one: ReplicaShown, version: str | None, now_s: float) -> list[Cell]:
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
        name = node.name if node.alive else f"{node.name} (lost)"
        whose: list[Cell] = [(name if not place else "", "" if node.alive else "red"), (memory.name, "")]
        rows.append([*whose, *size, (agent if not place else "", ""), (told if not place else "", "")])
    return rows


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
