"""Keeps streams whose engine is gone for the standby of their group, where their KV is.

Always true: a stream that waits here is held by its set, apart from those that wait for any worker; it leaves when an
engine of its group takes work, when its wait is over (`streams.takeovers`), or when its group has no standby any more.
A stream waits for its group once since its last token: where the next engine of the group fails too, it goes anywhere.
A stream whose engine makes no token for any stream waits here too, while a standby is ready to take over.
Streams that may have killed their engine (`Standing.SUSPECT`) do not wait here: those are tried alone.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.routing.slots import Slot
from holdfast.routing.table import Standing
from holdfast.streams.flight import Awaited, Flight, WorkerSet
from holdfast.streams.link import WorkerLink
from holdfast.streams.links import Links
from holdfast.streams.takeovers import Takeovers, standby_wait_s

# Between two attempts of a stream on an engine that answers none. Control finds that out by three checks, in about 10
# seconds.
BARREN_AGAIN_S = 2.0


class GroupWaits:
    """The waits of one frontend's streams. `send` puts a stream on this worker; False: it could not."""

    def __init__(self, links: Links, send: Callable[[Flight, Slot], bool]) -> None:
        self._links = links
        self._send = send
        self._takeovers = Takeovers()

    def keep(self, flight: Flight, link: WorkerLink | None, now_s: float) -> bool:
        """Send a stream that failed on `link` to the engine that leads the group now, or hold it for the standby that
        will; False: neither, it may go anywhere."""
        if link is None or not link.group or flight.standing is not Standing.RESUMED or len(flight.failed_on) != 1:
            return False
        workers, leader = flight.workers, self._links.leader(link.claim.key)
        if leader is not None:
            return leader is not link and workers.table.is_ready(leader.slot) and self._send(flight, leader.slot)
        if not (link.gone and self._links.has_standby(link.claim.key)):
            return False
        outage = self._takeovers.lost(link.claim, now_s, lambda: _tokens_on(link) + flight.ledger.length)
        others = max(1, workers.table.routable_count)
        prefill_s = workers.prefills.estimate_s(outage.tokens / others)
        wait_s = standby_wait_s(self._takeovers.expected_s, self._takeovers.bound_s, prefill_s)
        if now_s >= outage.since_s + wait_s:
            return False
        flight.awaits = Awaited(link.claim.key, outage.since_s + wait_s)
        workers.holds.hold_apart(flight, flight.tier, flight.waits(now_s))
        return True

    def keep_barren(self, flight: Flight, link: WorkerLink | None, now_s: float) -> bool:
        """Hold a stream that its engine answers with nothing, as it does every other since: the engine is to blame, and
        its standby is about to take over. It tries the engine again meanwhile. False: the request may be to blame."""
        if link is None or not link.group or len(flight.failed_on) != 1 or link.seen.tokens > flight.worker_tokens:
            return False
        if not self._links.has_standby(link.claim.key):
            return False
        flight.awaits = Awaited(link.claim.key, now_s + BARREN_AGAIN_S)
        flight.workers.holds.hold_apart(flight, flight.tier, flight.waits(now_s))
        return True

    def bring_back(self, link: WorkerLink, now_s: float) -> None:
        """Send those that waited for the group of `link`, which takes work now, the first in line first."""
        workers, group = link.workers, link.claim.key
        if workers is None or not link.group:
            return
        self._takeovers.led(group, now_s)
        for held in workers.holds.apart():
            flight = held.item
            if flight.awaits is None or flight.awaits.group != group:
                continue
            if workers.table.is_ready(link.slot) and self._send(flight, link.slot):
                workers.holds.drop(flight)
            else:
                workers.holds.rejoin(flight, flight.standing)

    def release(self, workers: WorkerSet, now_s: float) -> None:
        """Let those go anywhere whose wait is over, or whose group has no standby any more."""
        for held in workers.holds.apart():
            awaits = held.item.awaits
            if awaits is None or now_s >= awaits.until_s or not self._links.has_standby(awaits.group):
                workers.holds.rejoin(held.item, held.item.standing)


def _tokens_on(link: WorkerLink) -> int:
    return sum(flight.ledger.length for flight in link.streams.values())
