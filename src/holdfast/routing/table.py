"""The route table chooses the worker for a request: of two random workers and the one that has the prompt's prefix in
its cache, the one with the fewest outstanding tokens.

Theory. Taking the less loaded of two random workers keeps load even without a scan. Outstanding tokens (prompt + what
may still come) weigh requests by their work, not their number; a matched prefix saves work, so it is subtracted. A
request costs O(1) in the number of workers: ready workers are in a list with swap-removal, those set aside in a heap by
time. A worker of weight 0.5 should get half of its normal traffic. So its load counts double, and every second time it
is chosen another worker is taken instead, which also works when there is no load.

A request that may be killing engines (a *suspect*) runs without other unproven requests. It goes to a worker where
every other request has made a token, and which takes no other request until the suspect has made one too. It never goes
to a *young* worker, because a fault that kills every new engine would look like the suspect's. If an older worker dies
then, the suspect did it.

A worker that refused a request counts as full until it reports room; then it has as many places as it reported. Several
frontends share it, so our own count of streams is not enough.

While capacity is short (`routing.degradation`), new requests that are not premium are *limited*: they may fill only
part of each worker's batch. Each such request carries that bound, and the worker, which counts all its streams, applies
it. Its refusal of a limited request says nothing about unlimited ones.

Always true: `choose` only returns a worker that is routable, not full, not set aside and not on trial; sums over all
workers are updated at each change, never by a scan. Pure; `now` and randomness are passed in.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from holdfast.core.tiers import TIER_DEFAULT
from holdfast.routing.degradation import RULES, Rules

# How often another worker is drawn instead of one of reduced weight. Bounded, because all may have reduced weight.
REDRAWN_MAX = 2


@dataclass(slots=True, eq=False, repr=False)
class RouteSlot:
    name: int
    capacity: int  # its places, for running and waiting streams
    batch: int = field(init=False)  # of those, the places of streams that run at once
    admit_max: int | None = None  # a smaller bound while on probation
    inflight: int = 0
    outstanding: int = 0
    routable: bool = False
    weight: float = 1.0  # the share of its normal traffic that it gets; above 0 where it is routable
    unproven: int = 0  # requests that have yet to make their first token here
    trial: bool = False  # one of those is a suspect
    young_until_s: float = 0.0  # it gets no suspect before this time; 0: it has served for a while
    aside_until_s: float = 0.0
    aside_s: float = 0.0
    in_line: bool = False  # it refused a request: we may only send as many as it reports room for
    reserved: bool = False  # it refused a limited request: it may have places for unlimited ones
    room: int = 0
    counted: tuple[int, int, float] = (0, 0, 0.0)  # its part of the table's sums: routable, full, places by weight

    def __post_init__(self) -> None:
        self.batch = self.capacity

    @property
    def places(self) -> int:
        return self.capacity if self.admit_max is None else min(self.admit_max, self.capacity)

    @property
    def weighted_cost(self) -> float:
        """Return the outstanding tokens divided by the weight."""
        return self.outstanding / self.weight

    def __repr__(self) -> str:
        state = "routable" if self.routable else "not routable"
        return f"<Slot {self.name:x} {self.inflight}/{self.capacity} {self.outstanding} tokens {state}>"


class ReadySlots:
    """The workers that have a place, as a list with swap-removal."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._slots: list[RouteSlot] = []
        self._at: dict[RouteSlot, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[RouteSlot]:
        return iter(self._slots)

    def __contains__(self, slot: RouteSlot) -> bool:
        return slot in self._at

    def put(self, slot: RouteSlot, *, ready: bool) -> None:
        if ready is (slot in self._at):
            return
        if ready:
            self._at[slot] = len(self._slots)
            self._slots.append(slot)
            return
        place, last = self._at.pop(slot), self._slots.pop()
        if last is not slot:
            self._slots[place] = last
            self._at[last] = place

    def choose(self, affine: RouteSlot | None, credit: int) -> RouteSlot | None:
        """Return the less loaded of two random workers, or `affine`, with `credit` subtracted from its load."""
        slots = self._slots
        if len(slots) <= 1:
            return slots[0] if slots else None
        best = self._lesser(*(slots if len(slots) == 2 else (slots[place] for place in self._places(len(slots)))))
        if affine is not None and affine.weighted_cost - credit <= best.weighted_cost:
            best = affine
        for _ in range(REDRAWN_MAX):
            if best.weight == 1.0 or self._rng.random() < best.weight:
                break
            best = self._another(best)
        return best

    def _another(self, slot: RouteSlot) -> RouteSlot:
        others, own = len(self._slots) - 1, self._at[slot]
        if others == 1:
            return self._slots[1 - own]
        rest = [self._slots[place + (place >= own)] for place in self._places(others)]
        return self._lesser(*rest)

    def _places(self, count: int) -> tuple[int, int]:
        """Return two different random indices below `count`."""
        first = self._rng.randrange(count)
        second = self._rng.randrange(count - 1)
        return first, second + (second >= first)

    @staticmethod
    def _lesser(one: RouteSlot, other: RouteSlot) -> RouteSlot:
        return one if one.weighted_cost <= other.weighted_cost else other


# Prefix keys per request: 64 blocks of 64 tokens find a shared system prompt or a long chat, at a bounded cost.
PREFIX_BLOCK_TOKENS = 64
PREFIX_BLOCKS_MAX = 64
PREFIX_ENTRIES_MAX = 65_536


class Prefixes:
    """An LRU map from prefixes to the worker that last got a prompt with that prefix: its KV cache likely has it. A
    prompt's leading blocks are keyed by a hash chain. Only a hint: a wrong guess costs a prefill. Consecutive calls
    with the same list of tokens, which must not change, hash it once."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, int] = OrderedDict()
        self._last: tuple[list[int], list[int]] = ([], [])  # a prompt and its keys: the request's choices share both

    def known_to(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """Yield workers that got the same beginning, each with its length in tokens, the longest first."""
        keys = self._keys(tokens)
        for index in range(len(keys) - 1, -1, -1):
            name = self._names.get(keys[index])
            if name is not None:
                yield name, (index + 1) * PREFIX_BLOCK_TOKENS

    def remember(self, tokens: list[int], name: int) -> None:
        for key in self._keys(tokens):
            self._names[key] = name
            self._names.move_to_end(key)
        while len(self._names) > PREFIX_ENTRIES_MAX:
            self._names.popitem(last=False)

    def _keys(self, tokens: list[int]) -> list[int]:
        if self._last[0] is not tokens:
            self._last = (tokens, prefix_keys(tokens))
        return self._last[1]

    def __contains__(self, key: int) -> bool:
        return key in self._names

    def __len__(self) -> int:
        return len(self._names)


def prefix_keys(tokens: list[int]) -> list[int]:
    """Return a hash chain over the leading blocks; equal keys mean equal prefixes (up to hash collisions, which only
    cost a worse route)."""
    keys: list[int] = []
    chain = 0
    for block in range(min(len(tokens) // PREFIX_BLOCK_TOKENS, PREFIX_BLOCKS_MAX)):
        start = block * PREFIX_BLOCK_TOKENS
        chain = hash((chain, *tokens[start : start + PREFIX_BLOCK_TOKENS]))
        keys.append(chain)
    return keys


# Upper bound of the assumed output tokens of a request: most end earlier than they may.
OUTPUT_TOKENS_ASSUMED_MAX = 512
# A worker that failed a request gets none for this long, doubled at each further failure.
ASIDE_S_MIN = 0.5
ASIDE_S_MAX = 8.0
# How long a worker is young after it began to serve. Longer than an engine needs to verify what it took over
# (`engines.host.proving.BELIEF_S`), so that a request that kills it then does not cost the next engine its KV.
YOUNG_S = 1.5


class PriorityClass(IntEnum):
    """The priority of a request's stream; waiting streams are served in this order."""

    RESUMED = 0  # it ran before; its client may already have tokens
    ON_TRIAL = 1  # a suspect: engines died before it made a token
    FRESH = 2  # it never ran


class RouteTable:
    """The workers of one set, and which of them takes the next request."""

    def __init__(self, rng: random.Random) -> None:
        self.slots: dict[int, RouteSlot] = {}
        self.rules = RULES[0]
        self._ready = ReadySlots(rng)
        self._open = ReadySlots(rng)  # of those, workers with a place for limited requests too
        self._aside: list[tuple[float, int]] = []
        self._young: list[tuple[float, int]] = []
        self._prefixes = Prefixes()
        self.routable_count = 0
        self.places = 0.0  # of all routable workers, by their weight
        self.trials = 0  # workers that run a suspect
        self._full_count = 0  # routable workers without a place for a limited request

    def set_rules(self, rules: Rules) -> None:
        """Apply the rules of a degradation level in place of the earlier ones."""
        self.rules = rules
        for slot in self.slots.values():
            if slot.reserved:  # it refused by a bound that no longer applies
                slot.in_line, slot.reserved, slot.room = False, False, 0
            self._place(slot)

    # -- membership

    def add(self, slot: RouteSlot) -> None:
        assert slot.name not in self.slots, slot
        self.slots[slot.name] = slot
        slot.in_line, slot.reserved, slot.room = False, False, 0  # of an earlier connection
        # While it was away, its time aside or as a young worker may have ended.
        if slot.aside_until_s:
            heapq.heappush(self._aside, (slot.aside_until_s, slot.name))
        if slot.young_until_s:
            heapq.heappush(self._young, (slot.young_until_s, slot.name))
        self._place(slot)

    def mark_young(self, slot: RouteSlot, now_s: float) -> None:
        """Note that the worker serves from now on: it connected, or leads its group."""
        slot.young_until_s = now_s + YOUNG_S
        heapq.heappush(self._young, (slot.young_until_s, slot.name))

    def remove(self, slot: RouteSlot) -> None:
        if self.slots.get(slot.name) is slot:
            del self.slots[slot.name]
            slot.routable = False
            self._place(slot)

    def update(self, slot: RouteSlot, *, routable: bool, admit_max: int | None = None, weight: float = 1.0) -> None:
        """Set whether the worker gets requests, and its weight."""
        assert self.slots.get(slot.name) is slot, slot
        assert weight > 0.0 or not routable, slot
        slot.routable, slot.weight = routable, weight if routable else 1.0
        slot.admit_max = admit_max
        self._place(slot)

    def set_aside(self, slot: RouteSlot, now_s: float) -> None:
        """Prefer other workers for a while: this one just failed a request."""
        if slot.aside_until_s:
            return  # one fault fails many requests at once and counts once
        slot.aside_s = min(ASIDE_S_MAX, max(ASIDE_S_MIN, slot.aside_s * 2))
        slot.aside_until_s = now_s + slot.aside_s
        heapq.heappush(self._aside, (slot.aside_until_s, slot.name))
        self._place(slot)

    def clear_faults(self, slot: RouteSlot) -> None:
        """Clear the worker's failures and refusals, so that it takes work at once: it leads again."""
        slot.aside_until_s = slot.aside_s = 0.0
        slot.in_line, slot.reserved, slot.room = False, False, 0
        self._place(slot)

    def turned_away(self, slot: RouteSlot, bound: int = 0) -> None:
        """Note that the worker refused a request: it is full until it reports room. `bound`: the limit of streams that
        the request carried. If that limit no longer applies, the worker counts as not full, even if it had refused
        another request before: it reports room only for what it refused last."""
        holds = bound in (0, self.places_in(slot))
        slot.in_line, slot.room, slot.reserved = holds, 0, holds and bound > 0
        self._place(slot)

    def has_room(self, slot: RouteSlot, places: int) -> None:
        """Note that the worker keeps `places` places for us."""
        if slot.in_line:
            slot.room = places
            self._place(slot)

    def give_up_reservations(self, slot: RouteSlot) -> bool:
        """Give up the places that the worker keeps for us; return False if we still wait for them. On True the caller
        must tell the worker."""
        if slot.in_line and slot.room == 0:
            return False
        slot.in_line, slot.reserved, slot.room = False, False, 0
        self._place(slot)
        return True

    def forget_failures(self, slot: RouteSlot) -> None:
        """Forget the worker's failures: it finished a request."""
        slot.aside_s = 0.0

    def tick(self, now_s: float) -> bool:
        """Bring back workers after their time aside, and end the young time of others; return True if any changed."""
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

    def _place(self, slot: RouteSlot) -> None:
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
        """Return True if no worker has a place for a limited request, and at least one of them is full, not failing."""
        return self._full_count > 0 and not self._open

    def places_in(self, slot: RouteSlot) -> int:
        """Return how many streams, of all frontends, the worker may run before it refuses a limited request; 0: as many
        as it has places."""
        if self.rules.batch_multiplier >= 1.0:
            return 0
        return min(slot.capacity, self.rules.places(slot.batch, TIER_DEFAULT))

    # -- requests

    def has_place(self, priority: PriorityClass, *, limited: bool = False) -> bool:
        """Return True if `choose` would find a worker."""
        if priority is PriorityClass.ON_TRIAL:
            return bool(self._trial_places())
        return bool(self._open if limited else self._ready)

    def is_ready(self, slot: RouteSlot) -> bool:
        """Return True if this worker has a place for a stream that ran before."""
        return slot in self._ready

    def _trial_places(self) -> list[RouteSlot]:
        # A scan: suspects are few and rare.
        return [slot for slot in self._ready if slot.unproven == 0 and slot.young_until_s == 0.0]

    def choose(
        self, tokens: list[int], priority: PriorityClass = PriorityClass.FRESH, *, limited: bool = False
    ) -> RouteSlot | None:
        """Return the worker for a request with these tokens, or None if none can take it now."""
        if priority is PriorityClass.ON_TRIAL:
            return min(self._trial_places(), key=lambda slot: slot.weighted_cost, default=None)
        ready = self._open if limited else self._ready
        if not ready:
            return None
        affine, credit = self._match(tokens, ready) if len(tokens) >= PREFIX_BLOCK_TOKENS else (None, 0)
        return ready.choose(affine, credit)

    def assign(
        self, slot: RouteSlot, cost: int, tokens: list[int], priority: PriorityClass = PriorityClass.FRESH
    ) -> None:
        """Count a request that goes to `slot`."""
        slot.inflight += 1
        slot.unproven += 1
        if priority is PriorityClass.ON_TRIAL:
            assert slot.unproven == 1, slot
            slot.trial = True
            self.trials += 1
        slot.outstanding += cost
        # Room is not used up by a request that is only sent back to its worker.
        if slot.in_line and slot.routable and not (slot.reserved and slot.room == 0):
            slot.room -= 1
            assert slot.room >= 0, slot
        self._place(slot)
        if len(tokens) >= PREFIX_BLOCK_TOKENS:
            self._prefixes.remember(tokens, slot.name)

    def mark_proven(self, slot: RouteSlot, priority: PriorityClass) -> None:
        """Note that a request made its first token on `slot`, or left without one. Called once for every `assign`."""
        slot.unproven -= 1
        assert slot.unproven >= 0, slot
        if priority is PriorityClass.ON_TRIAL:
            slot.trial = False
            self.trials -= 1
            self._place(slot)

    def give_back(self, slot: RouteSlot, cost: int) -> None:
        """Free the place of a request that is over on `slot`."""
        slot.inflight -= 1
        slot.outstanding -= cost
        assert slot.inflight >= 0, slot
        self._place(slot)

    def _match(self, tokens: list[int], ready: ReadySlots) -> tuple[RouteSlot | None, int]:
        for name, known_tokens in self._prefixes.known_to(tokens):
            slot = self.slots.get(name)
            if slot is not None and slot in ready:
                return slot, known_tokens
        return None, 0


def request_cost(token_count: int, remaining_tokens: int) -> int:
    """Return the outstanding tokens that a request counts for."""
    return token_count + min(remaining_tokens, OUTPUT_TOKENS_ASSUMED_MAX)
