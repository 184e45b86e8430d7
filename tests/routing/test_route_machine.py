"""The route table against a naive model of itself: every worker looked at, every time."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.routing.table import PREFIX_BLOCK_TOKENS, YOUNG_S, PriorityClass, RouteSlot, RouteTable

PICK = st.integers(0, 10_000)
PROMPTS = [[1], [5] * 3 * PREFIX_BLOCK_TOKENS, [5] * 2 * PREFIX_BLOCK_TOKENS + [6] * PREFIX_BLOCK_TOKENS]


class Naive:
    """What should be true of one worker, without any list or heap."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.present = True
        self.routable = False
        self.admit_max: int | None = None
        self.weight = 1.0
        self.aside_until_s = 0.0
        self.young_until_s = 0.0
        self.costs: list[int] = []
        self.unproven: list[PriorityClass] = []  # of those without a token yet
        self.room: int | None = None  # None: as much as its places allow

    @property
    def full(self) -> bool:
        bound = self.capacity if self.admit_max is None else min(self.capacity, self.admit_max)
        return len(self.costs) >= bound or self.room == 0

    def ready(self, priority: PriorityClass = PriorityClass.FRESH) -> bool:
        if PriorityClass.ON_TRIAL in self.unproven:
            return False
        if priority is PriorityClass.ON_TRIAL and (self.unproven or self.young_until_s):
            return False
        return self.present and self.routable and not self.aside_until_s and not self.full


class RouteMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = RouteTable(random.Random(1))
        self.slots: dict[int, RouteSlot] = {}
        self.naive: dict[int, Naive] = {}
        self.now_s = 1.0

    def pick(self, pick: int, *, present: bool = True) -> tuple[RouteSlot, Naive] | None:
        names = [name for name, naive in self.naive.items() if naive.present is present]
        if not names:
            return None
        name = names[pick % len(names)]
        return self.slots[name], self.naive[name]

    @initialize(capacities=st.lists(st.integers(1, 3), min_size=1, max_size=2))
    def some_serve(self, capacities: list[int]) -> None:
        for place, capacity in enumerate(capacities):
            self.add(capacity)
            self.update(place, routable=True, admit_max=None)

    @precondition(lambda self: len(self.slots) < 3)
    @rule(capacity=st.integers(0, 3))
    def add(self, capacity: int) -> None:
        name = len(self.slots)
        self.slots[name], self.naive[name] = RouteSlot(name, capacity), Naive(capacity)
        self.table.add(self.slots[name])

    @rule(pick=PICK)
    def remove(self, pick: int) -> None:
        """As the pool does it: its requests are given back before it goes."""
        if found := self.pick(pick):
            slot, naive = found
            for priority in naive.unproven:
                self.table.mark_proven(slot, priority)
            for cost in naive.costs:
                self.table.give_back(slot, cost)
            self.table.remove(slot)
            naive.present, naive.routable, naive.costs, naive.unproven = False, False, [], []

    @rule(pick=PICK)
    def come_back(self, pick: int) -> None:
        if found := self.pick(pick, present=False):
            self.table.add(found[0])
            found[1].present, found[1].room = True, None

    @rule(pick=PICK)
    def begins(self, pick: int) -> None:
        if found := self.pick(pick):
            self.table.mark_young(found[0], self.now_s)
            found[1].young_until_s = self.now_s + YOUNG_S

    @rule(pick=PICK)
    def turned_away(self, pick: int) -> None:
        if found := self.pick(pick):
            self.table.turned_away(found[0])
            found[1].room = 0

    @rule(pick=PICK, places=st.integers(1, 3))
    def has_room(self, pick: int, places: int) -> None:
        if found := self.pick(pick):
            self.table.has_room(found[0], places)
            found[1].room = None if found[1].room is None else places

    @rule(pick=PICK)
    def passes(self, pick: int) -> None:
        if found := self.pick(pick):
            assert self.table.give_up_reservations(found[0]) is (found[1].room != 0)
            found[1].room = found[1].room and None

    @rule(
        pick=PICK,
        routable=st.booleans(),
        admit_max=st.sampled_from([None, 0, 1, 2]),
        weight=st.sampled_from([1.0, 0.5]),
    )
    def update(self, pick: int, routable: bool, admit_max: int | None, weight: float = 1.0) -> None:
        if found := self.pick(pick):
            self.table.update(found[0], routable=routable, admit_max=admit_max, weight=weight)
            found[1].routable, found[1].admit_max, found[1].weight = routable, admit_max, weight

    @rule(pick=PICK)
    def set_aside(self, pick: int) -> None:
        if found := self.pick(pick):
            self.table.set_aside(found[0], self.now_s)
            found[1].aside_until_s = found[1].aside_until_s or found[0].aside_until_s

    @rule(pick=PICK)
    def forgive(self, pick: int) -> None:
        if found := self.pick(pick):
            self.table.clear_faults(found[0])
            found[1].aside_until_s, found[1].room = 0.0, None

    @rule(seconds=st.sampled_from([0.1, 0.5, 3.0, 20.0]))
    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        present = [naive for naive in self.naive.values() if naive.present]
        back = [naive for naive in present if 0 < naive.aside_until_s <= self.now_s]
        grown = [naive for naive in present if 0 < naive.young_until_s <= self.now_s]
        assert self.table.tick(self.now_s) is bool(back or grown)
        for naive in back:
            naive.aside_until_s = 0.0
        for naive in grown:
            naive.young_until_s = 0.0

    @rule(prompt=st.sampled_from(PROMPTS), cost=st.integers(1, 500), priority=st.sampled_from(PriorityClass))
    def choose_and_take(self, prompt: list[int], cost: int, priority: PriorityClass) -> None:
        slot = self.table.choose(prompt, priority)
        ready = [name for name, naive in self.naive.items() if naive.ready(priority)]
        assert (slot is None) is (not ready)
        assert self.table.has_place(priority) is bool(ready)
        if slot is not None:
            assert slot.name in ready
            self.table.assign(slot, cost, prompt, priority)
            naive = self.naive[slot.name]
            naive.costs.append(cost)
            naive.unproven.append(priority)
            naive.room = None if naive.room is None else naive.room - 1

    @rule(pick=PICK)
    def first_token(self, pick: int) -> None:
        if (found := self.pick(pick)) and found[1].unproven:
            self.table.mark_proven(found[0], found[1].unproven.pop())

    @rule(pick=PICK, finished=st.booleans())
    def give_back(self, pick: int, finished: bool) -> None:
        if (found := self.pick(pick)) and len(found[1].costs) > len(found[1].unproven):
            self.table.give_back(found[0], found[1].costs.pop())
            if finished:
                self.table.forget_failures(found[0])

    @invariant()
    def counts_are_right(self) -> None:
        for name, naive in self.naive.items():
            slot = self.slots[name]
            assert slot.inflight == len(naive.costs)
            assert slot.outstanding == sum(naive.costs)
            assert slot.inflight >= 0
            assert slot.unproven == len(naive.unproven)
            assert slot.trial is (PriorityClass.ON_TRIAL in naive.unproven)

    @invariant()
    def ready_list_is_right(self) -> None:
        ready = {name for name, naive in self.naive.items() if naive.ready()}
        assert {slot.name for slot in self.table._ready} == ready
        assert len(self.table._ready) == len(ready)
        assert all(slot in self.table._ready for slot in self.table.slots.values() if slot.name in ready)

    @invariant()
    def facts_are_right(self) -> None:
        routable = [naive for naive in self.naive.values() if naive.present and naive.routable]
        assert self.table.routable_count == len(routable)
        full = [naive for naive in routable if naive.full]
        assert self.table.overloaded is (bool(full) and not any(naive.ready() for naive in routable))
        assert self.table.places == sum(naive.capacity * naive.weight for naive in routable)


RouteMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestRouteMachine = RouteMachine.TestCase
