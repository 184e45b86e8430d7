"""What is to be done about a replica, and what is remembered of having asked for it. Plain data.

Theory. An action's id is its verb, its replica's name, the replica's turn (how often it has changed its level) and
which attempt it is. So whoever decides twice from the same facts asks for the same thing twice, and whoever carries it
out does it once; but who drains for the second time in its life is asked for something else than the first time. A
replica's name is used once: its serial is larger than all before of its model.

A reply may be lost, so an action is *flying* until what it was to do is seen, or it is said to have failed, or its
deadline passes. One to place that is overdue may have been done all the same: it goes on holding its memory until its
replica was stopped by name, which whoever carries that out answers for: who was stopped is not started after it. To
stop is to drain first, in case it serves though nobody has seen it yet.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, structs

from holdfast.core.backoff import backoff_s
from holdfast.fleet.desired import Level
from holdfast.health.bounds import Count, UnixS

ASK_S = 30.0  # for what takes no load: to drain, to stop; a node that is there answers in one
COPY_S = 120.0  # between device and host: 1 TiB at a sixth of a PCIe link's pace
BACK_OFF_S = 1.0  # after the first failure, doubling
BACK_OFF_S_MAX = 300.0  # one try in five minutes costs nobody anything
FORGIVEN_S = 900.0  # what failed longer ago than this says nothing: three times the longest back-off


class Verb(StrEnum):
    """In the order in which they are said: what gives memory back comes first."""

    STOP = "stop"
    DEMOTE = "demote"
    DRAIN = "drain"
    PROMOTE = "promote"
    PLACE = "place"


LEAVING = frozenset({Verb.STOP, Verb.DEMOTE, Verb.DRAIN})
COMING = frozenset({Verb.PLACE, Verb.PROMOTE})


def replica_name(model: str, serial: int) -> str:
    """As every process calls it: `ModelActor:<model_key>:<replica_id>`."""
    return f"ModelActor:{model}:r{serial}"


class Action(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    verb: Verb
    model: str
    serial: Count
    node: str
    turn: Count = 0  # how often its replica had changed its level
    attempt: Count = 1
    deadline_s: UnixS = 0.0
    why: str = ""
    version: str = ""  # to place, this and what follows
    level: Level = Level.HOT  # at which it is to be then
    devices: tuple[str, ...] = ()
    device_bytes: int = 0
    host_bytes: int = 0
    until_s: UnixS = 0.0  # to drain, to stop: nothing new for it, and when its requests have had their time

    @property
    def name(self) -> str:
        return replica_name(self.model, self.serial)

    @property
    def id(self) -> str:
        return f"{self.verb}/{self.name}/{self.turn}.{self.attempt}"

    @property
    def subject(self) -> str:
        """Under which its failures are counted; with a replica that was never there they are its model's."""
        return subject_of(self.verb, self.model if self.verb is Verb.PLACE else self.name)

    @property
    def subjects(self) -> tuple[str, ...]:
        """All whose failure it may be."""
        return (self.subject, node_subject(self.node)) if self.verb in COMING else (self.subject,)


def subject_of(verb: Verb, whose: str) -> str:
    return f"{verb}/{whose}"


def node_subject(node: str) -> str:
    return f"node/{node}"


class Flying(Struct, frozen=True, forbid_unknown_fields=True):
    """An action that was asked for."""

    action: Action
    overdue: bool = False


class Tries(Struct, frozen=True, forbid_unknown_fields=True):
    """How often in a row something failed, and when last."""

    failed: Count
    at_s: UnixS

    @property
    def again_s(self) -> float:
        """When it may be tried again."""
        return self.at_s + backoff_s(self.failed, BACK_OFF_S, BACK_OFF_S_MAX)


def one_more(before: Tries | None, now_s: float) -> Tries:
    """It failed again."""
    if before is None or now_s - before.at_s > FORGIVEN_S:
        return Tries(1, now_s)
    return structs.replace(before, failed=before.failed + 1, at_s=now_s)
