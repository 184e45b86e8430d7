"""The route choice: least outstanding tokens among two random workers and the one that knows the prefix.

Theory. Two random choices keep load even without a scan (`routing.slots`); outstanding tokens (prompt + what may still
come) weigh requests by their work, not their number; a matched prefix is work saved, so it counts as credit. A request
costs O(1) in the number of workers: ready workers stand in a list with swap-removal, set-aside ones in a heap by time.

A request that may be what kills engines (a *suspect*) is tried alone: on a worker where all others have made a token
since they came, and which takes nothing else until the suspect has made one too. And not on a worker that is *young*:
whatever kills every new engine at once would convict whoever happens to be tried there. A worker that lived until then
and dies now says who it was.

A worker that turned a request away is full for us, whatever we have there ourselves, until it says that it has room
(several frontends share it, and it alone knows them all); then it has as many places as it said.

While capacity is short (`routing.degradation`), some requests are *limited*: new ones that are not premium may fill
only part of each worker's batch. The worker counts all its streams, and is told that bound with each of them; one that
it turned away for it says nothing of those that may have every place.

Always true: `choose` only returns a worker that is routable, not full, not set aside and not on trial; what is asked of
all workers is counted as they change, never by looking at each. Pure; `now` and randomness come in.
"""

from __future__ import annotations

import heapq
import random
from enum import IntEnum

from holdfast.core.tiers import TIER_DEFAULT
from holdfast.routing.degradation import RULES, Rules
from holdfast.routing.prefixes import PREFIX_BLOCK_TOKENS, Prefixes
from holdfast.routing.slots import Ready, Slot

# What a request is taken to cost beyond its prompt when it may generate a lot: most end earlier.
OUTPUT_TOKENS_ASSUMED_MAX = 512
# A worker that failed a request waits this long for the next one, doubling while it goes on failing.
ASIDE_S_MIN = 0.5
ASIDE_S_MAX = 8.0
# A worker is young for so long after it began to serve. Longer than an engine needs to prove what it took over
# (`engines.shadow.proving.BELIEF_S`), so that a request that kills it then does not cost the next one its KV.
YOUNG_S = 1.5


class Standing(IntEnum):
    """What a request is to whoever places it; those that wait are served in this order."""

    RESUMED = 0  # it ran before: its client is watching
    SUSPECT = 1  # engines died under it before it made a token: it is tried alone
    FRESH = 2  # it never ran


class RouteTable:
    """The workers of one set."""

    def __init__(self, rng: random.Random) -> None:
        self.slots: dict[int, Slot] = {}
        self.rules = RULES[0]
        self._ready = Ready(rng)
        self._open = Ready(rng)  # of those, for the limited ones too
        self._aside: list[tuple[float, int]] = []
        self._young: list[tuple[float, int]] = []
        self._prefixes = Prefixes()
        self.routable_count = 0
        self.places = 0.0  # of all routable workers, by their weight
        self.trials = 0  # workers that are kept for a suspect
        self._full_count = 0  # routable, and without a place for one that is limited

    def degrade(self, rules: Rules) -> None:
        """What holds from now on; all that held before is undone."""
        self.rules = rules
        for slot in self.slots.values():
            if slot.reserved:  # by a bound that is no more
                slot.in_line, slot.reserved, slot.room = False, False, 0
            self._place(slot)

    # -- membership

    def add(self, slot: Slot) -> None:
        assert slot.name not in self.slots, slot
        self.slots[slot.name] = slot
        slot.in_line, slot.reserved, slot.room = False, False, 0  # of an earlier connection
        # Its time aside, or as a young one, may have passed unseen while it was away.
        if slot.aside_until_s:
            heapq.heappush(self._aside, (slot.aside_until_s, slot.name))
        if slot.young_until_s:
            heapq.heappush(self._young, (slot.young_until_s, slot.name))
        self._place(slot)

    def begins(self, slot: Slot, now_s: float) -> None:
        """It serves from now on: connected, or as the new leader of its group."""
        slot.young_until_s = now_s + YOUNG_S
        heapq.heappush(self._young, (slot.young_until_s, slot.name))

    def remove(self, slot: Slot) -> None:
        if self.slots.get(slot.name) is slot:
            del self.slots[slot.name]
            slot.routable = False
            self._place(slot)

    def update(self, slot: Slot, *, routable: bool, admit_max: int | None = None, weight: float = 1.0) -> None:
        """What is said of it now; who is to get nothing is not routable."""
        assert self.slots.get(slot.name) is slot, slot
        assert weight > 0.0 or not routable, slot
        slot.routable, slot.weight = routable, weight if routable else 1.0
        slot.admit_max = admit_max
        self._place(slot)

    def set_aside(self, slot: Slot, now_s: float) -> None:
        """It just failed a request: others first for a while."""
        if slot.aside_until_s:
            return  # one fault fails many requests at once and counts once
        slot.aside_s = min(ASIDE_S_MAX, max(ASIDE_S_MIN, slot.aside_s * 2))
        slot.aside_until_s = now_s + slot.aside_s
        heapq.heappush(self._aside, (slot.aside_until_s, slot.name))
        self._place(slot)

    def forgive(self, slot: Slot) -> None:
        """It begins anew (it leads again): it takes work at once, whatever it failed before."""
        slot.aside_until_s = slot.aside_s = 0.0
        slot.in_line, slot.reserved, slot.room = False, False, 0
        self._place(slot)

    def turned_away(self, slot: Slot, bound: int = 0) -> None:
        """It took no request of ours: it is full until it says that it has room. `bound`: for those whom it was told to
        take while fewer streams are there; unless that is a bound which is no more, and it is to be asked again, also
        where we were in line before: it tells of room for what it refused last."""
        holds = bound in (0, self.places_in(slot))
        slot.in_line, slot.room, slot.reserved = holds, 0, holds and bound > 0
        self._place(slot)

    def has_room(self, slot: Slot, places: int) -> None:
        """It keeps so many places for us."""
        if slot.in_line:
            slot.room = places
            self._place(slot)

    def passes(self, slot: Slot) -> bool:
        """Whether we want no more of the room it had: then we are in line no longer, and it must hear that."""
        if slot.in_line and slot.room == 0:
            return False
        slot.in_line, slot.reserved, slot.room = False, False, 0
        self._place(slot)
        return True

    def praise(self, slot: Slot) -> None:
        """It finished a request: its failures are forgotten."""
        slot.aside_s = 0.0

    def tick(self, now_s: float) -> bool:
        """Bring back those whose time aside is over, and let suspects to those who are young no longer; True if any."""
        returned = False
        while self._young and self._young[0][0] <= now_s:
            _, name = heapq.heappop(self._young)
            slot = self.slots.get(name)
            if slot is not None and 0.0 < slot.young_until_s <= now_s:
                slot.young_until_s = 0.0
                returned = True
        while self._aside and self._aside[0][0] <= now_s:
            _, name = heapq.heappop(self._aside)
            slot = self.slots.get(name)
            if slot is not None and 0.0 < slot.aside_until_s <= now_s:
                slot.aside_until_s = 0.0
                self._place(slot)
                returned = True
        return returned

    def _place(self, slot: Slot) -> None:
        waits = slot.in_line and slot.room == 0
        shut = waits or slot.inflight >= min(slot.places, self.places_in(slot) or slot.places)
        full = (waits and not slot.reserved) or slot.inflight >= slot.places
        counts = (1, int(shut), slot.capacity * slot.weight) if slot.routable else (0, 0, 0.0)
        if counts != slot.counted:
            was, slot.counted = slot.counted, counts
            self.routable_count += counts[0] - was[0]
            self._full_count += counts[1] - was[1]
            self.places += counts[2] - was[2]
        sound = slot.routable and slot.aside_until_s == 0.0 and not slot.trial
        self._ready.put(slot, ready=sound and not full)
        self._open.put(slot, ready=sound and not shut)

    # -- facts

    @property
    def overloaded(self) -> bool:
        """Workers are there and none has a place for every request, because there is too much work: not because they
        failed."""
        return self._full_count > 0 and not self._open

    def places_in(self, slot: Slot) -> int:
        """How many streams may be there, whosoever, for a limited one to begin; 0: as many as it has places."""
        if self.rules.batch_multiplier >= 1.0:
            return 0
        return min(slot.capacity, self.rules.places(slot.batch, TIER_DEFAULT))

    # -- requests

    def has_place(self, standing: Standing, *, limited: bool = False) -> bool:
        """Whether `choose` would find one."""
        if standing is Standing.SUSPECT:
            return bool(self._trial_places())
        return bool(self._open if limited else self._ready)

    def is_ready(self, slot: Slot) -> bool:
        """Whether this worker has a place for a stream that ran before."""
        return slot in self._ready

    def _trial_places(self) -> list[Slot]:
        # A scan: suspects are few and rare.
        return [slot for slot in self._ready if slot.unproven == 0 and slot.young_until_s == 0.0]

    def choose(
        self, tokens: list[int], standing: Standing = Standing.FRESH, *, limited: bool = False
    ) -> Slot | None:
        """The worker for a request with these tokens, or None if none can take it now."""
        if standing is Standing.SUSPECT:
            return min(self._trial_places(), key=lambda slot: slot.load, default=None)
        ready = self._open if limited else self._ready
        if not ready:
            return None
        affine, credit = self._match(tokens, ready) if len(tokens) >= PREFIX_BLOCK_TOKENS else (None, 0)
        return ready.choose(affine, credit)

    def take(self, slot: Slot, cost: int, tokens: list[int], standing: Standing = Standing.FRESH) -> None:
        """The request goes to `slot`."""
        slot.inflight += 1
        slot.unproven += 1
        if standing is Standing.SUSPECT:
            assert slot.unproven == 1, slot
            slot.trial = True
            self.trials += 1
        slot.outstanding += cost
        # Not where it is only sent back to.
        if slot.in_line and slot.routable and not (slot.reserved and slot.room == 0):
            slot.room -= 1
            assert slot.room >= 0, slot
        self._place(slot)
        if len(tokens) >= PREFIX_BLOCK_TOKENS:
            self._prefixes.remember(tokens, slot.name)

    def settle(self, slot: Slot, standing: Standing) -> None:
        """The request made its first token on `slot`, or leaves without one: once for every `take`."""
        slot.unproven -= 1
        assert slot.unproven >= 0, slot
        if standing is Standing.SUSPECT:
            slot.trial = False
            self.trials -= 1
            self._place(slot)

    def give_back(self, slot: Slot, cost: int) -> None:
        """The request is over on `slot`."""
        slot.inflight -= 1
        slot.outstanding -= cost
        assert slot.inflight >= 0, slot
        self._place(slot)

    def _match(self, tokens: list[int], ready: Ready) -> tuple[Slot | None, int]:
        for name, known_tokens in self._prefixes.known_to(tokens):
            slot = self.slots.get(name)
            if slot is not None and slot in ready:
                return slot, known_tokens
        return None, 0


def request_cost(token_count: int, remaining_tokens: int) -> int:
    """The tokens a request is counted with while it is outstanding."""
    return token_count + min(remaining_tokens, OUTPUT_TOKENS_ASSUMED_MAX)
