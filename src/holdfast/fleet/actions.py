"""An action: what a node is to do about a replica, and what the controller remembers of having ordered it. Plain data.

An action's id is its verb, its replica's name, the replica's turn (how often it has changed its level) and the attempt.
So a controller that decides twice from the same facts orders the same thing twice, and the agent does it once; but a
replica that drains for the second time in its life gets another order than the first time. A replica's name is used
once: its serial is larger than all before of its model.

A reply may be lost, so an action is *pending* until its effect is observed, or it is reported as failed, or its
deadline passes. An overdue order to place may have been carried out all the same: it goes on holding its memory until
its replica was stopped by name, and an agent never starts a replica after it was told to stop it. To stop is to drain
first, in case the replica serves and was not observed yet.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, structs

from holdfast.core.backoff import backoff_s
from holdfast.fleet.desired import Level
from holdfast.health.bounds import Count, UnixS

ASK_S = 30.0  # to drain or stop, which load nothing: a live node answers within one second
COPY_S = 120.0  # between device and host: 1 TiB at a sixth of a PCIe link's pace
BACK_OFF_S = 1.0  # after the first failure, doubling
BACK_OFF_S_MAX = 300.0  # one try in five minutes costs nothing
FORGIVEN_S = 900.0  # older failures do not count: three times the longest back-off


class Verb(StrEnum):
    """What a node is told to do, in the order in which actions are carried out: what frees memory comes first."""

    STOP = "stop"
    DEMOTE = "demote"
    DRAIN = "drain"
    PROMOTE = "promote"
    PLACE = "place"


LEAVING = frozenset({Verb.STOP, Verb.DEMOTE, Verb.DRAIN})
COMING = frozenset({Verb.PLACE, Verb.PROMOTE})


def replica_name(model: str, serial: int) -> str:
    """Return the name that every process uses: `ModelActor:<model_key>:<replica_id>`."""
    return f"ModelActor:{model}:r{serial}"


class Action(Struct, frozen=True, kw_only=True):
    """One order about one replica."""

    verb: Verb
    model: str
    serial: Count
    node: str
    turn: Count = 0  # how often its replica had changed its level
    attempt: Count = 1
    deadline_s: UnixS = 0.0
    why: str = ""
    version: str = ""  # this and what follows: of an order to place
    level: Level = Level.HOT  # at which it is to be then
    devices: tuple[str, ...] = ()
    device_bytes: int = 0
    host_bytes: int = 0
    until_s: UnixS = 0.0  # to drain or stop: the deadline of its requests

    @property
    def name(self) -> str:
        return replica_name(self.model, self.serial)

    @property
    def id(self) -> str:
        return f"{self.verb}/{self.name}/{self.turn}.{self.attempt}"

    @property
    def subject(self) -> str:
        """Return what its failures are counted under: its replica, or of an order to place its model."""
        return subject_of(self.verb, self.model if self.verb is Verb.PLACE else self.name)

    @property
    def subjects(self) -> tuple[str, ...]:
        """Return everything whose failure it may be."""
        return (self.subject, node_subject(self.node)) if self.verb in COMING else (self.subject,)


def subject_of(verb: Verb, whose: str) -> str:
    return f"{verb}/{whose}"


def node_subject(node: str) -> str:
    return f"node/{node}"


class PendingAction(Struct, frozen=True, forbid_unknown_fields=True):
    """An action that was ordered, and whose effect was not observed yet."""

    action: Action
    overdue: bool = False


class Tries(Struct, frozen=True):
    """How often in a row something failed, and when last."""

    failed: Count
    at_s: UnixS

    @property
    def retry_at_s(self) -> float:
        """Return when it may be tried again."""
        return self.at_s + backoff_s(self.failed, BACK_OFF_S, BACK_OFF_S_MAX)


def count_failure(before: Tries | None, now_s: float) -> Tries:
    """Return the failures with one more."""
    if before is None or now_s - before.at_s > FORGIVEN_S:
        return Tries(1, now_s)
    return structs.replace(before, failed=before.failed + 1, at_s=now_s)
