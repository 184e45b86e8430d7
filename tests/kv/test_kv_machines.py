"""The index against a simple model, and a follower against a reader from scratch, through any sequence of acts, deaths
and adoptions."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.kv import adopt
from holdfast.kv.adopt import Follower
from holdfast.kv.index import FREE, FULL, OPEN, Index, IndexOwner, Misuse
from holdfast.kv.pool import Pool
from tests.rigs.kv_index import BLOCK_TOKENS, KEYS, Died, DyingWords, believed, fresh, geometry, quarantined

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
        self.epochs: dict[int, int] = {}

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
        self.keys[block], self.epochs[block] = key, self.epoch

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
        assert self.index.entry(block).heat == heat

    @rule()
    def canary(self) -> None:
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
        assert self.index.owner == IndexOwner(self.epoch, self.adoptions)
        assert adoption.reason == ("" if self.adoptions == 1 else adopt.NO_CANARY)
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
            if state == FULL:
                said = (entry.whole, entry.key, entry.epoch, entry.depth, entry.tokens)
                assert said == (True, self.keys[block], self.epochs[block], 1, BLOCK_TOKENS)
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
            self.index.store_owner(adopt.IndexOwner(epoch, 0))

    @rule(block=blocks)
    def poll(self, block: int) -> None:
        """A second look finds nothing new: a block's heat is a hint, and no difference."""
        self.follower.poll()
        self.index.set_heat(block, 77)
        assert self.follower.poll() == 0

    @rule()
    def same(self) -> None:
        found = self.follower.survey()
        assert found == adopt.survey(self.index)
        copy = Index(bytearray(self.buffer), SHAPE)
        adoption = adopt.write_verdicts(copy, found, 100, dict(self.follower._blocks))
        assert adoption.by_key == adopt.adopt(Index(bytearray(self.buffer), SHAPE), 100).by_key


TestIndex = IndexMachine.TestCase
TestFollower = FollowerMachine.TestCase
TestIndex.settings = TestFollower.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
