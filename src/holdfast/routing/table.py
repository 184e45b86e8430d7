"""The route choice: least outstanding tokens among two random workers and the one that knows the prefix.

Theory. Two random choices keep load even without a scan; outstanding tokens (prompt + what may still come) weigh
requests by their work, not their number; a matched prefix is work saved, so it counts as credit. A request costs
O(1) in the number of workers: ready workers stand in a list with swap-removal, set-aside ones in a heap by time.

A request that may be what kills engines (a *suspect*) is tried alone: on a worker where all others have made a token
since they came, and which takes nothing else until the suspect has made one too. Then a death says who it was.

Always true: `choose` only returns a worker that is routable, not full, not set aside and not on trial. Pure; `now`
and randomness come in.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from enum import IntEnum

# What a request is taken to cost beyond its prompt when it may generate a lot: most end earlier.
OUTPUT_TOKENS_ASSUMED_MAX = 512
# Prefix keys per request: 64 blocks of 64 tokens find a shared system prompt or a long chat, at a bounded cost.
PREFIX_BLOCK_TOKENS = 64
PREFIX_BLOCKS_MAX = 64
PREFIX_ENTRIES_MAX = 65_536
# A worker that failed a request waits this long for the next one, doubling while it goes on failing.
ASIDE_S_MIN = 0.5
ASIDE_S_MAX = 8.0


class Standing(IntEnum):
    """What a request is to whoever places it; those that wait are served in this order."""

    RESUMED = 0  # it ran before: its client is watching
    SUSPECT = 1  # engines died under it before it made a token: it is tried alone
    FRESH = 2  # it never ran


class Slot:
    """One worker, as routing sees it."""

    __slots__ = (
        "admit_max",
        "aside_s",
        "aside_until_s",
        "capacity",
        "inflight",
        "name",
        "outstanding",
        "place",
        "routable",
        "trial",
        "unproven",
    )

    def __init__(self, name: int, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.admit_max: int | None = None  # a smaller bound while on probation
        self.inflight = 0
        self.outstanding = 0
        self.routable = False
        self.unproven = 0  # requests that have yet to make their first token here
        self.trial = False  # one of those is a suspect
        self.aside_until_s = 0.0
        self.aside_s = 0.0
        self.place = -1  # index in the ready list, -1: not in it

    @property
    def full(self) -> bool:
        bound = self.capacity if self.admit_max is None else min(self.admit_max, self.capacity)
        return self.inflight >= bound

    def __repr__(self) -> str:
        state = "routable" if self.routable else "not routable"
        return f"<Slot {self.name:x} {self.inflight}/{self.capacity} {self.outstanding} tokens {state}>"


class RouteTable:
    """The workers of one set."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.slots: dict[int, Slot] = {}
        self._ready: list[Slot] = []
        self._aside: list[tuple[float, int]] = []
        self._prefixes: OrderedDict[int, int] = OrderedDict()
        self._last: tuple[list[int], list[int]] = ([], [])  # a prompt and its keys: the request's choices share both

    # -- membership

    def add(self, slot: Slot) -> None:
        assert slot.name not in self.slots, slot
        self.slots[slot.name] = slot
        if slot.aside_until_s:  # its time aside may have passed unseen while it was away
            heapq.heappush(self._aside, (slot.aside_until_s, slot.name))
        self._place(slot)

    def remove(self, slot: Slot) -> None:
        if self.slots.get(slot.name) is slot:
            del self.slots[slot.name]
            slot.routable = False
            self._place(slot)

    def update(self, slot: Slot, *, routable: bool, admit_max: int | None = None) -> None:
        assert self.slots.get(slot.name) is slot, slot
        slot.routable = routable
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
        self._place(slot)

    def praise(self, slot: Slot) -> None:
        """It finished a request: its failures are forgotten."""
        slot.aside_s = 0.0

    def tick(self, now_s: float) -> bool:
        """Bring back those whose time aside is over; True if any came back."""
        returned = False
        while self._aside and self._aside[0][0] <= now_s:
            _, name = heapq.heappop(self._aside)
            slot = self.slots.get(name)
            if slot is not None and 0.0 < slot.aside_until_s <= now_s:
                slot.aside_until_s = 0.0
                self._place(slot)
                returned = True
        return returned

    def _place(self, slot: Slot) -> None:
        ready = slot.routable and slot.aside_until_s == 0.0 and not slot.full and not slot.trial
        if ready and slot.place < 0:
            slot.place = len(self._ready)
            self._ready.append(slot)
        elif not ready and slot.place >= 0:
            last = self._ready.pop()
            if last is not slot:
                self._ready[slot.place] = last
                last.place = slot.place
            slot.place = -1

    # -- facts

    @property
    def routable_count(self) -> int:
        return sum(1 for slot in self.slots.values() if slot.routable)

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    @property
    def all_full(self) -> bool:
        """There are routable workers, and none of them has a place."""
        routable = [slot for slot in self.slots.values() if slot.routable]
        return bool(routable) and all(slot.full for slot in routable)

    # -- requests

    def has_place(self, standing: Standing) -> bool:
        """Whether `choose` would find one."""
        return bool(self._trial_places() if standing is Standing.SUSPECT else self._ready)

    def _trial_places(self) -> list[Slot]:
        return [slot for slot in self._ready if slot.unproven == 0]  # a scan: suspects are few and rare

    def choose(self, tokens: list[int], standing: Standing = Standing.FRESH) -> Slot | None:
        """The worker for a request with these tokens, or None if none can take it now."""
        if standing is Standing.SUSPECT:
            return min(self._trial_places(), key=_load, default=None)
        ready = self._ready
        count = len(ready)
        if count == 0:
            return None
        if count <= 2:
            picks = ready
        else:
            first = self._rng.randrange(count)
            second = self._rng.randrange(count - 1)
            picks = [ready[first], ready[second + (second >= first)]]
        affine, credit = self._match(tokens) if len(tokens) >= PREFIX_BLOCK_TOKENS else (None, 0)
        best = min(picks, key=_load)
        if affine is not None and affine.outstanding - credit <= best.outstanding:
            return affine
        return best

    def take(self, slot: Slot, cost: int, tokens: list[int], standing: Standing = Standing.FRESH) -> None:
        """The request goes to `slot`."""
        slot.inflight += 1
        slot.unproven += 1
        if standing is Standing.SUSPECT:
            assert slot.unproven == 1, slot
            slot.trial = True
        slot.outstanding += cost
        self._place(slot)
        if len(tokens) >= PREFIX_BLOCK_TOKENS:
            self._remember(tokens, slot.name)

    def settle(self, slot: Slot, standing: Standing) -> None:
        """The request made its first token on `slot`, or leaves without one: once for every `take`."""
        slot.unproven -= 1
        assert slot.unproven >= 0, slot
        if standing is Standing.SUSPECT:
            slot.trial = False
            self._place(slot)

    def give_back(self, slot: Slot, cost: int) -> None:
        """The request is over on `slot`."""
        slot.inflight -= 1
        slot.outstanding -= cost
        assert slot.inflight >= 0, slot
        self._place(slot)

    def _match(self, tokens: list[int]) -> tuple[Slot | None, int]:
        keys = self._keys(tokens)
        for index in range(len(keys) - 1, -1, -1):
            name = self._prefixes.get(keys[index])
            slot = self.slots.get(name) if name is not None else None
            if slot is not None and slot.place >= 0:
                return slot, (index + 1) * PREFIX_BLOCK_TOKENS
        return None, 0

    def _keys(self, tokens: list[int]) -> list[int]:
        """Hashed once for all that is asked of one list, which nobody writes to."""
        if self._last[0] is not tokens:
            self._last = (tokens, prefix_keys(tokens))
        return self._last[1]

    def _remember(self, tokens: list[int], name: int) -> None:
        for key in self._keys(tokens):
            self._prefixes[key] = name
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > PREFIX_ENTRIES_MAX:
            self._prefixes.popitem(last=False)


def _load(slot: Slot) -> int:
    return slot.outstanding


def prefix_keys(tokens: list[int]) -> list[int]:
    """A hash chain over the leading blocks; equal keys mean equal prefixes (up to hash collisions, which only
    cost a worse route)."""
    keys: list[int] = []
    chain = 0
    for block in range(min(len(tokens) // PREFIX_BLOCK_TOKENS, PREFIX_BLOCKS_MAX)):
        start = block * PREFIX_BLOCK_TOKENS
        chain = hash((chain, *tokens[start : start + PREFIX_BLOCK_TOKENS]))
        keys.append(chain)
    return keys


def request_cost(token_count: int, remaining_tokens: int) -> int:
    """The tokens a request is counted with while it is outstanding."""
    return token_count + min(remaining_tokens, OUTPUT_TOKENS_ASSUMED_MAX)
