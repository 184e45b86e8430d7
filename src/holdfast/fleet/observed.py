"""The observed state: nodes with the leases that their vaults granted, replicas, waiting requests, pending actions.

Memory is counted as leases, by their owner's name, never as an estimate (facts 20). What a replica is promised (by a
pending action, or as a replica whose lease is not observed yet) and what it was granted are the same bytes: an owner
counts once, with the larger of the two. So it makes no difference whether an action's effect is observed already.

Always true: nothing here is derived from anything else here. A node's devices, host memory and replicas are one
snapshot of its own, so what is not in it is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from holdfast.fleet.actions import PendingAction, Tries, replica_name
from holdfast.fleet.desired import Level
from holdfast.health.bounds import Count, Seconds, UnixS
from holdfast.health.records import Demand

WHY_CHARS_MAX = 300  # of a reason that is kept: what fits into a line or two


class LeasedMemory(Struct, frozen=True):
    """The memory of a device or a host: in all, and what its vaults have granted, by owner."""

    total_bytes: int
    leases: Mapping[str, int] = {}


class Node(Struct, frozen=True, kw_only=True):
    name: str
    alive: bool = True
    devices: Mapping[str, LeasedMemory] = {}
    host: LeasedMemory = LeasedMemory(0)
    on_disk: frozenset[str] = frozenset()  # models whose files are here


class ReplicaPhase(StrEnum):
    """How far a replica is on the way to its level, or off it."""

    PROVISIONING = "provisioning"  # on the way to its level
    READY = "ready"  # at its level; HOT: it serves
    DRAINING = "draining"  # HOT, and gets no new requests
    DEMOTING = "demoting"  # its weights go to host memory
    GONE = "gone"  # its process has ended; its memory may still be leased


class Health(StrEnum):
    """Whether a HOT replica that has come up serves, as its node can tell."""

    SOUND = "sound"  # it gets requests
    UNCHECKED = "unchecked"  # an engine of it leads, and control has not passed it yet
    DOUBTED = "doubted"  # control gives it no traffic, or keeps it as the last resort only; it may recover
    UNFIT = "unfit"  # and control asks for another in its place (`health/replacement.py`)
    AWAY = "away"  # no engine of it leads: it cannot answer at all


class Replica(Struct, frozen=True, kw_only=True):
    model: str
    version: str = ""
    serial: Count
    node: str
    devices: tuple[str, ...] = ()
    level: Level = Level.HOT  # at which it is, or to which it is coming
    phase: ReplicaPhase = ReplicaPhase.READY
    turn: Count = 0  # how often it has changed its level
    running: int = 0  # requests
    since_s: UnixS = 0.0  # at this level, or on its way to it
    idle_s: UnixS = 0.0  # since when nothing runs; 0: something does, or never did
    drain_until_s: UnixS = 0.0  # the deadline of its requests
    device_bytes: int = 0  # that it was promised on each of its devices
    host_bytes: int = 0
    came_s: Seconds = 0.0  # how long it took to come up; 0: not known
    health: Health = Health.SOUND
    ill_s: UnixS = 0.0  # since when it is not SOUND; 0: it is
    ill_why: str = ""

    @property
    def id(self) -> str:
        """Return a name that no other replica of its model ever has."""
        return f"r{self.serial}"

    @property
    def name(self) -> str:
        return replica_name(self.model, self.serial)

    @property
    def is_up(self) -> bool:
        """Return True for a HOT replica that has come up; whether it serves is `health`."""
        return self.level is Level.HOT and self.phase is ReplicaPhase.READY

    @property
    def serves(self) -> bool:
        """Return True if it is up and gets requests."""
        return self.is_up and self.health is Health.SOUND

    @property
    def on_devices(self) -> bool:
        """Return True if it has, or is to have, memory on devices; one that is to be WARM has, until it is."""
        is_coming = self.level is Level.WARM and self.phase is ReplicaPhase.PROVISIONING
        return is_coming or (self.level is Level.HOT and self.phase is not ReplicaPhase.GONE)

    @property
    def in_host(self) -> bool:
        """Return True if it has, or is to have, host memory."""
        return (self.level is Level.WARM and self.phase is not ReplicaPhase.GONE) or self.phase is ReplicaPhase.DEMOTING


class Observed(Struct, frozen=True, kw_only=True):
    """All nodes, replicas, demand and pending actions at one moment."""

    nodes: Mapping[str, Node] = {}
    replicas: Mapping[str, Replica] = {}  # by name
    demand: Mapping[str, Demand] = {}  # by model; none: no request waits
    pending: Mapping[str, PendingAction] = {}  # by the action's id
    tries: Mapping[str, Tries] = {}  # by subject
    serials: Mapping[str, int] = {}  # of each model the last that was ever used
