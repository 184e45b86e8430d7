"""What a rollout says of worker sets: which stay, which may come back, and whose streams may end elsewhere. Pure.

Theory. A stream belongs to the set that it began in. Where the cards are the same another set would go on with it, as
far as a card can tell, and the answer says that it did; where they differ it would go on with another story. So a
stream crosses to another card only when its own set is gone for good and the manifest of the one that takes it allows
it. Until that is known it waits: a rollout that is undone brings its set back. What has not begun has no story yet, and
goes wherever its prompt means the same.

Always true: a set of which no rollout ever spoke is treated as one whose workers crashed; a set is gone for good only
when the rollout's memory no longer has it, which it has while there is a way back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from holdfast.streams.flight import Flight, WorkerSet


class Fate(Enum):
    """What becomes of a set."""

    UNTOLD = "nobody says"
    STAYS = "it has replicas that have proved themselves"
    AWAY = "it has none yet, or again, and may have some"
    GONE = "it is gone for good"
    UNWANTED = "nobody wants its model any more"


FOR_GOOD = (Fate.GONE, Fate.UNWANTED)
TAKEN_AWAY = (Fate.AWAY, *FOR_GOOD)


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a rollout says at one moment, by namespace."""

    staying: frozenset[str]
    kept: frozenset[str]  # those that stay, and those that may come, or come back
    open: frozenset[str] = frozenset()  # where streams of sets that are gone for good may end


NOTHING = Ruling(frozenset(), frozenset())


class Rulings:
    """The last one, and all sets that any was about."""

    def __init__(self) -> None:
        self._last = NOTHING
        self._known: frozenset[str] = frozenset()

    def hear(self, ruling: Ruling, there: Iterable[str]) -> None:
        """`there`: namespaces that somebody may still ask about."""
        self._known = ruling.kept | (self._known & frozenset(there))
        self._last = ruling

    def fate(self, namespace: str) -> Fate:
        if namespace not in self._known:
            return Fate.UNTOLD
        if namespace in self._last.staying:
            return Fate.STAYS
        return Fate.AWAY if namespace in self._last.kept else Fate.GONE

    def may_go(self, flight: Flight, other: WorkerSet) -> bool:
        """Whether a stream may go on in another set, if that has a place."""
        own = flight.workers
        if not other.can_stand_in_for(own):
            return False
        fate = self.fate(own.namespace)
        if fate is Fate.UNTOLD or own.checksum == other.checksum or not flight.changes_in(other):
            return True
        return fate is Fate.GONE and other.namespace in self._last.open
