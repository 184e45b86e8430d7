"""Which entries an adopter may believe, one case each; several ranks; a follower that knows most of it beforehand."""

from __future__ import annotations

import pytest

from holdfast.kv import adopt
from holdfast.kv.adopt import Follower
from holdfast.kv.index import (
    ENTRY_WORDS,
    EPOCH,
    FREE,
    FULL,
    HEADER_WORDS,
    KEY_HIGH,
    KEY_LOW,
    OPEN,
    SHAPE,
    STATE_BITS,
    SUM,
    WORD,
    Index,
    IndexOwner,
    entry_sum,
)
from holdfast.kv.pool import Pool
from tests.rigs.kv_index import BLOCK_TOKENS, KEYS, World, believed, fresh, geometry, quarantined


def world_of(blocks: int, *, epoch: int = 10) -> World:
    world = World(fresh(geometry(), epoch), geometry(), epoch)
    for block in range(blocks):
        world.fill(block, KEYS[block])
    return world


def forge(world: World, block: int, *, key: bytes = KEYS[20], epoch: int = 10, tokens: int = BLOCK_TOKENS) -> None:
    """A FULL entry with a right sum that a right owner would not have made."""
    world.index.publish(block, world.index.open(block), key, epoch=epoch, depth=0, tokens=tokens)


@pytest.mark.parametrize("strange", [{"epoch": 11}, {"tokens": BLOCK_TOKENS - 1}, {"tokens": BLOCK_TOKENS + 1}])
def test_whole_but_wrong_is_made_free(strange: dict[str, int]) -> None:
    """An epoch after the old owner's, or not the full count of tokens: not believed, and free at once."""
    world = world_of(1)
    forge(world, 4, **strange)
    adoption = adopt.adopt(world.index, 11)
    assert believed(adoption) == {KEYS[0]: 0}
    assert quarantined(adoption) == set()
    assert world.index.state(4) == FREE


def test_a_sum_of_a_past_generation_is_not_believed() -> None:
    """The word says a newer generation than the fields were summed for."""
    world = world_of(2)
    at = HEADER_WORDS + ENTRY_WORDS
    world.words[at] = ((world.words[at] >> STATE_BITS) + 1) << STATE_BITS | FULL
    adoption = adopt.adopt(world.index, 11)
    assert believed(adoption) == {KEYS[0]: 0}
    assert quarantined(adoption) == {1}


def test_keys_that_agree_in_the_half_that_is_sorted_are_no_twins() -> None:
    """The quick look at half a key is followed by an exact one."""
    world = world_of(0)
    for block in range(3):
        forge(world, block, key=b"same" + bytes([block]) * 12)
    assert len(believed(adopt.adopt(world.index, 11))) == 3


def test_an_entry_of_another_geometry_is_not_believed() -> None:
    """Even where the header is right: sums are keyed with the geometry."""
    world = world_of(1)
    at = HEADER_WORDS
    fields = [world.words[at + field] for field in (WORD, EPOCH, SHAPE, KEY_LOW, KEY_HIGH)]
    other = geometry(weights="w0").sum_key
    world.words[at + SUM] = entry_sum(other, 0, *fields)
    assert believed(adopt.adopt(world.index, 11)) == {}


def test_another_geometry_starts_empty_and_is_usable_after_the_fence() -> None:
    """Nothing is believed, nothing is handed out before the GPU fence, everything after it."""
    world = world_of(3)
    other = Index(world.buffer, geometry(weights="w9"))
    adoption = adopt.adopt(other, 11)
    assert adoption.reason == adopt.OTHER_GEOMETRY
    assert other.same_geometry()
    pool = Pool(other, 11, adoption=adoption)
    assert (pool.free_count, pool.cached_count, pool.quarantined_count) == (0, 0, geometry().block_count)
    assert pool.gpu_fence_passed() == geometry().block_count
    assert pool.free_count == geometry().block_count


def test_an_older_epoch_comes_too_late() -> None:
    """It is refused before anything is stored."""
    world = world_of(2)
    before = bytes(world.buffer)
    for epoch in (9, 10):
        with pytest.raises(adopt.StaleEpoch):
            adopt.adopt(world.index, epoch)
    assert bytes(world.buffer) == before


def test_ranks_believe_what_all_of_them_have() -> None:
    """A block is ours where each rank has it whole under the same key, and shut where any rank has it open."""
    shapes = [geometry(rank=rank, rank_count=3) for rank in range(3)]
    worlds = [World(fresh(shape), shape, 10) for shape in shapes]
    for rank, world in enumerate(worlds):
        world.fill(0, KEYS[0])
        world.fill(1, KEYS[1] if rank != 1 else KEYS[9])  # another content
        if rank != 2:
            world.fill(2, KEYS[2])  # rank 2 had not begun
        world.write(3)
        if rank:
            world.publish(3, KEYS[3])  # rank 0 had not ended
    sent = [adopt.packed(adopt.survey(world.index)) for world in worlds]
    assert len(set(map(len, sent))) == 1, "ranks' surveys are of one length, whatever they say"
    agreed = adopt.agree([adopt.unpacked(data) for data in sent])
    for rank, (world, found) in enumerate(zip(worlds, agreed, strict=True)):
        adoption = adopt.write_verdicts(world.index, found, 11)
        assert believed(adoption) == {KEYS[0]: 0}
        assert quarantined(adoption) == {3}
        assert [world.index.state(block) for block in (1, 2, 3)] == [FREE, FREE, FULL if rank else OPEN]
        pool = Pool(world.index, 11, adoption=adoption)
        pool.gpu_fence_passed()
        assert pool.free_count == geometry().block_count - 1


def test_one_rank_of_another_geometry_spoils_all() -> None:
    """Ranks share one block table: what one of them must not touch, none may."""
    shapes = [geometry(rank=rank, rank_count=2) for rank in range(2)]
    worlds = [World(fresh(shape), shape, 10) for shape in shapes]
    for world in worlds:
        world.fill(0, KEYS[0])
    worlds[1].buffer[3] ^= 1
    for world, found in zip(worlds, adopt.agree([adopt.survey(world.index) for world in worlds]), strict=True):
        adoption = adopt.write_verdicts(world.index, found, 11)
        assert believed(adoption) == {}
        assert quarantined(adoption) == set(range(geometry().block_count))
        assert world.index.same_geometry()


def test_a_new_pool_beside_an_old_one() -> None:
    """A rank whose pool was made anew has nothing, so nobody has; what is open on the other stays untouched on both
    until the fence, and then both are free."""
    shapes = [geometry(rank=rank, rank_count=2) for rank in range(2)]
    new, old = World(fresh(shapes[0], 11), shapes[0], 11), World(fresh(shapes[1]), shapes[1], 10)
    old.fill(0, KEYS[0])
    old.write(2)
    ours, theirs = adopt.agree([adopt.survey(world.index) for world in (new, old)])
    pool = Pool(new.index, 11, adoption=adopt.of_new(new.index, ours, 11))
    assert (pool.free_count, pool.cached_count, pool.quarantined_count) == (5, 0, 1)
    assert believed(adopt.write_verdicts(old.index, theirs, 11)) == {}
    assert pool.gpu_fence_passed() == 1
    assert pool.free_count == 6


def test_a_follower_among_ranks() -> None:
    """What the ranks agreed on cuts its key map down."""
    shapes = [geometry(rank=rank, rank_count=2) for rank in range(2)]
    worlds = [World(fresh(shape), shape, 10) for shape in shapes]
    followers = [Follower(world.index) for world in worlds]
    worlds[0].fill(0, KEYS[0])
    for world in worlds:
        world.fill(1, KEYS[1])
    agreed = adopt.agree([follower.survey() for follower in followers])
    for world, follower, found in zip(worlds, followers, agreed, strict=True):
        assert believed(follower.adopt(world.index, 11, found)) == {KEYS[1]: 1}


def test_a_follower_knows_which_of_two_blocks_comes_first() -> None:
    """In whatever order it sees two blocks claim one key, and lose it, it believes the one a fresh reader would."""
    world = world_of(0)
    follower = Follower(world.index)
    for block in (4, 2, 5, 1):
        forge(world, block)
        follower.poll()
        assert follower.survey() == adopt.survey(world.index)
    for block in (2, 1, 5):
        world.free(block)
        assert follower.survey() == adopt.survey(world.index)
    assert believed(follower.adopt(world.index, 11)) == {KEYS[20]: 4}


def test_a_follower_judges_anew_when_the_owner_changes() -> None:
    """An entry is right up to its owner's epoch: when that moves, so may every verdict."""
    world = world_of(1)
    forge(world, 2, epoch=12)
    follower = Follower(world.index)
    follower.poll()
    for epoch in (12, 9, 11):
        world.index.store_owner(IndexOwner(epoch, 0))
        assert follower.survey() == adopt.survey(world.index)
