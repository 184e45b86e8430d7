"""The index by itself: its acts, what it refuses, and that a store is one store."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from dataclasses import fields, replace

import pytest

from holdfast.kv.geometry import KEY_BYTES, Geometry, block_keys
from holdfast.kv.index import (
    HEADER_WORDS,
    Index,
    IndexOwner,
    Misuse,
    index_bytes,
    owner_word,
    read_owner,
)
from tests.rigs.kv_index import BLOCK_TOKENS, KEYS, DyingWords, fresh, geometry


def test_open_and_free_are_one_store_each_and_publish_ends_with_its_word() -> None:
    """A death can only fall between whole acts, or before the word that makes the fields count."""
    buffer = fresh(geometry())
    words = DyingWords(buffer)
    index = Index(buffer, geometry(), words=words)
    generation = index.open(0)
    assert words.stores == 1
    index.publish(0, generation, KEYS[0], epoch=10, depth=3, tokens=BLOCK_TOKENS, heat=7)
    assert (words.stores, words.last) == (8, HEADER_WORDS)
    index.free(0)
    assert words.stores == 9


def test_misuse_changes_nothing() -> None:
    """Ids outside and a second formatting are refused; acts out of order are the machine's (test_kv_machines)."""
    buffer = fresh(geometry())
    index, before = Index(buffer, geometry()), bytes(buffer)
    for act in (lambda: index.open(geometry().block_count), lambda: index.open(-1), lambda: index.format(11)):
        with pytest.raises(Misuse):
            act()
    assert bytes(buffer) == before


def test_every_field_of_the_geometry_counts() -> None:
    """Two geometries that differ anywhere have different hashes, sums and headers; a rank changes no key."""
    other = {"weights": "w2", "dtype": "float16", "rope": "base=1e6", "layout": "other"}
    base = replace(geometry(), rank_count=4)
    variants = [
        replace(base, **{name: other.get(name) or getattr(base, name) + 1})
        for name in (field.name for field in fields(Geometry))
    ]
    assert len({shape.hash for shape in [base, *variants]}) == len(variants) + 1
    assert len({shape.sum_key for shape in [base, *variants]}) == len(variants) + 1
    buffer = fresh(base)
    for variant in variants:
        if variant.block_count == base.block_count:
            assert not Index(buffer, variant).same_geometry()
    assert base.root() == replace(base, rank=3).root()
    assert base.root() != replace(base, weights="w2").root()


def test_keys_are_a_chain() -> None:
    """A key depends on every token before it, and only full blocks have one."""
    tokens = list(range(11))
    keys = block_keys(geometry().root(), tokens, 4)
    assert [len(key) for key in keys] == [KEY_BYTES] * 2
    first = block_keys(geometry().root(), tokens[:4], 4)
    assert keys == first + block_keys(first[0], tokens[4:8], 4)
    changed = block_keys(geometry().root(), [9, *tokens[1:]], 4)
    assert not set(keys) & set(changed)
    assert block_keys(geometry().root(), tokens[:3], 4) == []


def test_owner_word() -> None:
    """One word holds epoch and count; any damaged byte shows; an empty one is nobody's."""
    assert read_owner(0) is None
    word = owner_word(IndexOwner(1_790_000_000_000, 3))
    assert read_owner(word) == IndexOwner(1_790_000_000_000, 3)
    for at in range(8):
        for pattern in range(1, 256):
            assert read_owner(word ^ pattern << 8 * at) is None
    assert read_owner(owner_word(IndexOwner(5, 10_000))) == IndexOwner(5, 255)


def test_a_buffer_that_is_too_small_or_read_only() -> None:
    """Too small is an error at once; read-only can be read, and a store fails instead of being lost."""
    with pytest.raises(ValueError, match="need an index of"):
        Index(bytearray(100), geometry())
    index = Index(bytes(fresh(geometry())), geometry())
    assert index.owner == IndexOwner(10, 0)
    with pytest.raises(TypeError):
        index.open(0)


def test_a_mapping_can_be_closed() -> None:
    """`close` lets go of everything that keeps the mapping."""
    mapped = mmap.mmap(-1, index_bytes(geometry()))
    index = Index(mapped, geometry())
    index.format(10)
    index.open(0)
    index.close()
    mapped.close()


def test_a_store_is_never_seen_in_part() -> None:
    """Another process that reads while we store sees one of the two words, never a mixture."""
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    words = memoryview(shared).cast("Q")
    child = os.fork()
    if child == 0:
        while True:
            for _ in range(1000):
                words[8] = 0
                words[8] = 2**64 - 1
    try:
        seen = {words[8] for _ in range(400_000)}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert seen <= {0, 2**64 - 1}


def test_the_index_needs_no_numpy() -> None:
    """The vault, and an owner that adopts nothing, load none."""
    code = "import sys, holdfast.kv.index, holdfast.kv.pool; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
