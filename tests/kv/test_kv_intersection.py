"""Ranks take their pools over together: what one of them lacks is no use to any, and a new pool spoils nobody's."""

from __future__ import annotations

from dataclasses import replace

from holdfast.kv.adopt import FREE, QUARANTINED, YOURS, settle, survey
from holdfast.kv.geometry import Geometry
from holdfast.kv.index import FULL, OPEN, Index, index_bytes
from holdfast.kv.intersection import agreed, of_new, packed, unpacked
from holdfast.kv.pool import Pool

GEOMETRY = Geometry("w", "float32", 4, 1, 1, 2, block_count=4, rank_count=2)
KEYS = [bytes([number]) * 16 for number in range(4)]


def index_of_rank(rank: int, whole: list[int], opened: list[int]) -> Index:
    geometry = replace(GEOMETRY, rank=rank)
    index = Index(bytearray(index_bytes(geometry)), geometry)
    index.format(100)
    for block in whole:
        index.publish(block, index.open(block), KEYS[block], epoch=100, depth=0, tokens=4)
    for block in opened:
        index.open(block)
    return index


def test_a_survey_is_the_same_after_its_way() -> None:
    """Packed and unpacked, nothing of it is lost; and ranks' surveys are of one length, whatever they say."""
    some, none = survey(index_of_rank(0, [0, 2], [1])), survey(index_of_rank(1, [], []))
    assert unpacked(packed(some)) == some
    assert len(packed(some)) == len(packed(replace(none, reason="adopted before, and no canary has passed since")))


def test_every_rank_keeps_what_all_have() -> None:
    """Whole on both: kept; whole on one: free on both; open on one: in quarantine on both."""
    indexes = [index_of_rank(0, [0, 1, 2], []), index_of_rank(1, [0, 2], [3])]
    surveys = [packed(survey(index)) for index in indexes]
    adoptions = [settle(index, agreed(surveys, rank), 101) for rank, index in enumerate(indexes)]
    for adoption in adoptions:
        assert list(adoption.verdicts) == [YOURS, FREE, YOURS, QUARANTINED]
        assert adoption.by_key == {KEYS[0]: 0, KEYS[2]: 2}
    assert [index.state(1) for index in indexes] == [0, 0]
    assert [index.state(3) for index in indexes] == [0, OPEN]


def test_a_new_pool_beside_an_old_one() -> None:
    """A rank whose pool was made anew has nothing, so nobody has; what is open on the other stays untouched on both
    until the fence, and then both are free."""
    new, old = index_of_rank(0, [], []), index_of_rank(1, [0, 1], [2])
    new.store_owner(replace(new.owner, epoch=101))  # type: ignore[type-var]
    surveys = [packed(survey(index)) for index in (new, old)]
    pool = Pool(new, 101, adoption=of_new(new, agreed(surveys, 0), 101))
    adoption = settle(old, agreed(surveys, 1), 101)
    assert (pool.free_count, pool.cached_count, pool.quarantined_count) == (3, 0, 1)
    assert adoption.by_key == {}
    assert FULL not in [old.state(block) for block in range(4)]
    assert pool.gpu_fence_passed() == 1
    assert pool.free_count == 4
