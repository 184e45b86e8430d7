"""The owner, or the adopter, dies after every single store; what survives is adopted. Enumerated, not drawn."""

from __future__ import annotations

import itertools

import pytest

from holdfast.kv import adopt
from holdfast.kv.index import Index, IndexOwner, index_bytes
from holdfast.kv.pool import NoRoom, Pool
from tests.rigs.kv_index import (
    BLOCK_TOKENS,
    KEYS,
    Died,
    DyingWords,
    Script,
    World,
    believed,
    fresh,
    geometry,
    quarantined,
    run,
)


def fills_and_frees(world: World) -> None:
    for block in range(5):
        world.fill(block, KEYS[block])
    world.free(1)
    world.write(1)  # stays open
    world.free(2)


def reuses_one_block(world: World) -> None:
    for key in KEYS[:4]:
        world.fill(0, key)
    world.write(0)


def same_key_moves(world: World) -> None:
    world.fill(3, KEYS[0])
    world.free(3)
    world.fill(1, KEYS[0])
    world.free(1)
    world.fill(5, KEYS[0])


def cancels_and_takes_up(world: World) -> None:
    for block in range(4):
        world.write(block)
    world.publish(2, KEYS[2], depth=2)
    world.free(0)  # cancelled; its last writer has retired
    world.publish(1, KEYS[1], depth=1)
    world.fill(0, KEYS[4])
    world.write(2)  # withdrawn and written again


SCRIPTS: list[Script] = [fills_and_frees, reuses_one_block, same_key_moves, cancels_and_takes_up]


def deaths(script: Script) -> list[World]:
    """The world after each number of stores, up to the script's end."""
    worlds = []
    for stores in itertools.count():
        world, ended = run(script, geometry(), stores)
        worlds.append(world)
        if ended:
            return worlds
    raise AssertionError("unreachable")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_owner_dies_after_every_store(script: Script) -> None:
    """Nothing incomplete is believed, nothing published is lost, nothing queued is reused, after every single store."""
    worlds = deaths(script)
    assert len(worlds) > 20
    for world in worlds:
        world.check(adopt.adopt(Index(world.buffer, geometry()), 11))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_adopter_dies_after_every_store(script: Script) -> None:
    """Whatever an adopter had stored when it died, the next adopter finds what the first would have found."""
    for world in deaths(script):
        # Something to refuse, so that adoption itself has stores to die after: an entry of an epoch yet to come.
        spare = 4
        strange = Index(world.buffer, geometry())
        if strange.entry(spare).state == 0:
            generation = strange.open(spare)
            strange.publish(spare, generation, KEYS[50], epoch=99, depth=0, tokens=BLOCK_TOKENS)
        for stores in itertools.count():
            buffer = bytearray(world.buffer)
            try:
                adopt.adopt(Index(buffer, geometry(), words=DyingWords(buffer, stores)), 11)
                break
            except Died:
                world.check(adopt.adopt(Index(buffer, geometry()), 12))


def dying_adoptions(buffer: bytearray, epoch: int) -> list[bytearray]:
    """The bytes an adopter leaves when it dies after each number of stores short of the last."""
    left = []
    for stores in itertools.count():
        copy = bytearray(buffer)
        try:
            adopt.adopt(Index(copy, geometry(), words=DyingWords(copy, stores)), epoch)
        except Died:
            left.append(copy)
        else:
            return left
    raise AssertionError("unreachable")


def test_a_disbelieving_adopter_dies_after_every_store() -> None:
    """Without a canary since the last adoption the next adopter believes nothing either, wherever this one died."""
    world, _ = run(fills_and_frees, geometry(), None)
    world.index.store_owner(IndexOwner(10, 1))
    left = dying_adoptions(world.buffer, 11)
    assert len(left) == 4  # three FULL entries made FREE, and the owner's word
    for buffer in left:
        adoption = adopt.adopt(Index(buffer, geometry()), 12)
        assert believed(adoption) == {}
        assert adoption.reason == adopt.NO_CANARY
        assert quarantined(adoption) == {1}


def test_an_adopter_of_another_geometry_dies_after_every_store() -> None:
    """Under another geometry nothing is believed and *everything* is quarantined, also by whoever comes after."""
    old = geometry(weights="w0")
    world = World(fresh(old), old, 10)
    fills_and_frees(world)
    left = dying_adoptions(world.buffer, 11)
    assert len(left) > geometry().block_count + 100
    for buffer in left:
        for shape in (geometry(), old):
            adoption = adopt.adopt(Index(bytearray(buffer), shape), 12)
            if shape == geometry():
                assert believed(adoption) == {}
                assert quarantined(adoption) == set(range(geometry().block_count))
            else:
                mine = believed(adoption)
                assert mine.items() <= world.published.items()  # its own, where nothing has been changed yet
                assert 1 in quarantined(adoption)


def test_formatting_dies_after_every_store() -> None:
    """A half-made index is nobody's: nothing is believed and nothing is handed out before the GPU fence."""
    for stores in range(512):
        buffer = bytearray(index_bytes(geometry()))
        with pytest.raises(Died):
            Index(buffer, geometry(), words=DyingWords(buffer, stores)).format(10)
        adoption = adopt.adopt(Index(buffer, geometry()), 11)
        assert believed(adoption) == {}
        assert adoption.reason in (adopt.OTHER_GEOMETRY, adopt.DAMAGED_OWNER)


def test_ranks_die_between_each_others_stores() -> None:
    """An adopter that settled some ranks and not others has served nothing: the next believes all they agree on."""
    shapes = [geometry(rank=rank, rank_count=2) for rank in range(2)]
    buffers = [fresh(shape) for shape in shapes]
    for block in range(3):
        for shape, buffer in zip(shapes, buffers, strict=True):
            if (block, shape.rank) != (2, 1):  # rank 1 died one block earlier
                World(buffer, shape, 10).fill(block, KEYS[block])
    for stores in range(8):
        copies = [bytearray(buffer) for buffer in buffers]
        left = stores
        try:
            for words, found, copy, shape in ranks(copies, shapes, left):
                adopt.write_verdicts(Index(copy, shape, words=words), found, 11)
                words.stores_left = None
        except Died:
            pass
        again = [adopt.survey(Index(copy, shape)) for copy, shape in zip(copies, shapes, strict=True)]
        adoptions = [
            adopt.write_verdicts(Index(copy, shape), found, 12)
            for copy, shape, found in zip(copies, shapes, adopt.agree(again), strict=True)
        ]
        complete = all(survey.epoch == 11 for survey in again)
        expected = {} if complete else {KEYS[0]: 0, KEYS[1]: 1}
        assert [believed(adoption) for adoption in adoptions] == [expected, expected]


def ranks(copies, shapes, stores_left):  # type: ignore[no-untyped-def]
    """Each rank's words, with what is left of one budget of stores over all of them."""
    surveys = adopt.agree([adopt.survey(Index(copy, shape)) for copy, shape in zip(copies, shapes, strict=True)])
    for copy, shape, found in zip(copies, shapes, surveys, strict=True):
        words = DyingWords(copy, stores_left)
        yield words, found, copy, shape
        stores_left -= words.stores


def pool_script(pool: Pool, world: World) -> None:
    """A pool at work in a tight space: twins, eviction, withdrawal. The world is told what is queued and complete."""

    def take() -> tuple[int, int]:
        victims = dict(world.published)
        got = pool.allocate()
        assert not isinstance(got, NoRoom), victims
        world.queued.add(got[0][0])
        world.content[got[0][0]] = b"partial"
        return got[0]

    def put(block: int, generation: int, key: bytes, depth: int) -> None:
        world.queued.discard(block)
        world.content[block] = key
        if pool.publish(block, generation, key, depth) == block:
            world.published[key] = block

    for depth, key in enumerate(KEYS[:4]):
        put(*take(), key, depth)
    twin, generation = take()
    put(twin, generation, KEYS[1], 1)
    pool.release([twin])
    world.published = {}  # from here on an eviction may take any of them
    pool.release(list(range(pool.index.geometry.block_count))[-4:])
    for depth, key in enumerate(KEYS[10:15]):
        put(*take(), key, depth)
    pool.evict(1)


def test_a_pool_dies_after_every_store() -> None:
    """The allocator's own order of acts is as safe as the index's, store by store."""
    for stores in itertools.count():
        world = World(fresh(geometry()), geometry(), 10, stores)
        try:
            pool_script(Pool(world.index, 10), world)
        except Died:
            world.check(adopt.adopt(Index(world.buffer, geometry()), 11))
        else:
            assert stores > 50
            return


def test_a_block_that_makes_way_is_there_until_its_successor_is() -> None:
    """A text made again while its old block is cached: dying after any store, an adopter finds one block of the key."""
    for stores in itertools.count():
        world = World(fresh(geometry()), geometry(), 10)
        pool = Pool(world.index, 10)
        [(old, generation)] = taken(pool)
        pool.publish(old, generation, KEYS[0], 0)
        [(new, generation)] = taken(pool)
        pool.release([old])
        world.words.stores_left = world.words.stores + stores
        try:
            pool.publish(new, generation, KEYS[0], 0)
        except Died:
            assert adopt.adopt(Index(world.buffer, geometry()), 11).by_key[KEYS[0]] in (old, new)
        else:
            assert stores > 6
            return


def taken(pool: Pool) -> list[tuple[int, int]]:
    got = pool.allocate()
    assert not isinstance(got, NoRoom)
    return got
