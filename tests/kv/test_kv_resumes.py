"""Streams that come back, told apart by what became of their blocks."""

from __future__ import annotations

from holdfast.kv import adopt
from holdfast.kv.geometry import KEY_BYTES
from holdfast.kv.index import Index
from holdfast.kv.pool import Pool, Resumes
from tests.rigs.kv_index import KEYS, filled, fresh, geometry

SHAPE = geometry(8)


def test_a_stream_is_resident_evicted_or_missing() -> None:
    """All found: resident; a block gone that the new owner had: evicted; one that it never had: missing. The worst of
    the resident ones is told apart from the worst of all."""
    index = Index(fresh(SHAPE), SHAPE)
    dead = Pool(index, 10)
    filled(dead, KEYS[:4])
    heir = Pool(index, 11, adoption=adopt.adopt(index, 11))
    resumes = Resumes()
    resumes.count(heir, KEYS[:4], heir.match(KEYS[:4]), 3)
    resumes.count(heir, [], 0, 2)
    assert (resumes.resumed_resident_total, resumes.resumed_evicted_total, resumes.resumed_missing_total) == (2, 0, 0)
    resumes.count(heir, KEYS[:5], heir.match(KEYS[:5]), 7)
    assert (resumes.resumed_resident_total, resumes.resumed_evicted_total, resumes.resumed_missing_total) == (2, 0, 1)
    heir.evict(1)
    resumes.count(heir, KEYS[:4], heir.match(KEYS[:4]), 9)
    assert (resumes.resumed_resident_total, resumes.resumed_evicted_total, resumes.resumed_missing_total) == (2, 1, 1)
    assert (resumes.recomputed_tokens_max, resumes.recomputed_tokens_resident_max) == (9, 3)
    assert (resumes.resumed_total, resumes.recomputed_tokens_total) == (4, 21)


def test_what_is_not_believed_was_never_there() -> None:
    """A pool adopted twice without a canary is emptied: what is gone of it is missing, not evicted."""
    index = Index(fresh(SHAPE), SHAPE)
    filled(Pool(index, 10), KEYS[:1])
    adopt.adopt(index, 11)
    heir = Pool(index, 12, adoption=adopt.adopt(index, 12))
    assert not heir.adopted(KEYS[0])
    assert not Pool(Index(fresh(SHAPE), SHAPE), 10).adopted(KEYS[0])


def test_a_key_is_found_only_where_it_is_one() -> None:
    """Bytes that lie across two keys, or in an entry that was not believed, are no adopted key."""
    index = Index(fresh(SHAPE), SHAPE)
    dead = Pool(index, 10)
    blocks = filled(dead, KEYS[:3])
    dead.release(blocks[2:])
    assert dead.evict(1) == 1  # its entry keeps the key's bytes, free
    adoption = adopt.adopt(index, 11)
    assert all(map(adoption.had, KEYS[:2]))
    assert KEYS[2] in adoption.keys
    assert not adoption.had(KEYS[2])
    across = min(blocks[:2]) * KEY_BYTES + KEY_BYTES // 2
    assert not adoption.had(adoption.keys[across : across + KEY_BYTES])
