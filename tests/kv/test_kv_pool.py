"""The owner's allocator against a simple model, through any sequence of acts, deaths, adoptions and fences: what is
found, what is handed out, and what goes first when room is short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.kv import adopt
from holdfast.kv.index import FREE, FULL, OPEN, Index, Misuse
from holdfast.kv.pool import KvUse, NoRoom, Pool
from tests.rigs.kv_index import KEYS, filled, fresh, geometry

SHAPE = geometry(5)
BLOCKS = range(SHAPE.block_count)
STARTS, LENGTHS = st.sampled_from([0, 8, 16]), st.integers(1, 3)
SERVED = st.tuples(STARTS, LENGTHS, st.booleans())
NEWS = st.sampled_from(["fence", "late", "resumed"])


class PoolMachine(RuleBasedStateMachine):
    """Streams come and go, owners die. The model knows who holds what, which content each block has, and when it was
    last used: by a stream that lives, or by one that had ended."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(fresh(SHAPE, 1), SHAPE)
        self.content: dict[int, bytes] = {}
        self.used_at: dict[int, int] = {}
        self.live: dict[int, bool] = {}
        self.depth: dict[int, int] = {}
        self.now = 0
        self.shut: set[int] = set()
        self.own(Pool(self.index, 1))

    def own(self, pool: Pool) -> None:
        self.pool = pool
        self.streams: list[tuple[list[int], int | None, int]] = []  # held blocks, an open one last, its generation
        self.holds: Counter[int] = Counter()
        self.twins: dict[int, int] = {}  # an open block, and the one that answers for its key and is held with it
        self.adopted = set(self.full())  # and not used or found since
        self.found_at: dict[int, int] = {}  # what this owner knows and the next does not
        self.awaiting, self.fence_awaited = True, bool(self.shut)
        self.asked = self.found = 0

    # -- the model

    def full(self) -> dict[int, bytes]:
        entries = {block: self.index.entry(block) for block in BLOCKS}
        return {block: entry.key for block, entry in entries.items() if entry.state == FULL}

    def awaited(self) -> list[int]:
        """Of streams that ran when the last owner died, and have not come back: the deepest goes first."""
        blocks = [block for block in self.adopted if self.live[block]]
        return sorted(blocks, key=lambda block: (-self.depth[block], self.used_at[block]))

    def order(self) -> list[int]:
        """In which the cached blocks go: those of no running stream as they were adopted, then those released since,
        last the awaited ones; by their last use."""
        awaited = self.awaited()
        cached = [block for block in self.full() if not self.holds[block] and block not in awaited]
        age = {block: max(self.used_at[block], self.found_at.get(block, 0)) for block in cached}
        oldest = sorted(cached, key=lambda block: (block not in self.adopted, age[block]))
        cold = [block for block in oldest if block in self.adopted]
        return oldest + awaited if self.awaiting else cold + awaited + oldest[len(cold) :]

    def touch(self, block: int, live: bool) -> None:
        self.now += 1
        self.used_at[block], self.live[block] = self.now, live
        self.adopted.discard(block)

    def hold(self, block: int) -> None:
        if not self.holds[block]:
            self.touch(block, live=True)
        self.holds[block] += 1

    def lookup(self, keys: list[bytes]) -> list[int]:
        found = self.pool.lookup(keys)
        assert [self.content[block] for block in found] == keys[: len(found)]
        assert len(found) == len(keys) or keys[len(found)] not in self.full().values()
        for block in found:
            self.hold(block)
        self.asked, self.found = self.asked + len(keys), self.found + len(found)
        return found

    @rule(start=STARTS, held=st.booleans())
    def find(self, start: int, held: bool) -> None:
        """A block that is looked for is neither awaited nor cold any more, held or not."""
        key = KEYS[start]
        block = next((at for at, name in self.full().items() if name == key), None)
        assert self.pool.find(key) == block
        if block in self.adopted:
            self.now += 1
            self.found_at[block] = self.now
            self.adopted.discard(block)
        if held and block is not None:
            self.pool.hold(block)
            self.hold(block)
            self.streams.append(([block], None, start))

    def allocate(self, count: int, sparing: bool = False) -> list[tuple[int, int]] | None:
        """All or nothing; what is evicted for it is the first in the order, and nobody's."""
        order, free = self.order(), self.pool.free_count
        spared = len(self.awaited()) if sparing and self.awaiting else 0
        got = self.pool.allocate(count, sparing=sparing)
        if count > max(free, free + len(order) - spared):
            assert got == NoRoom(count, free, len(self.shut), spared)
            return None
        assert isinstance(got, list)
        blocks = {block for block, _ in got}
        assert len(blocks) == count
        assert not blocks & (set(+self.holds) | self.shut)
        assert blocks & set(order) == set(order[: max(0, count - free)])
        for block in blocks:
            self.content[block], self.holds[block] = b"partial", 1
            self.adopted.discard(block)
        return got

    def release(self, blocks: Sequence[int], live: bool) -> None:
        self.pool.release(blocks, live=live)
        for block in reversed(blocks):
            self.let_go(block, live)

    def let_go(self, block: int, live: bool) -> None:
        self.holds[block] -= 1
        if self.holds[block]:
            return
        if self.content[block] in (b"partial", b"twin"):
            if block in self.twins:
                self.let_go(self.twins.pop(block), live)
        else:
            self.touch(block, live)

    # -- acts

    @rule(start=STARTS, length=st.integers(0, 3))
    def begin(self, start: int, length: int) -> None:
        self.streams.append((self.lookup(KEYS[start : start + length]), None, start))

    @rule(start=STARTS, length=LENGTHS, ends=st.booleans())
    def serve(self, start: int, length: int, ends: bool) -> None:
        """A stream from its beginning to where it stands, or to its end."""
        self.begin(start, length)
        for _ in range(length - len(self.streams[-1][0])):
            self.write_one(len(self.streams) - 1)
            if self.streams[-1][1] is not None:
                self.retire_one(len(self.streams) - 1)
        if ends:
            self.release(self.streams.pop()[0], live=False)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        self.write_one(data.draw(st.integers(0, len(self.streams) - 1)))

    def write_one(self, at: int) -> None:
        held, generation, start = self.streams[at]
        if generation is None and (got := self.allocate(1)) is not None:
            self.streams[at] = ([*held, got[0][0]], got[0][1], start)

    @rule(start=st.integers(0, 8), length=st.integers(0, 3), more=st.integers(0, 6), sparing=st.booleans())
    def fit(self, start: int, length: int, more: int, sparing: bool) -> None:
        """What fits is exactly what can be had; who asks sparing takes no awaited block but its own; to look changes
        nothing."""
        keys, before = KEYS[start : start + length], bytes(self.index.view)
        fits = self.pool.fits(keys, length + more, sparing=sparing)
        assert bytes(self.index.view) == before
        found = self.lookup(keys)
        got = self.allocate(length + more - len(found), sparing)
        assert fits == (got is not None)
        self.release([block for block, _ in got or []], live=False)
        self.release(found, live=False)

    @precondition(lambda self: any(generation is not None for _, generation, _ in self.streams))
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        ready = [at for at, (_, generation, _) in enumerate(self.streams) if generation is not None]
        self.retire_one(data.draw(st.sampled_from(ready)))

    def retire_one(self, at: int) -> None:
        """Its content is complete: it answers for its key, unless another one does that somebody holds, which is held
        with it from then on; one that nobody holds makes way."""
        held, generation, start = self.streams[at]
        assert generation is not None
        block, depth = held[-1], len(held) - 1
        key = KEYS[start + depth]
        other = next((at for at, name in self.full().items() if name == key), None)
        answering = self.pool.publish(block, generation, key, depth)
        if other is not None and self.holds[other]:
            assert (answering, self.index.state(block)) == (other, OPEN)
            self.content[block], self.twins[block] = b"twin", other
            self.hold(other)
        else:
            assert answering == block
            self.content[block], self.depth[block] = key, depth
            self.touch(block, live=True)
            if other is not None:
                assert self.index.state(other) == FREE
                self.adopted.discard(other)
        self.streams[at] = (held, None, start)

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), live=st.booleans())
    def end(self, data: st.DataObject, live: bool) -> None:
        """`live`: it only waits for room, and is awaited after our death like those that run."""
        held, _, _ = self.streams.pop(data.draw(st.integers(0, len(self.streams) - 1)))
        self.release(held, live)

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        gone = self.order()[:count]
        assert self.pool.evict(count) == len(gone)
        assert all(self.index.state(block) == FREE for block in gone)
        self.adopted -= set(gone)

    @rule(canary=st.booleans(), last=st.lists(SERVED, max_size=3), then=st.lists(NEWS))
    def dies(self, canary: bool, last: list[tuple[int, int, bool]], then: list[str]) -> None:
        """What was published is found by the next owner, unless nobody has proven what was adopted before; what was
        open is shut until the fence."""
        for served in last:
            self.serve(*served)
        if canary:
            self.pool.canary_passed()
        owner, published, epoch = self.index.owner, self.full(), self.pool.epoch + 1
        assert owner is not None
        self.shut |= {block for block in BLOCKS if self.index.state(block) == OPEN}
        self.own(Pool(self.index, epoch, adoption=adopt.adopt(self.index, epoch)))
        assert self.full() == ({} if owner.adoptions else published)
        for what in then:
            self.after(what)

    @rule(what=NEWS)
    def after(self, what: str) -> None:
        """What follows a takeover."""
        if what == "fence":
            assert self.pool.gpu_fence_passed() == len(self.shut)
            self.shut, self.fence_awaited = set(), False
        elif what == "late":
            self.pool.fence_is_late()
            self.fence_awaited = False
        else:
            self.pool.streams_resumed()
            self.awaiting = False

    @invariant()
    def books_agree(self) -> None:
        full, pool, held = self.full(), self.pool, set(+self.holds)
        assert full == {block: self.content[block] for block in full}
        assert len(set(full.values())) == len(full)
        cached = set(full) - held
        assert pool._cached._awaited_left <= (cached if self.awaiting else set())
        assert {block for block in BLOCKS if self.index.state(block) == OPEN} - held == self.shut
        size = SHAPE.block_tokens
        assert pool.use() == KvUse(len(BLOCKS), len(held), len(cached), self.asked * size, self.found * size)
        assert pool.free_count == len(BLOCKS) - len(held | cached | self.shut)
        assert (pool.quarantined_count, pool.fence_awaited) == (len(self.shut), self.fence_awaited)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


FENCED: tuple[Any, ...] = ("dies", True, [], ["fence"])


@pytest.mark.parametrize(
    "acts",
    [
        pytest.param([("serve", 0, 3, False), FENCED, ("evict", 1), ("evict", 1)], id="awaited: the deepest first"),
        pytest.param(
            [("serve", 0, 2, True), ("serve", 8, 2, False), FENCED, ("after", "resumed"), ("evict", 1), ("evict", 2)],
            id="no longer awaited: still after what was cold",
        ),
        pytest.param(
            [("serve", 16, 1, True), ("serve", 0, 2, False), FENCED, ("fit", 0, 2, 3, True)],
            id="its own awaited blocks are not spared from it",
        ),
        pytest.param(
            [("serve", 0, 1, True), FENCED, ("begin", 0, 0), ("write_one", 0), ("retire_one", 0), ("evict", 3)],
            id="a cached block makes way for a new one of its key",
        ),
        pytest.param(
            [("serve", 0, 1, True), ("serve", 8, 1, True), FENCED, ("serve", 16, 1, True), FENCED, ("evict", 2)],
            id="the longest unused first, over two owners",
        ),
        pytest.param(
            [("serve", 0, 2, False), ("serve", 8, 2, True), FENCED, ("find", 0, False), ("evict", 2), ("evict", 2)],
            id="found, and so no longer awaited: after what was cold, before what is awaited",
        ),
    ],
)
def test_what_the_model_says_of(acts: list[tuple[Any, ...]]) -> None:
    """Stories that a random walk may miss, judged by the same model."""
    machine = PoolMachine()
    for act, *given in acts:
        getattr(machine, act)(*given)
        machine.books_agree()


def test_a_key_damaged_in_the_index_leaves_no_block_findable_after_its_eviction() -> None:
    """The pool's books are its own memory."""
    pool = Pool(Index(fresh(SHAPE), SHAPE), 10)
    filled(pool, KEYS[:5])
    heir = Pool(pool.index, 11, adoption=adopt.adopt(pool.index, 11))
    for block in BLOCKS:
        heir.index.words[512 + block * 8 + 1] ^= 0xFF
    assert isinstance(heir.allocate(5), list)
    assert heir.match(KEYS[:1]) == 0


def test_only_the_owner_has_a_pool() -> None:
    """An epoch that neither formatted nor adopted the index is refused, and so are giving back what nobody holds and
    holding what is not whole."""
    pool = Pool(Index(fresh(SHAPE), SHAPE), 10)
    with pytest.raises(Misuse):
        Pool(pool.index, 11)
    with pytest.raises(Misuse):
        pool.release([0])
    pool.allocate(5)
    for block in BLOCKS:
        with pytest.raises(Misuse):
            pool.hold(block)
        pool.release([block])
    assert pool.index.state(0) == FREE
    assert repr(pool) == "<kv pool epoch 10: 5 free, 0 held, 0 cached, 0 quarantined>"
