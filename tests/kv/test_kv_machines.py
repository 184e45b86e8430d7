"""Index and pool against simple models, through any sequence of acts, deaths, adoptions and fences."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_rig import BLOCK_TOKENS, KEYS, Died, DyingWords, believed, fresh, geometry, quarantined

from holdfast.kv import adopt
from holdfast.kv.follow import Follower
from holdfast.kv.index import FREE, FULL, OPEN, Index, Misuse
from holdfast.kv.pool import NoRoom, Pool

SHAPE = geometry(5)
blocks = st.integers(0, SHAPE.block_count - 1)
keys = st.sampled_from(KEYS[:4])


class IndexMachine(RuleBasedStateMachine):
    """The model: a state and a generation per block, and the key of each full one."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = fresh(SHAPE, 1)
        self.index = Index(self.buffer, SHAPE)
        self.follower = Follower(self.index)
        self.epoch = 1
        self.adoptions = 0
        self.state = dict.fromkeys(range(SHAPE.block_count), FREE)
        self.generation = dict.fromkeys(range(SHAPE.block_count), 0)
        self.keys: dict[int, bytes] = {}

    @rule(block=blocks)
    def open(self, block: int) -> None:
        if self.state[block] == OPEN:
            self.refused(lambda: self.index.open(block))
            return
        self.generation[block] += 1
        assert self.index.open(block) == self.generation[block]
        self.state[block] = OPEN

    @rule(block=blocks, key=keys, behind=st.integers(0, 2))
    def publish(self, block: int, key: bytes, behind: int) -> None:
        generation = self.generation[block] - behind

        def act() -> None:
            self.index.publish(block, generation, key, epoch=self.epoch, depth=1, tokens=BLOCK_TOKENS)

        if self.state[block] != OPEN or behind:
            self.refused(act)
            return
        act()
        self.state[block] = FULL
        self.keys[block] = key

    @rule(block=blocks)
    def free(self, block: int) -> None:
        if self.state[block] == FREE:
            self.refused(lambda: self.index.free(block))
            return
        self.index.free(block)
        self.state[block] = FREE

    @rule(block=blocks, heat=st.integers(0, 2**64 - 1))
    def heat(self, block: int, heat: int) -> None:
        self.index.set_heat(block, heat)

    @rule()
    def canary(self) -> None:
        owner = self.index.owner
        assert owner is not None
        Pool(self.index, self.epoch).canary_passed()
        self.adoptions = 0

    @rule()
    def follow(self) -> None:
        self.follower.poll()

    @rule(by_follower=st.booleans(), dies_after=st.integers(0, 3))
    def adopt(self, by_follower: bool, dies_after: int) -> None:
        """First someone who may die on the way, then someone who does not."""
        expected = self.expected()
        try:
            adopt.adopt(Index(self.buffer, SHAPE, words=DyingWords(self.buffer, dies_after)), self.epoch + 1)
            self.adoptions += 1
            for block, state in self.state.items():
                if state == FULL and self.keys[block] not in expected:
                    self.state[block] = FREE
            self.settle_model(expected)
            expected = self.expected()
        except Died:
            pass
        self.epoch += 2
        adoption = self.follower.adopt(self.index, self.epoch) if by_follower else adopt.adopt(self.index, self.epoch)
        self.adoptions += 1
        assert believed(adoption) == expected
        assert quarantined(adoption) == {block for block, state in self.state.items() if state == OPEN}
        self.settle_model(expected)
        self.follower = Follower(self.index)

    def expected(self) -> dict[bytes, int]:
        if self.adoptions:
            return {}
        first: dict[bytes, int] = {}
        for block, state in sorted(self.state.items()):
            if state == FULL:
                first.setdefault(self.keys[block], block)
        return first

    def settle_model(self, expected: dict[bytes, int]) -> None:
        for block, state in self.state.items():
            if state == FULL and block not in expected.values():
                self.state[block] = FREE

    def refused(self, act) -> None:  # type: ignore[no-untyped-def]
        before = bytes(self.buffer)
        try:
            act()
        except Misuse:
            assert bytes(self.buffer) == before
            return
        raise AssertionError("not refused")

    @invariant()
    def same(self) -> None:
        for block, state in self.state.items():
            entry = self.index.entry(block)
            assert (entry.state, entry.generation) == (state, self.generation[block])
            assert state != FULL or (entry.whole and entry.key == self.keys[block])
        if not self.adoptions:
            assert Follower(self.index).survey() == adopt.survey(self.index)


class FollowerMachine(RuleBasedStateMachine):
    """Anything may be stored anywhere while it follows: it ends up with what a reader from scratch sees."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = fresh(SHAPE, 5)
        self.index = Index(self.buffer, SHAPE)
        self.follower = Follower(self.index)

    @rule(
        block=blocks,
        key=st.sampled_from(KEYS[:2]),
        epoch=st.sampled_from([4, 5, 5, 6]),
        tokens=st.sampled_from([BLOCK_TOKENS] * 4 + [1]),
    )
    def fill(self, block: int, key: bytes, epoch: int, tokens: int) -> None:
        if self.index.state(block) == OPEN:
            self.index.free(block)
        self.index.publish(block, self.index.open(block), key, epoch=epoch, depth=0, tokens=tokens)

    @rule(block=blocks)
    def open(self, block: int) -> None:
        if self.index.state(block) != OPEN:
            self.index.open(block)

    @rule(word=st.integers(512, 511 + 8 * SHAPE.block_count), bit=st.integers(0, 63))
    def damage(self, word: int, bit: int) -> None:
        self.index.words[word] ^= 1 << bit

    @rule(epoch=st.sampled_from([4, 5, 6, None]))
    def new_owner(self, epoch: int | None) -> None:
        if epoch is None:
            self.index.words[511] = 0
        else:
            self.index.store_owner(adopt.Owner(epoch, 0))

    @rule()
    def poll(self) -> None:
        self.follower.poll()

    @rule()
    def same(self) -> None:
        found = self.follower.survey()
        assert found == adopt.survey(self.index)
        copy = Index(bytearray(self.buffer), SHAPE)
        adoption = adopt.settle(copy, found, 100, dict(self.follower._blocks))
        assert adoption.by_key == adopt.adopt(Index(bytearray(self.buffer), SHAPE), 100).by_key


class PoolMachine(RuleBasedStateMachine):
    """Streams come and go, owners die; the model knows who holds what and which content each block has."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(fresh(SHAPE, 1), SHAPE)
        self.pool = Pool(self.index, 1)
        self.streams: list[tuple[list[int], int | None, int]] = []  # held blocks, an open one last, its generation
        self.shut: set[int] = set()
        self.content: dict[int, bytes] = {}

    @rule(start=st.sampled_from([0, 8, 16]), length=st.integers(1, 3))
    def begin(self, start: int, length: int) -> None:
        wanted = KEYS[start : start + length]
        known = self.pool.match(wanted)
        held = self.pool.lookup(wanted)
        assert len(held) == known
        assert [self.content[block] for block in held] == wanted[: len(held)]
        self.streams.append((held, None, start))

    @rule(start=st.sampled_from([0, 8, 16]), length=st.integers(1, 3), ends=st.booleans())
    def serve(self, start: int, length: int, ends: bool) -> None:
        """A stream from its beginning to where it stands, or to its end."""
        self.begin(start, length)
        for _ in range(length - len(self.streams[-1][0])):
            self.write_one(len(self.streams) - 1)
            if self.streams[-1][1] is not None:
                self.retire_one(len(self.streams) - 1)
        if ends:
            self.pool.release(self.streams.pop()[0])

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        self.write_one(data.draw(st.integers(0, len(self.streams) - 1)))

    def write_one(self, at: int) -> None:
        held, generation, start = self.streams[at]
        if generation is not None:
            return
        room = self.pool.free_count + self.pool.cached_count
        got = self.pool.allocate()
        if isinstance(got, NoRoom):
            assert room == 0
            return
        assert got[0][0] not in self.in_use()
        assert got[0][0] not in self.shut
        self.content[got[0][0]] = b"partial"
        self.streams[at] = ([*held, got[0][0]], got[0][1], start)

    @rule(start=st.integers(0, 8), length=st.integers(0, 3), more=st.integers(0, 6), sparing=st.booleans())
    def fit(self, start: int, length: int, more: int, sparing: bool) -> None:
        """What fits is exactly what can be had, and who asks sparing takes no awaited block but its own."""
        keys = KEYS[start : start + length]
        fits = self.pool.fits(keys, length + more, sparing=sparing)
        found = self.pool.lookup(keys)
        awaited = self.pool.awaited_count
        got = self.pool.allocate(length + more - len(found), sparing=sparing)
        assert fits == isinstance(got, list)
        if isinstance(got, list):
            assert not sparing or self.pool.awaited_count == awaited
            self.content |= {block: b"partial" for block, _ in got}
            self.pool.release([block for block, _ in got])
        self.pool.release(found)

    @precondition(lambda self: any(generation is not None for _, generation, _ in self.streams))
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        ready = [at for at, (_, generation, _) in enumerate(self.streams) if generation is not None]
        self.retire_one(data.draw(st.sampled_from(ready)))

    def retire_one(self, at: int) -> None:
        held, generation, start = self.streams[at]
        assert generation is not None
        depth = len(held) - 1
        key = KEYS[start + depth]
        self.content[held[-1]] = key
        answering = self.pool.publish(held[-1], generation, key, depth)
        assert self.content[answering] == key
        self.streams[at] = (held, None, start)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        held, _, _ = self.streams.pop(data.draw(st.integers(0, len(self.streams) - 1)))
        self.pool.release(held)

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        assert self.pool.evict(count) <= count

    @rule(canary=st.booleans(), fence=st.booleans())
    def dies(self, canary: bool, fence: bool) -> None:
        if canary:
            self.pool.canary_passed()
        owner = self.index.owner
        assert owner is not None
        published = {key: block for block, key in self.full().items()}
        epoch = self.pool.epoch + 1
        self.shut |= {block for block in range(SHAPE.block_count) if self.index.state(block) == OPEN}
        self.streams = []
        self.pool = Pool(self.index, epoch, adoption=adopt.adopt(self.index, epoch))
        kept = {key: block for key in published if (block := self.pool._blocks.get(key)) is not None}
        assert kept == ({} if owner.adoptions else published)
        assert self.pool.quarantined_count == len(self.shut)
        if fence:
            self.fence()

    @rule()
    def fence(self) -> None:
        assert self.pool.gpu_fence_passed() == len(self.shut)
        self.shut = set()

    @rule()
    def resumed(self) -> None:
        self.pool.streams_resumed()

    def in_use(self) -> set[int]:
        return {block for held, _, _ in self.streams for block in held}

    def full(self) -> dict[int, bytes]:
        entries = {block: self.index.entry(block) for block in range(SHAPE.block_count)}
        return {block: entry.key for block, entry in entries.items() if entry.state == FULL}

    @invariant()
    def books_agree(self) -> None:
        full, used = self.full(), self.in_use()
        for block, key in full.items():
            assert self.content[block] == key
        assert len(set(full.values())) == len(full)
        cached = set(full) - used
        twins = set(self.pool._twins.values())
        assert self.pool.cached_count == len(cached - twins)
        assert self.pool._cached._awaited_left <= cached - twins
        open_blocks = {block for block in range(SHAPE.block_count) if self.index.state(block) == OPEN}
        assert open_blocks <= used | self.shut
        assert self.shut <= open_blocks
        free = SHAPE.block_count - len(used) - len(cached) - len(self.shut - used)
        assert self.pool.free_count == free


TestIndex = IndexMachine.TestCase
TestFollower = FollowerMachine.TestCase
TestPool = PoolMachine.TestCase
TestIndex.settings = TestFollower.settings = TestPool.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
