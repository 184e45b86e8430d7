"""The owner's allocator: what is found, what is handed out, and what goes first when room is short."""

from __future__ import annotations

import pytest
from kv_rig import KEYS, fresh, geometry

from holdfast.kv import adopt
from holdfast.kv.index import FREE, FULL, OPEN, Index, Misuse
from holdfast.kv.pool import NoRoom, Pool
from holdfast.kv.usage import KvUse

SHAPE = geometry(8)


def new_pool() -> Pool:
    return Pool(Index(fresh(SHAPE), SHAPE), 10)


def stream(pool: Pool, keys: list[bytes]) -> list[int]:
    """A stream that finds its prefix and fills the rest."""
    blocks = pool.lookup(keys)
    for depth in range(len(blocks), len(keys)):
        got = pool.allocate()
        assert isinstance(got, list)
        block, generation = got[0]
        pool.publish(block, generation, keys[depth], depth)
        blocks.append(block)
    return blocks


def successor(pool: Pool) -> Pool:
    """The pool of whoever takes over."""
    epoch = pool.epoch + 1
    return Pool(pool.index, epoch, adoption=adopt.adopt(pool.index, epoch))


def test_a_prefix_is_shared() -> None:
    """Two streams with one prefix hold the same blocks; only the last to leave makes them evictable."""
    pool = new_pool()
    first, second = stream(pool, KEYS[:3]), stream(pool, KEYS[:2] + KEYS[9:10])
    assert first[:2] == second[:2]
    assert pool.match(KEYS[:5]) == 3
    pool.release(first)
    assert pool.cached_count == 1
    pool.release(second)
    assert pool.cached_count == 4
    assert pool.match(KEYS[:3]) == 3


def test_allocation_is_all_or_nothing() -> None:
    """Too much is refused with the reason in numbers, and nothing changes."""
    pool = new_pool()
    held = stream(pool, KEYS[:3])
    refused = pool.allocate(6)
    assert refused == NoRoom(asked=6, free=5, evictable=0, quarantined=0)
    pool.release(held)
    got = pool.allocate(6)
    assert isinstance(got, list)
    assert len({block for block, _ in got}) == 6


def test_the_longest_unused_goes_first_and_children_before_parents() -> None:
    """Room is made from the tail of the stream that ended first."""
    pool = new_pool()
    old, new = stream(pool, KEYS[:3]), stream(pool, KEYS[10:13])
    pool.release(old)
    pool.release(new)
    pool.allocate(2)
    for left in (2, 1, 0):
        pool.allocate(1)
        assert pool.match(KEYS[:3]) == left
        assert pool.match(KEYS[10:13]) == 3


def test_an_evicted_block_is_withdrawn_before_it_is_used() -> None:
    """The index never says FULL of a block that is handed out."""
    pool = new_pool()
    pool.release(stream(pool, KEYS[:8]))
    got = pool.allocate(8)
    assert isinstance(got, list)
    assert all(pool.index.state(block) == OPEN for block, _ in got)
    assert pool.match(KEYS[:8]) == 0


def test_evict_makes_free_entries() -> None:
    """Asked for more than there is, it says how many it made free."""
    pool = new_pool()
    pool.release(stream(pool, KEYS[:2]))
    assert pool.evict(5) == 2
    assert pool.free_count == 8
    assert all(pool.index.state(block) == FREE for block in range(8))


def test_a_second_block_of_one_key_stays_its_holders_own() -> None:
    """It is not published; the first is held with it, so that what a resume needs is not evicted under the stream."""
    pool = new_pool()
    first = stream(pool, KEYS[:1])
    got = pool.allocate()
    assert isinstance(got, list)
    block, generation = got[0]
    assert pool.publish(block, generation, KEYS[0], 0) == first[0]
    assert pool.index.state(block) == OPEN
    pool.release(first)
    assert pool.cached_count == 0
    pool.release([block])
    assert pool.cached_count == 1
    assert pool.index.state(block) == FREE


def test_a_cached_block_makes_way_for_a_new_one_of_its_key() -> None:
    """A text that is made again takes no room twice: the block nobody holds is free once ours answers for its key, in
    the pool that filled it and in its successor's."""
    for adopted in (False, True):
        pool = new_pool()
        pool.release(stream(pool, KEYS[:2]))
        if adopted:
            pool = successor(pool)
        old = pool.lookup(KEYS[1:2])
        pool.release(old)
        got = pool.allocate()
        assert isinstance(got, list)
        block, generation = got[0]
        assert pool.publish(block, generation, KEYS[1], 1) == block != old[0]
        assert pool.index.state(old[0]) == FREE
        assert (pool.free_count, pool.cached_count) == (6, 1)
        assert pool.lookup(KEYS[:2])[1] == block
        assert pool.evict(8) == 0, "both are held"


def test_a_block_written_again_is_withdrawn() -> None:
    """Its only holder may reopen it; while others read it, not."""
    pool = new_pool()
    mine = stream(pool, KEYS[:1])
    theirs = pool.lookup(KEYS[:1])
    with pytest.raises(Misuse):
        pool.reopen(mine[0])
    pool.release(theirs)
    generation = pool.reopen(mine[0])
    assert pool.match(KEYS[:1]) == 0
    pool.publish(mine[0], generation, KEYS[5], 0)
    assert pool.lookup(KEYS[5:6]) == mine


def test_adopted_blocks_are_found_and_open_ones_wait_for_the_fence() -> None:
    """A successor resumes from what was published; what was open comes back at the GPU fence, not before."""
    pool = new_pool()
    blocks = stream(pool, KEYS[:3])
    opened = pool.allocate(2)
    assert isinstance(opened, list)
    heir = successor(pool)
    assert heir.lookup(KEYS[:4]) == blocks
    assert heir.quarantined_count == 2
    refused = heir.allocate(4)
    assert refused == NoRoom(asked=4, free=3, evictable=0, quarantined=2)
    assert heir.gpu_fence_passed() == 2
    got = heir.allocate(5)
    assert isinstance(got, list)
    assert {block for block, _ in opened} <= {block for block, _ in got}


def test_blocks_of_running_streams_go_last() -> None:
    """At takeover the cached prefix of an ended stream goes before those of streams yet to resume, and of these the
    deepest; what a resumed stream took is never evicted."""
    pool = new_pool()
    ended = stream(pool, KEYS[:3])
    pool.release(ended)
    late, early = stream(pool, KEYS[10:12]), stream(pool, KEYS[20:23])
    heir = successor(pool)
    assert heir.lookup(KEYS[20:23]) == early
    assert isinstance(heir.allocate(3), list)
    assert heir.match(KEYS[:3]) == 0
    assert heir.match(KEYS[10:12]) == 2
    assert isinstance(heir.allocate(1), list)
    assert heir.match(KEYS[10:12]) == 1
    assert heir.lookup(KEYS[10:11]) == late[:1]
    assert heir.allocate(1) == NoRoom(asked=1, free=0, evictable=0, quarantined=0)


def test_who_asks_sparing_gets_no_awaited_block() -> None:
    """Blocks of streams that ran at the owner's death are refused to it, by number, and those of ended ones are not;
    once these streams are no longer awaited, it gets them."""
    pool = new_pool()
    pool.release(stream(pool, KEYS[:2]))
    stream(pool, KEYS[10:14])
    heir = successor(pool)
    assert heir.awaited_count == 4
    assert heir.allocate(5, sparing=True) == NoRoom(asked=5, free=2, evictable=6, quarantined=0, spared=4)
    assert isinstance(heir.allocate(4, sparing=True), list)
    assert heir.match(KEYS[10:14]) == 4
    assert isinstance(heir.allocate(1, sparing=True), NoRoom)
    heir.streams_resumed()
    assert heir.awaited_count == 0
    assert isinstance(heir.allocate(4, sparing=True), list)


def test_what_fits_is_what_can_be_had() -> None:
    """What a sequence would find counts neither as room nor as spared; and the look itself leaves everything as it was,
    so that a stream which asks at every step is still awaited after our death."""
    pool = new_pool()
    pool.release(stream(pool, KEYS[20:21]))
    stream(pool, KEYS[:3])
    stream(pool, KEYS[10:13])
    heir = successor(pool)
    before = bytes(heir.index.view)
    assert heir.fits(KEYS[:3], 5, sparing=True)
    assert not heir.fits(KEYS[:3], 6, sparing=True)
    assert heir.fits(KEYS[:3], 8)
    assert not heir.fits(KEYS[:3], 9)
    assert not heir.fits(KEYS[30:31], 3, sparing=True)
    assert (bytes(heir.index.view), heir.awaited_count) == (before, 6)
    assert len(heir.lookup(KEYS[:3])) == heir.awaited_count == 3
    assert isinstance(heir.allocate(2, sparing=True), list)
    assert heir.match(KEYS[10:13]) == 3


def test_the_fence_is_awaited_while_blocks_are_quarantined_and_it_is_not_late() -> None:
    """Nobody waits for a fence that brings nothing, has passed, or is late."""
    pool = new_pool()
    stream(pool, KEYS[:1])
    heir = successor(pool)
    assert not heir.fence_awaited
    assert isinstance(heir.allocate(2), list)
    for late in (False, True):
        heir = successor(heir)
        assert (heir.fence_awaited, heir.quarantined_count) == (True, 2)
        if late:
            heir.fence_is_late()
            assert (heir.fence_awaited, heir.quarantined_count) == (False, 2)
    assert heir.gpu_fence_passed() == 2
    heir = successor(heir)
    assert not heir.fence_awaited


def test_a_stream_that_waits_for_room_is_awaited_too() -> None:
    """Given up `live`, its blocks are the last to go for the next owner, and go like any others for this one."""
    pool = new_pool()
    waits, ended = stream(pool, KEYS[:2]), stream(pool, KEYS[10:12])
    pool.release(waits, live=True)
    pool.release(ended)
    copy = Index(bytearray(pool.index.view), SHAPE)
    heir = Pool(copy, 11, adoption=adopt.adopt(copy, 11))
    assert heir.awaited_count == 2
    for owner, left in ((pool, (0, 2)), (heir, (2, 0))):
        owner.evict(2)
        assert (owner.match(KEYS[:2]), owner.match(KEYS[10:12])) == left


def test_a_block_taken_after_the_order_was_made_is_passed_over() -> None:
    """What a late resume holds is not evicted, wherever it stood in the order."""
    pool = new_pool()
    stream(pool, KEYS[:4])
    late = stream(pool, KEYS[10:14])
    heir = successor(pool)
    assert heir.evict(1) == 1
    assert heir.lookup(KEYS[10:14]) == late  # the next in the order is its deepest
    assert heir.evict(8) == 3
    assert (heir.match(KEYS[:4]), heir.match(KEYS[10:14])) == (0, 4)


def test_what_the_heir_releases_goes_before_what_is_awaited_and_after_what_was_cold() -> None:
    """Order over two owners; once streams are no longer awaited, theirs is the oldest again."""
    pool = new_pool()
    pool.release(stream(pool, KEYS[:2]))
    stream(pool, KEYS[10:13])
    for resumed in (False, True):
        copy = Index(bytearray(pool.index.view), SHAPE)
        heir = Pool(copy, 11, adoption=adopt.adopt(copy, 11))
        heir.release(stream(heir, KEYS[20:23]))
        if resumed:
            heir.streams_resumed()
        heir.evict(2)
        assert (heir.match(KEYS[:2]), heir.match(KEYS[10:13]), heir.match(KEYS[20:23])) == (0, 3, 3)
        heir.evict(3)
        expected = (0, 3) if resumed else (3, 0)
        assert (heir.match(KEYS[10:13]), heir.match(KEYS[20:23])) == expected


def test_a_key_damaged_in_the_index_leaves_no_block_findable_after_its_eviction() -> None:
    """The pool's books are its own memory."""
    pool = new_pool()
    stream(pool, KEYS[:8])
    heir = successor(pool)
    for block in range(8):
        heir.index.words[512 + block * 8 + 1] ^= 0xFF
    assert isinstance(heir.allocate(8), list)
    assert heir.match(KEYS[:1]) == 0


def test_only_the_owner_has_a_pool() -> None:
    """An epoch that neither formatted nor adopted the index is refused, and so is giving back what nobody holds."""
    pool = new_pool()
    with pytest.raises(Misuse):
        Pool(pool.index, 11)
    with pytest.raises(Misuse):
        pool.release([0])
    assert pool.index.state(0) == FREE
    assert repr(pool) == "<kv pool epoch 10: 8 free, 0 held, 0 cached, 0 quarantined>"
    stream(pool, KEYS[:1])
    assert FULL in {pool.index.state(block) for block in range(8)}


def test_what_was_asked_for_and_found_is_counted() -> None:
    """In tokens of whole blocks; who is held, who is cached, of how many."""
    pool, size = new_pool(), SHAPE.block_tokens
    first = stream(pool, KEYS[:3])
    stream(pool, KEYS[:2] + KEYS[9:10])
    assert pool.use() == KvUse(8, 4, 0, 6 * size, 2 * size)
    pool.release(first)
    assert (pool.use().held, pool.use().cached, pool.use().usage) == (3, 1, 3 / 8)
