"""Single cases of blocks that outlive the engine: what is said of one when, and who gets which."""

from __future__ import annotations

import pytest

from holdfast.engines.vllm.blocks import VaultBlocks
from holdfast.kv.index import FREE, FULL, OPEN, Misuse
from holdfast.kv.pool import Resumes
from tests.rigs.engines.vllm_blocks import World
from tests.rigs.engines.vllm_small_scheduler import PRIVATE, Desk, FakeBlock, Stream, keys_of

SIZE = 2


def blocks_of(world: World) -> tuple[list[FakeBlock], VaultBlocks]:
    blocks = [FakeBlock(number) for number in range(1 + world.shared + PRIVATE)]
    blocks[0].is_null = True
    private = range(world.shared + 1, world.shared + 1 + PRIVATE)
    return blocks, VaultBlocks(blocks, shared=world.shared, private=private, text_blocks_max=world.shared)


def states(world: World) -> list[int]:
    return [world.index.state(block) for block in range(world.shared)]


def test_without_a_pool_only_private_blocks_are_given_and_nothing_is_found() -> None:
    """A standby's canary runs where nobody else writes, and no index hears of it; its last block may come back after
    the pool is there, and is private still."""
    world = World(4, SIZE)
    _, vault = blocks_of(world)
    assert vault.room == PRIVATE
    vault.planning()
    taken = vault.take(PRIVATE)
    key = keys_of([0, 1], SIZE)[0]
    vault.name(taken[0], key, 0, earlier=False)
    vault.planned()
    assert [block.block_id for block in taken] == [5, 6]
    assert (vault.find(key), vault.match([key]), vault.use().usage) == (None, 0, 1.0)
    with pytest.raises(ValueError, match="Cannot get"):
        vault.take(1)
    vault.attach(world.pool)
    assert vault.room == 4
    vault.give_back(taken)
    vault.retired()
    assert vault.room == 4
    assert states(world) == [FREE] * 4
    vault.detach()
    assert vault.room == PRIVATE


def test_a_pool_is_attached_once_and_left_only_at_rest() -> None:
    """A pool of another size is refused, and so is leaving one that is in use."""
    world = World(4, SIZE)
    _, vault = blocks_of(world)
    with pytest.raises(Misuse):
        vault.attach(World(5, SIZE).pool)
    vault.attach(world.pool)
    with pytest.raises(Misuse):
        vault.attach(world.pool)
    vault.planning()
    taken = vault.take(1)
    vault.planned()
    with pytest.raises(Misuse):
        vault.detach()
    vault.give_back(taken)
    with pytest.raises(Misuse):
        vault.detach()
    vault.retired()
    vault.detach()
    with pytest.raises(ValueError, match="private"):
        VaultBlocks([FakeBlock(0)], shared=3, private=range(3, 4), text_blocks_max=3)


def test_a_lingering_block_is_handed_out_again_without_a_word_to_the_index() -> None:
    """It stays open in the same generation, whoever has it; unclaimed it is free once all that could write it has
    retired."""
    world = World(1, SIZE)
    _, vault = blocks_of(world)
    vault.attach(world.pool)
    vault.planning()
    (block,) = vault.take(1)
    vault.planned()
    vault.planning()
    vault.planned()
    vault.give_back([block])
    before = world.index.entry(0)
    vault.planning()
    assert vault.take(1) == [block]
    vault.planned()
    assert world.index.entry(0) == before
    assert before.state == OPEN
    vault.give_back([block])
    vault.retired()
    vault.retired()
    assert states(world) == [OPEN]
    vault.retired()
    assert states(world) == [FREE]


def test_what_vllm_names_while_a_step_retires_is_published_by_that_step() -> None:
    """Even with another step in flight: its content was complete when vLLM learned the last token of it."""
    world = World(4, SIZE)
    _, vault = blocks_of(world)
    vault.attach(world.pool)
    for _ in range(2):
        vault.planning()
        (block,) = vault.take(1)
        vault.planned()
    key = keys_of([0, 1], SIZE)[0]
    vault.name(block, key, 0, earlier=False)
    assert vault.find(key) is block
    assert world.pool.match([key]) == 0
    vault.retired()
    assert world.pool.match([key]) == 1


def test_a_stream_that_comes_back_before_the_fence_finds_its_blocks_and_gets_in() -> None:
    """In a pool as full as it was: what it finds is not awaited any more and counts as room it takes; what others
    will look for is spared until the fence brings back what the dead engine had open."""
    desk = Desk(6, SIZE, 1, ahead=False, fifo=True)
    for first in (0, 1):
        desk.waiting.append(Stream([first, 0, 0, 0, 0], 9))
    desk.schedule(99)
    desk.retire()
    assert states(desk.world).count(FULL) == 4
    late, early = ([*stream.tokens] for stream in desk.running)
    desk.world.die(canary=True)
    desk.wake()
    pool, vault = desk.world.pool, desk.vault
    keys = keys_of(early, SIZE)[:2]
    assert (pool.awaited_count, pool.quarantined_count, vault.room) == (4, 2, 0)
    assert [vault.find(key) is not None for key in keys] == [True, True]
    assert (pool.awaited_count, vault.room) == (2, 2)
    desk.running, desk.waiting = [], [Stream(early, 8)]
    desk.schedule(99)
    assert not desk.running  # its third block would be another's
    desk.retire()
    desk.world.fence()
    desk.schedule(99)
    assert len(desk.running) == 1
    assert vault.match(keys_of(late, SIZE)[:2]) == 2
    resumes = Resumes()
    resumes.count(pool, keys, vault.match(keys), len(early) - 1 - 4)
    assert resumes.resumed_resident_total == 1


def test_what_a_preempted_stream_had_is_awaited_after_a_death() -> None:
    """It only waits for room. What an aborted one had is not."""
    for preempted in (True, False):
        desk = Desk(4, SIZE, 1, ahead=False, fifo=True)
        desk.waiting.append(Stream([0, 0, 0, 0, 0], 9))
        desk.schedule(99)
        stream = desk.running[0]
        desk.vault.preempting = preempted
        desk.abort(stream)  # while its step is in flight: published, then given up
        desk.retire()
        desk.vault.preempting = False
        assert desk.world.pool.cached_count == 2
        desk.world.die(canary=True)
        assert desk.world.pool.awaited_count == (2 if preempted else 0)
