"""What is seen: nodes with the leases that their vaults granted, replicas, requests that wait, actions in flight.

Theory. Memory is counted as leases, by their owner's name, never as an estimate (facts 20). What somebody is promised
(by an action in flight, or as a replica whose lease is not seen yet) and what it was granted are the same bytes: an
owner counts once, with the larger of the two. So it makes no difference whether an action's effect is seen already.

Always true: nothing here is derived from anything else here. A node's devices, host memory and replicas are one
snapshot of its own, so what is not in it is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from holdfast.fleet.actions import Flying, Tries, replica_name
from holdfast.fleet.desired import Level
from holdfast.health.bounds import Count, Seconds, UnixS
from holdfast.health.records import Demand

WHY_CHARS_MAX = 300  # of a reason that is kept: what fits into a line or two


class Memory(Struct, frozen=True, forbid_unknown_fields=True):
    """A device's, or a host's: what its vault has and has granted, by owner."""

    total_bytes: int
    leases: Mapping[str, int] = {}


class Node(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    alive: bool = True
    devices: Mapping[str, Memory] = {}
    host: Memory = Memory(0)
    on_disk: frozenset[str] = frozenset()  # models whose files are here


class Phase(StrEnum):
    """Where a replica is on its way."""

    PROVISIONING = "provisioning"  # to its level
    READY = "ready"  # at its level; HOT: it serves
    DRAINING = "draining"  # HOT, and gets nothing new
    DEMOTING = "demoting"  # its weights go to host memory
    GONE = "gone"  # its process is; its memory may not be


class Health(StrEnum):
    """Whether a HOT replica that has come up serves, as its node can tell."""

    SOUND = "sound"  # it gets requests
    UNCHECKED = "unchecked"  # an engine of it leads, and control has not passed it yet
    DOUBTED = "doubted"  # control gives it no traffic, or keeps it as the last resort only
    AWAY = "away"  # no engine of it leads: it cannot answer at all


class Replica(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    version: str = ""
    serial: Count
    node: str
    devices: tuple[str, ...] = ()
    level: Level = Level.HOT  # where it is, or is coming to
    phase: Phase = Phase.READY
    turn: Count = 0  # how often it has changed its level
    running: int = 0  # requests
    since_s: UnixS = 0.0  # at this level, or on its way to it
    idle_s: UnixS = 0.0  # since when nothing runs; 0: something does, or never did
    drain_until_s: UnixS = 0.0  # when its requests have had their time
    device_bytes: int = 0  # that it was promised on each of its devices
    host_bytes: int = 0
    came_s: Seconds = 0.0  # how long it took to come up; 0: not known
    health: Health = Health.SOUND
    ill_s: UnixS = 0.0  # since when it is not SOUND; 0: it is
    ill_why: str = ""

    @property
    def id(self) -> str:
        """Unique among its model's, for ever."""
        return f"r{self.serial}"

    @property
    def name(self) -> str:
        return replica_name(self.model, self.serial)

    @property
    def is_up(self) -> bool:
        """Return True for a HOT replica that has come up; whether it serves is `health`."""
        return self.level is Level.HOT and self.phase is Phase.READY

    @property
    def serves(self) -> bool:
        """Return True if it is up and gets requests."""
        return self.is_up and self.health is Health.SOUND

    @property
    def on_devices(self) -> bool:
        """Whether it has, or is to have, memory there; so has one that is to be WARM, until it is."""
        is_coming = self.level is Level.WARM and self.phase is Phase.PROVISIONING
        return is_coming or (self.level is Level.HOT and self.phase is not Phase.GONE)

    @property
    def in_host(self) -> bool:
        """Whether it has, or is to have, memory there."""
        return (self.level is Level.WARM and self.phase is not Phase.GONE) or self.phase is Phase.DEMOTING


class Observed(Struct, frozen=True, kw_only=True):
    """Everything at one moment."""

    nodes: Mapping[str, Node] = {}
    replicas: Mapping[str, Replica] = {}  # by name
    demand: Mapping[str, Demand] = {}  # by model; not there: nobody waits
    flying: Mapping[str, Flying] = {}  # by the action's id
    tries: Mapping[str, Tries] = {}  # by subject
    serials: Mapping[str, int] = {}  # of each model the last that was ever used
