"""Engines that take over from each other: which one of a group leads, by epoch. Pure.

Theory. Of the engines of one group one is active; whoever takes over has a larger epoch (the vault grants the pool to
one epoch only). So the largest epoch that was ever heard of leads, and all others are over, also those that have not
noticed: a stopped engine that wakes up says what was true before. That is why the largest epoch is remembered when
the link that told of it is gone.

Always true: a group's newest epoch never goes back; an epoch belongs to the worker that first told of it. Engines
without a group lead themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# Groups of all deployments' generations a frontend meets in its life; one is a few hundred bytes. The group that has
# been silent for longest is forgotten first: by then its engines are long gone.
GROUPS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker says that it leads its group under an epoch."""

    namespace: str
    group: str
    epoch: int
    worker: int

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.group


class Groups:
    """The newest epoch of each group, and whose it is."""

    def __init__(self, groups_max: int = GROUPS_MAX) -> None:
        self._groups_max = groups_max
        self._newest: OrderedDict[tuple[str, str], Claim] = OrderedDict()

    def hear(self, claim: Claim) -> bool:
        """Take note of a claim; True if it leads by it."""
        key = claim.key
        newest = self._newest.get(key)
        if claim.group and (newest is None or claim.epoch > newest.epoch):
            self._newest[key] = claim
        if key in self._newest:
            self._newest.move_to_end(key)
        if len(self._newest) > self._groups_max:
            self._newest.popitem(last=False)
        return not self.objection(claim)

    def objection(self, claim: Claim) -> str:
        """Why a claim does not count, for people; "" if it does."""
        newest = self._newest.get(claim.key)
        if newest is None or claim == newest:
            return ""
        if claim.epoch > newest.epoch:
            return ""  # not heard yet
        if claim.epoch == newest.epoch:
            return f"epoch {claim.epoch} belongs to worker {newest.worker:x}"
        return f"superseded by epoch {newest.epoch}"

    def __len__(self) -> int:
        return len(self._newest)
