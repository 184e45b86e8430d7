"""Damage: every byte of every kind of entry and of the header, in every bit and as a whole."""

from __future__ import annotations

import pytest
from kv_rig import KEYS, World, believed, fresh, geometry, quarantined

from holdfast.kv import adopt
from holdfast.kv.follow import Follower
from holdfast.kv.index import ENTRY_BYTES, HEADER_BYTES, STATIC_BYTES, Index

SHAPE = geometry()
PATTERNS = (*(1 << bit for bit in range(8)), 0xFF, 0x3C, 0x5A, 0xC3, 0xA5)
WHOLE, OPENED, UNUSED = 0, 1, 2
HINTS = range(48, 64)  # heat, and the word not used: nothing is believed because of them


def example() -> World:
    """One block of each state, and one more that must never be touched by damage elsewhere."""
    world = World(fresh(SHAPE), SHAPE, 10)
    world.fill(WHOLE, KEYS[0])
    world.write(OPENED)
    world.fill(3, KEYS[3])
    return world


def flipped(at: int, pattern: int) -> bytearray:
    buffer = bytearray(EXAMPLE)
    buffer[at] ^= pattern
    return buffer


EXAMPLE = bytes(example().buffer)


@pytest.mark.parametrize("byte", range(ENTRY_BYTES))
def test_a_damaged_entry_is_never_believed(byte: int) -> None:
    """Whatever byte of an entry changes: it is not believed, or nothing that matters changed; an open block stays shut;
    others are not touched; and a follower that had seen it whole says the same."""
    for block in (WHOLE, OPENED, UNUSED):
        for pattern in PATTERNS:
            at = HEADER_BYTES + block * ENTRY_BYTES + byte
            buffer = bytearray(EXAMPLE)
            follower = Follower(Index(buffer, SHAPE))
            follower.poll()
            buffer[at] ^= pattern
            assert follower.survey() == adopt.survey(Index(buffer, SHAPE))
            adoption = adopt.adopt(Index(buffer, SHAPE), 11)
            expected = {KEYS[3]: 3} | ({KEYS[0]: WHOLE} if block != WHOLE or byte in HINTS else {})
            assert believed(adoption) == expected
            assert OPENED in quarantined(adoption)
            if block == WHOLE and byte not in HINTS:
                assert WHOLE in quarantined(adoption)  # who knows what else was damaged: not before the fence


def test_a_damaged_header_means_nothing_is_believed() -> None:
    """Every byte of the header counts: the geometry's part shuts all blocks, the owner's word stops belief only."""
    for at in range(HEADER_BYTES):
        for pattern in (0x01, 0x80, 0xFF):
            adoption = adopt.adopt(Index(flipped(at, pattern), SHAPE), 2**40)
            assert believed(adoption) == {}
            assert OPENED in quarantined(adoption)
            if at < STATIC_BYTES:
                assert adoption.reason == adopt.OTHER_GEOMETRY
                assert quarantined(adoption) == set(range(SHAPE.block_count))
            else:
                assert adoption.reason == adopt.DAMAGED_OWNER


def test_an_entry_copied_to_another_block_is_not_believed() -> None:
    """The sum is over the block id too."""
    buffer = bytearray(EXAMPLE)
    source = HEADER_BYTES + WHOLE * ENTRY_BYTES
    target = HEADER_BYTES + 5 * ENTRY_BYTES
    buffer[target : target + ENTRY_BYTES] = buffer[source : source + ENTRY_BYTES]
    buffer[source : source + ENTRY_BYTES] = bytes(ENTRY_BYTES)
    assert believed(adopt.adopt(Index(buffer, SHAPE), 11)) == {KEYS[3]: 3}


def test_two_words_damaged_in_the_same_bit_are_seen() -> None:
    """A plain weighted sum would miss the top bit of two words; the mix does not."""
    for first in range(0, 48, 8):
        for second in range(first + 8, 48, 8):
            buffer = bytearray(EXAMPLE)
            for word in (first, second):
                buffer[HEADER_BYTES + WHOLE * ENTRY_BYTES + word + 7] ^= 0x80
            assert believed(adopt.adopt(Index(buffer, SHAPE), 11)) == {KEYS[3]: 3}
