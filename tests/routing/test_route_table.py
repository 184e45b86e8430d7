"""The route choice: balance, affinity, time aside, and what a choice costs; who is ready is `test_route_machine`'s."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from holdfast.routing import table as prefixes_module
from holdfast.routing.table import (
    ASIDE_S_MAX,
    ASIDE_S_MIN,
    OUTPUT_TOKENS_ASSUMED_MAX,
    PREFIX_BLOCK_TOKENS,
    PREFIX_BLOCKS_MAX,
    RouteSlot,
    RouteTable,
    prefix_keys,
    request_cost,
)

LONG = list(range(10 * PREFIX_BLOCK_TOKENS))


def make_table(count: int, capacity: int = 1000, seed: int = 1) -> RouteTable:
    table = RouteTable(random.Random(seed))
    for name in range(1, count + 1):
        slot = RouteSlot(name, capacity)
        table.add(slot)
        table.update(slot, routable=True)
    return table


class CountingSlot(RouteSlot):
    """Counts how often its load is looked at."""

    __slots__ = ("looks",)

    def __init__(self, name: int, capacity: int) -> None:
        self.looks = 0
        super().__init__(name, capacity)

    def __getattribute__(self, attribute: str) -> object:
        if attribute == "outstanding":
            object.__setattr__(self, "looks", object.__getattribute__(self, "looks") + 1)
        return super().__getattribute__(attribute)


def slots_looked_at(workers: int, choices: int) -> float:
    table = RouteTable(random.Random(1))
    slots: list[CountingSlot] = []
    for name in range(workers):
        slots.append(CountingSlot(name, 1000))
        table.add(slots[-1])
        table.update(slots[-1], routable=True)
    for slot in slots:
        slot.looks = 0
    for _ in range(choices):
        chosen = table.choose(LONG)
        assert chosen is not None
        table.assign(chosen, 10, LONG)
        table.give_back(chosen, 10)
    return sum(slot.looks for slot in slots) / choices


def test_a_choice_costs_the_same_with_any_number_of_workers() -> None:
    """As many slots are looked at among 4,000 workers as among 4."""
    assert slots_looked_at(4000, 50) <= slots_looked_at(4, 50) + 1


def test_two_choices_keep_load_even() -> None:
    """10,000 equal requests on 100 workers: the fullest is within a few of the average (one random choice: ~30)."""
    table = make_table(100)
    for _ in range(10_000):
        slot = table.choose([1])
        assert slot is not None
        table.assign(slot, 10, [1])
    loads = [slot.inflight for slot in table.slots.values()]
    assert sum(loads) == 10_000
    assert max(loads) - 100 <= 5


def test_load_is_outstanding_tokens_not_requests() -> None:
    """Of two workers the one with one huge request is fuller than the one with three small ones."""
    table = make_table(2)
    one, two = table.slots.values()
    table.assign(one, 30_000, [1])
    for _ in range(3):
        table.assign(two, 100, [1])
    assert table.choose([1]) is two


def test_the_worker_that_knows_the_prefix_is_preferred_up_to_its_credit() -> None:
    """Credit is the matched tokens: less load than that ahead and it wins, more and it loses."""
    table = make_table(50)
    affine = table.slots[7]
    table.assign(affine, 0, LONG)
    credit = len(LONG)
    for extra, wins in ((credit, True), (credit + 1, False)):
        affine.outstanding = extra
        chosen = Counter(table.choose([*LONG, 1, 2, 3]).name for _ in range(50))  # type: ignore[union-attr]
        assert (chosen == {7: 50}) is wins


def test_a_part_of_the_prefix_gives_a_part_of_the_credit() -> None:
    """Two blocks in common are two blocks of credit."""
    table = make_table(50)
    affine = table.slots[7]
    table.assign(affine, 0, LONG)
    shared = [*LONG[: 2 * PREFIX_BLOCK_TOKENS], *([9] * 5 * PREFIX_BLOCK_TOKENS)]
    affine.outstanding = 2 * PREFIX_BLOCK_TOKENS
    assert table.choose(shared) is affine
    affine.outstanding += 1
    assert table.choose(shared) is not affine


def test_remembered_prefixes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used go first."""
    monkeypatch.setattr(prefixes_module, "PREFIX_ENTRIES_MAX", 20)
    table = make_table(1)
    slot = table.slots[1]
    for number in range(100):
        table.assign(slot, 0, [number] * PREFIX_BLOCK_TOKENS)
        table.give_back(slot, 0)
    assert len(table._prefixes) == 20
    assert all(key in table._prefixes for key in prefix_keys([99] * PREFIX_BLOCK_TOKENS))


def test_prefix_keys_are_a_bounded_chain() -> None:
    """A key names all blocks before it, and a huge prompt has no more keys than the bound."""
    keys = prefix_keys(LONG)
    changed = prefix_keys([999, *LONG[1:]])
    assert len(keys) == 10
    assert not set(keys) & set(changed)
    assert prefix_keys(LONG[:-1]) == keys[:-1]
    assert len(prefix_keys([1] * 200_000)) == PREFIX_BLOCKS_MAX


def test_failing_again_doubles_the_time_aside_up_to_a_bound() -> None:
    """0.5, 1, 2, … s; one fault that fails many requests counts once; a finished request starts over."""
    table = make_table(1)
    slot = table.slots[1]
    now_s, times = 0.0, []
    for _ in range(7):
        table.set_aside(slot, now_s)
        until_s = slot.aside_until_s
        table.set_aside(slot, now_s)
        assert slot.aside_until_s == until_s
        times.append(until_s - now_s)
        now_s = until_s
        assert table.tick(now_s)
    assert times == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert max(times) == ASIDE_S_MAX
    table.forget_failures(slot)
    table.set_aside(slot, now_s)
    assert slot.aside_until_s - now_s == ASIDE_S_MIN


def test_one_name_is_one_worker() -> None:
    """A second slot of the same name is our own bug, as is a place given back that was never taken; removing a stranger
    of that name changes nothing."""
    table = make_table(1)
    with pytest.raises(AssertionError):
        table.add(RouteSlot(1, 5))
    table.remove(RouteSlot(1, 5))
    assert table.choose([1]) is table.slots[1]
    with pytest.raises(AssertionError):
        table.give_back(table.slots[1], 0)


def test_a_request_is_counted_with_its_prompt_and_a_bounded_output() -> None:
    """Most streams end long before max_tokens, so that counts up to a bound."""
    assert request_cost(100, 20) == 120
    assert request_cost(100, 100_000) == 100 + OUTPUT_TOKENS_ASSUMED_MAX
    assert request_cost(100, 0) == 100


def test_a_prefix_is_hashed_once_for_all_choices_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 choices of one long prompt, each chosen for and taken, cost one pass over its tokens."""
    hashed: list[int] = []

    def counted(tokens: list[int]) -> list[int]:
        hashed.append(len(tokens))
        return prefix_keys(tokens)

    monkeypatch.setattr(prefixes_module, "prefix_keys", counted)
    table = make_table(2)
    for _ in range(128):
        slot = table.choose(LONG)
        assert slot is not None
        table.assign(slot, 10, LONG)
    table.choose(list(LONG))  # another request's prompt
    assert hashed == [len(LONG), len(LONG)]


def test_affinity_never_overrides_readiness() -> None:
    """The worker that knows the prefix is passed over while it is full, aside or not routable."""
    table = make_table(3, capacity=2)
    affine = table.slots[2]
    table.assign(affine, 0, LONG)
    assert table.choose(LONG) is affine
    table.assign(affine, 0, LONG)
    assert table.choose(LONG) is not affine
    table.give_back(affine, 0)
    assert table.choose(LONG) is affine
    table.set_aside(affine, 10.0)
    assert table.choose(LONG) is not affine
    table.tick(20.0)
    assert table.choose(LONG) is affine
    table.update(affine, routable=False)
    assert table.choose(LONG) is not affine
    table.remove(affine)
    assert table.choose(LONG) is not affine


@pytest.mark.parametrize("back_after_s", [0.1, 5.0])
def test_time_aside_goes_on_while_a_worker_is_away(back_after_s: float) -> None:
    """A worker that was set aside, left and came back is aside until its time, not for ever."""
    table = make_table(1)
    slot = table.slots[1]
    table.set_aside(slot, 10.0)
    table.remove(slot)
    table.tick(10.0 + back_after_s)
    table.add(slot)
    table.update(slot, routable=True)
    table.tick(10.0 + max(back_after_s, ASIDE_S_MIN))
    assert table.choose([1]) is slot


def share_of_one(workers: int, under_way: int, weight: float) -> tuple[float, float]:
    """Of 20,000 requests, of which so many run at once: what a worker of this weight gets, and each of the others."""
    table, rng = make_table(workers), random.Random(2)
    table.update(table.slots[1], routable=True, weight=weight)
    running: list[tuple[RouteSlot, int]] = []
    taken: Counter[int] = Counter()
    for _ in range(20_000):
        if running and len(running) >= under_way:
            table.give_back(*running.pop(rng.randrange(len(running))))
        slot, cost = table.choose([1]), rng.randrange(50, 500)
        assert slot is not None
        table.assign(slot, cost, [1])
        taken[slot.name] += 1
        running.append((slot, cost))
    one = taken.pop(1)
    return one / 20_000, taken.total() / 20_000 / (workers - 1)


@pytest.mark.parametrize("workers", [2, 3, 8, 40])
def test_a_worker_of_half_weight_gets_half(workers: int) -> None:
    """Where nothing else runs it gets half of what it would; where much does, half of what each of the others gets."""
    idle, _ = share_of_one(workers, 1, 0.5)
    would, _ = share_of_one(workers, 1, 1.0)
    assert 0.4 < idle / would < 0.6
    for under_way in (workers, 8 * workers):
        busy, others = share_of_one(workers, under_way, 0.5)
        assert 0.38 < busy / others < 0.62, (workers, under_way)


def test_one_of_half_weight_is_taken_where_there_is_no_other() -> None:
    """A weight is a share among others: alone, or where all have the same, nobody is passed over."""
    table = make_table(1)
    table.update(table.slots[1], routable=True, weight=0.5)
    assert all(table.choose([1]) is table.slots[1] for _ in range(100))
    table = make_table(4)
    for slot in table.slots.values():
        table.update(slot, routable=True, weight=0.5)
    taken = Counter(table.choose([1]).name for _ in range(4000))  # type: ignore[union-attr]
    assert min(taken.values()) > 800


def test_a_known_prefix_does_not_undo_a_weight() -> None:
    """Every second request goes elsewhere, though it alone knows the prefix."""
    table = make_table(4)
    known = table.slots[3]
    table.assign(known, 0, LONG)
    table.update(known, routable=True, weight=0.5)
    taken = Counter(table.choose(LONG).name for _ in range(1000))  # type: ignore[union-attr]
    assert 400 < taken[3] < 600


def test_who_is_to_get_nothing_is_not_routable() -> None:
    """Weight 0 in the table is our own bug: it would be drawn, and never be let go."""
    table = make_table(1)
    with pytest.raises(AssertionError):
        table.update(table.slots[1], routable=True, weight=0.0)
