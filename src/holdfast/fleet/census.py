"""What there is to say of one model by itself, and how much each of its replicas matters. Plain data.

A census is taken by `counting.py` and holds until something of its model changes, or its `next_s` comes; what its model
may take from others is decided by `seating.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from holdfast.fleet.actions import Verb
from holdfast.fleet.desired import Model
from holdfast.fleet.observed import Replica


class Need(IntEnum):
    """How much a HOT replica matters; only a greater need takes another's place, but see `cooldown_s`."""

    IDLE = 0  # it is wanted, and nobody asks for it
    MORE = 1  # there are others, and requests
    FIRST = 2  # requests, and no other
    KEPT = 3  # dedicated, or within a floor that is HOT


@dataclass(frozen=True, slots=True)
class Intent:
    """Something to be done that needs nobody's room. `serial` and `node`: whose, also of one that was never seen."""

    verb: Verb
    serial: int
    node: str
    why: str


class Victim(NamedTuple):
    """A HOT replica that might give way; they compare as they stand in line for it."""

    need: Need
    health: int  # the less it can do, the lower
    busy: bool
    idle_minute: int
    size: int
    reload_s: float
    name: str
    replica: Replica


@dataclass(slots=True)
class Census:
    """What there is to say of one model."""

    key: str
    model: Model | None
    intents: list[Intent] = field(default_factory=list)
    drained: list[Replica] = field(default_factory=list)  # to leave their devices now
    sinking: list[Replica] = field(default_factory=list)  # to do so when their requests have ended
    asleep: list[Replica] = field(default_factory=list)  # WARM, and could be HOT
    spare: list[Replica] = field(default_factory=list)  # WARM, and no floor needs it
    needs: list[Need] = field(default_factory=list)  # of those that are missing, each
    warm_missing: int = 0  # besides those
    old: list[Replica] = field(default_factory=list)  # HOT ones of another version, that serve
    outdated: list[Replica] = field(default_factory=list)  # WARM ones of another version, that a floor has still
    restless: int = 0  # WARM ones that come, or leave
    leaving: int = 0  # HOT ones
    coming: int = 0  # HOT ones
    broken: set[str] = field(default_factory=set)  # nodes where a replica of it has failed, to be avoided now
    last: int = 0  # the serial of one that is unfit and that nothing else could answer for; 0: there is none
    on: Counter[str] = field(default_factory=Counter)  # HOT ones, there or coming, by node
    victims: list[Victim] = field(default_factory=list)
    since_s: float = 0.0  # the first of its requests waits; 0: none does
    next_s: float | None = None

    @property
    def is_done(self) -> bool:
        """Nothing is to be decided about it beside others."""
        return not (self.needs or self.drained or self.sinking or self.warm_missing)
