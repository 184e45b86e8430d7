"""Damage: every byte of every kind of entry and of the header, in every bit and as a whole."""

from __future__ import annotations

import itertools

import pytest

from holdfast.kv import adopt
from holdfast.kv.adopt import Follower
from holdfast.kv.index import ENTRY_BYTES, HEADER_BYTES, HEAT, KEY_HIGH, STATIC_BYTES, Index
from tests.rigs.kv_index import KEYS, World, believed, fresh, geometry, quarantined

PATTERNS = (*(1 << bit for bit in range(8)), 0xFF, 0x3C, 0x5A, 0xC3, 0xA5)
WHOLE, OPENED, UNUSED = 0, 1, 2


def counts(byte: int) -> bool:
    """Whether something is believed because of it: neither heat nor the word after the key."""
    return byte // 8 != HEAT and byte // 8 <= KEY_HIGH


def example() -> World:
    """One block of each state, and one more that must never be touched by damage elsewhere."""
    world = World(fresh(geometry()), geometry(), 10)
    world.fill(WHOLE, KEYS[0])
    world.write(OPENED)
    world.fill(3, KEYS[3])
    return world


def entry_at(block: int) -> int:
    return HEADER_BYTES + block * ENTRY_BYTES


@pytest.mark.parametrize("byte", range(ENTRY_BYTES))
def test_a_damaged_entry_is_never_believed(byte: int) -> None:
    """Whatever byte of an entry changes: it is not believed, or nothing that matters changed; an open block stays shut;
    others are not touched; and a follower that had seen it whole says the same."""
    whole = example().buffer
    for block in (WHOLE, OPENED, UNUSED):
        for pattern in PATTERNS:
            at = entry_at(block) + byte
            buffer = bytearray(whole)
            follower = Follower(Index(buffer, geometry()))
            follower.poll()
            buffer[at] ^= pattern
            assert follower.survey() == adopt.survey(Index(buffer, geometry()))
            adoption = adopt.adopt(Index(buffer, geometry()), 11)
            expected = {KEYS[3]: 3} | ({KEYS[0]: WHOLE} if block != WHOLE or not counts(byte) else {})
            assert believed(adoption) == expected
            assert OPENED in quarantined(adoption)
            if block == WHOLE and counts(byte):
                assert WHOLE in quarantined(adoption)  # who knows what else was damaged: not before the fence


def test_a_damaged_header_means_nothing_is_believed() -> None:
    """Every byte of the header counts: the geometry's part shuts all blocks, the owner's word stops belief only."""
    whole = example().buffer
    for at in range(HEADER_BYTES):
        for pattern in (0x01, 0x80, 0xFF):
            buffer = bytearray(whole)
            buffer[at] ^= pattern
            adoption = adopt.adopt(Index(buffer, geometry()), 2**40)
            assert believed(adoption) == {}
            assert OPENED in quarantined(adoption)
            if at < STATIC_BYTES:
                assert adoption.reason == adopt.OTHER_GEOMETRY
                assert quarantined(adoption) == set(range(geometry().block_count))
            else:
                assert adoption.reason == adopt.DAMAGED_OWNER


def test_an_entry_copied_to_another_block_is_not_believed() -> None:
    """The sum is over the block id too."""
    buffer = example().buffer
    source, target = entry_at(WHOLE), entry_at(5)
    buffer[target : target + ENTRY_BYTES] = buffer[source : source + ENTRY_BYTES]
    buffer[source : source + ENTRY_BYTES] = bytes(ENTRY_BYTES)
    assert believed(adopt.adopt(Index(buffer, geometry()), 11)) == {KEYS[3]: 3}


def test_two_words_damaged_in_the_same_bit_are_seen() -> None:
    """A plain weighted sum would miss the top bit of two words; the mix does not."""
    words = [byte for byte in range(0, ENTRY_BYTES, 8) if counts(byte)]
    for pair in itertools.combinations(words, 2):
        buffer = example().buffer
        for word in pair:
            buffer[entry_at(WHOLE) + word + 7] ^= 0x80
        assert believed(adopt.adopt(Index(buffer, geometry()), 11)) == {KEYS[3]: 3}
