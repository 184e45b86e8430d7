"""The workers that joined a set, and which of those that take over from each other leads.

Always true: a slot stands in a route table only while its link is here; of a group's links one gets work at most.
"""

from __future__ import annotations

import logging

from holdfast.routing.slots import Slot
from holdfast.routing.table import Standing
from holdfast.streams.flight import Flight
from holdfast.streams.groups import Groups
from holdfast.streams.link import WorkerLink
from holdfast.streams.stats import Place

log = logging.getLogger("holdfast.workers")


class Links:
    """Workers by slot, and by the group in which they take over from each other."""

    def __init__(self) -> None:
        self._by_slot: dict[Slot, WorkerLink] = {}
        self._by_group: dict[tuple[str, str], list[WorkerLink]] = {}
        self._groups = Groups()

    def enter(self, link: WorkerLink) -> None:
        self._by_slot[link.slot] = link
        if link.group:
            self._by_group.setdefault(link.claim.key, []).append(link)

    def leave(self, link: WorkerLink) -> None:
        del self._by_slot[link.slot]
        if link.group:
            group = self._by_group[link.claim.key]
            group.remove(link)
            if not group:
                del self._by_group[link.claim.key]

    def __getitem__(self, slot: Slot) -> WorkerLink:
        return self._by_slot[slot]

    def home(self, flight: Flight) -> Slot | None:
        """Where it ran before it was handed over by plan, if that only drains: whoever seemed to have a place had none,
        and it would wait for longer anywhere else, perhaps in vain. Once."""
        slot, flight.home = flight.home, None
        link = self._by_slot.get(slot) if slot is not None else None
        if link is None or link.workers is not flight.workers or link.data is None or not link.trusted:
            return None
        if not (link.active and link.share.drains) or link.draining or link.slot.trial:
            return None
        return None if flight.standing is Standing.SUSPECT else slot

    def place(self, slot: Slot) -> Place:
        """A worker as its streams leave it, or come to it."""
        link = self._by_slot[slot]
        group = link.group or link.instance.name
        return Place(slot.name, link.epoch, group, link.instance.name, link.share.fall, link.share.wrong)

    def leader(self, group: tuple[str, str]) -> WorkerLink | None:
        """Return the engine of a group that takes work; None: none does."""
        return next((link for link in self._by_group.get(group, ()) if link.slot.routable), None)

    def has_standby(self, group: tuple[str, str]) -> bool:
        """Return whether an engine of a group stands by, connected and sound, to take over."""
        return any(link.stands_by for link in self._by_group.get(group, ()))

    def lead(self, link: WorkerLink) -> list[WorkerLink]:
        """It says that it leads: all of its group, itself last."""
        if not self._groups.hear(link.claim):
            log.warning("%s is not taken as active: %s", link.instance.name, self.objection(link))
        return [*(other for other in self._by_group.get(link.claim.key, ()) if other is not link), link]

    def superseded(self, link: WorkerLink) -> str:
        """Why it leads no longer, or never did, though it says so; "": it may."""
        return self._groups.objection(link.claim) if link.active else ""

    def objection(self, link: WorkerLink) -> str:
        """Why a connected worker gets no work whatever its judge says; "" if nothing speaks against it."""
        return self.bar(link) or link.objection

    def bar(self, link: WorkerLink) -> str:
        """The same by its own word, its group's and a rollout's, whatever control decided."""
        if not link.active:
            return "standing by"
        if link.draining:
            return link.reason
        return self.superseded(link) or (link.share.reason if link.share.idle else "")
