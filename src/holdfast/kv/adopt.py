"""Taking over a KV pool: which entries of a dead owner may be believed, decided in one vectorised pass.

To be called past the CPU fence of all earlier owners (nothing stores any more), with a newer epoch. What must hold:
- a block is *yours* only if its entry is FULL and whole, of an epoch up to the old owner's, with the full token count,
  and the first of its key. Its content was complete before its entry said so.
- a block that may still be written by work queued on the device is *quarantined* until the GPU fence of all earlier
  owners (facts 4b): OPEN ones, those whose word or sum is damaged, and under another geometry all of them, because a
  block id then means other bytes.
- dying in the middle loses nothing: the owner's word is the last store; the next adopter finds the same and repeats.
- no FULL entry is believed under another geometry, with a damaged owner, or when the pool was adopted before and no
  canary has passed since: what was adopted may be what kills.
Ranks that share one block table each survey their own index, all get all surveys, and each comes to the same answer by
itself (`agree`): nothing is stored in any index before all have been heard.

numpy is imported here and in follow.py only: the vault never loads either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.kv import index as layout
from holdfast.kv.geometry import KEY_BYTES, Geometry
from holdfast.kv.index import (
    ADOPTIONS_WITHOUT_CANARY_MAX,
    ENTRY_BYTES,
    ENTRY_WORDS,
    HEADER_BYTES,
    HEADER_WORDS,
    Index,
    Owner,
)

# Verdicts, one byte per block.
FREE, YOURS, REFUSED, QUARANTINED = range(4)

HEAD_BYTES = 256  # of a survey on its way: a reason is a few words

OTHER_GEOMETRY = "other geometry"
DAMAGED_OWNER = "the owner's word is damaged or was never stored"
NO_CANARY = "adopted before, and no canary has passed since"

Table: TypeAlias = NDArray[np.uint64]
# A row of the table with nothing but its key.
ROW = np.dtype(
    {"names": ["key"], "formats": [f"V{KEY_BYTES}"], "offsets": [8 * layout.KEY_LOW], "itemsize": ENTRY_BYTES}
)


class StaleEpoch(Exception):
    """Someone newer owns the pool; nothing has been stored."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a rank's index says, nothing changed yet. Plain bytes, so that ranks can send it to each other."""

    reason: str  # why no FULL entry may be believed; empty: they may
    epoch: int  # the old owner's
    adoptions: int  # since the last canary
    verdicts: bytes  # one per block
    keys: bytes  # KEY_BYTES per block, meaningful where the verdict is YOURS


@dataclass(frozen=True, slots=True)
class Adoption:
    """What a new owner starts with."""

    index: Index
    epoch: int
    adoptions: int  # since the last canary, this one counted
    reason: str  # why nothing was believed; empty: what was whole is ours
    verdicts: bytes
    keys: bytes
    by_key: dict[bytes, int]

    def blocks_of(self, verdict: int) -> list[int]:
        return np.flatnonzero(np.frombuffer(self.verdicts, np.uint8) == verdict).tolist()

    def had(self, key: bytes) -> bool:
        """Whether a block of this key was believed, whatever became of it since. A search of all keys: for rare use."""
        at = self.keys.find(key)
        while at >= 0 and (at % KEY_BYTES or self.verdicts[at // KEY_BYTES] != YOURS):
            at = self.keys.find(key, at + 1)
        return at >= 0

    def coldest_first(self, wanted: bytes) -> tuple[list[int], list[int]]:
        """Blocks whose byte in `wanted` is not 0, in the order to evict: those of no running stream by last use, and
        those of the streams that ran when the owner died, deepest first (a block without its parent is unreachable)."""
        blocks = np.flatnonzero(np.frombuffer(wanted, np.uint8))
        table = read_table(self.index)[blocks]
        heat, depth = table[:, layout.HEAT], table[:, layout.SHAPE] >> np.uint64(32)
        shallow_last = ~depth
        order = np.lexsort((shallow_last, heat))
        live = heat >= layout.LIVE
        live_order = np.lexsort((heat, shallow_last))
        cold = blocks[order[~live[order]]]
        return cold.tolist(), blocks[live_order[live[live_order]]].tolist()


def adopt(index: Index, epoch: int) -> Adoption:
    """Take over the pool of an engine with one rank."""
    return settle(index, survey(index), epoch)


def survey(index: Index) -> Survey:
    """Read everything once. Stores nothing."""
    owner, same = index.owner, index.same_geometry()
    if not same:
        return _nothing(index.geometry, owner)
    table = read_table(index).copy()
    verdicts = judge(table, index.geometry, owner.epoch if owner else 0)
    keys = read_keys(table)
    refuse_twins(verdicts, table, keys)
    return Survey(
        reason="" if owner else DAMAGED_OWNER,
        epoch=owner.epoch if owner else 0,
        adoptions=owner.adoptions if owner else 0,
        verdicts=verdicts.tobytes(),
        keys=keys.tobytes(),
    )


def agree(ranks: Sequence[Survey]) -> list[Survey]:
    """What all ranks of a tensor-parallel engine may believe: a block is yours where every rank has it whole under the
    same key, quarantined where any has it so. The smallest count of adoptions holds: an adopter that died between two
    ranks has served nothing."""
    verdicts = np.stack([np.frombuffer(rank.verdicts, np.uint8) for rank in ranks])
    keys = np.stack([np.frombuffer(rank.keys, np.uint64).reshape(-1, 2) for rank in ranks])
    same = np.all(keys == keys[0], axis=(0, 2)) & np.all(verdicts == YOURS, axis=0)
    verdicts = np.where((verdicts == YOURS) & ~same, np.uint8(REFUSED), verdicts)
    verdicts = np.where(np.any(verdicts == QUARANTINED, axis=0), np.uint8(QUARANTINED), verdicts)
    reason = next((rank.reason for rank in ranks if rank.reason), "")
    adoptions = min(rank.adoptions for rank in ranks)
    return [
        # A rank whose own geometry differs keeps that reason: its header has to be made anew.
        replace(rank, reason=rank.reason or reason, adoptions=adoptions, verdicts=row.tobytes())
        for rank, row in zip(ranks, verdicts, strict=True)
    ]


class _Head(msgspec.Struct, frozen=True, array_like=True):
    reason: str
    epoch: int
    adoptions: int
    blocks: int


def packed(found: Survey) -> bytes:
    """For the other ranks: those with as many blocks send as many bytes."""
    head = msgspec.json.encode(_Head(found.reason, found.epoch, found.adoptions, len(found.verdicts)))
    assert len(head) <= HEAD_BYTES, "a reason is a few words"
    return head.ljust(HEAD_BYTES) + found.verdicts + found.keys


def unpacked(data: bytes) -> Survey:
    head = msgspec.json.decode(data[:HEAD_BYTES].rstrip(), type=_Head)
    verdicts, keys = data[HEAD_BYTES:][: head.blocks], data[HEAD_BYTES + head.blocks :]
    assert len(keys) == KEY_BYTES * head.blocks, "a survey was cut"
    return Survey(head.reason, head.epoch, head.adoptions, verdicts, keys)


def settle(index: Index, found: Survey, epoch: int, by_key: dict[bytes, int] | None = None) -> Adoption:
    """Make the index say what was decided; the last store makes `epoch` its owner. `by_key` saves building it, if the
    caller followed the index as it grew."""
    owner = index.owner
    if owner is not None and owner.epoch >= epoch:
        raise StaleEpoch(f"the pool belongs to epoch {owner.epoch}; epoch {epoch} comes too late")
    reason = found.reason or (NO_CANARY if found.adoptions >= ADOPTIONS_WITHOUT_CANARY_MAX else "")
    verdicts = found.verdicts.replace(bytes([YOURS]), bytes([REFUSED])) if reason else found.verdicts
    if found.reason == OTHER_GEOMETRY and not index.same_geometry():
        _renew(index)
    else:
        for block in np.flatnonzero(np.frombuffer(verdicts, np.uint8) == REFUSED).tolist():
            index.free(block)
    adoptions = min(found.adoptions + 1, layout.ADOPTIONS_MAX)
    index.store_owner(Owner(epoch, adoptions))  # last: until here the next adopter finds what we found
    if by_key is None or reason or len(by_key) != verdicts.count(YOURS):
        by_key = claims(replace(found, verdicts=verdicts))
    final = verdicts.replace(bytes([REFUSED]), bytes([FREE]))
    return Adoption(index, epoch, adoptions, reason, final, found.keys, by_key)


def of_new(index: Index, found: Survey, epoch: int) -> Adoption:
    """A pool that was made under this very epoch, in a group that took others over: nothing in it is whole, and what
    is quarantined on another rank is not to be used on this one."""
    assert YOURS not in found.verdicts, "a new pool has no whole block"
    final = found.verdicts.replace(bytes([REFUSED]), bytes([FREE]))
    return Adoption(index, epoch, 0, found.reason, final, found.keys, {})


def claims(found: Survey) -> dict[bytes, int]:
    """Key → block of all that is yours."""
    blocks = np.flatnonzero(np.frombuffer(found.verdicts, np.uint8) == YOURS)
    keys = np.frombuffer(found.keys, f"V{KEY_BYTES}")[blocks]
    return dict(zip(keys.tolist(), blocks.tolist(), strict=True))


def _nothing(geometry: Geometry, owner: Owner | None) -> Survey:
    count = geometry.block_count
    adoptions = owner.adoptions if owner else 0
    quarantined = bytes([QUARANTINED]) * count
    return Survey(OTHER_GEOMETRY, owner.epoch if owner else 0, adoptions, quarantined, bytes(KEY_BYTES * count))


def _renew(index: Index) -> None:
    """First every block becomes OPEN, then the header ours: whoever adopts after our death quarantines them all too."""
    words = index.words
    for block in range(index.geometry.block_count):
        at = HEADER_WORDS + block * ENTRY_WORDS
        words[at] = words[at] & ~layout.STATE_MASK | layout.OPEN
    index.store_header()


# -- the vectorised pass


def read_table(index: Index) -> Table:
    """All entries, a row of words each: a view, not a copy."""
    words = np.frombuffer(index.view, np.uint64, offset=HEADER_BYTES)
    return words.reshape(-1, ENTRY_WORDS)


def read_keys(table: Table) -> NDArray[np.void]:
    """The keys of all rows, a view."""
    keys: NDArray[np.void] = table.view(ROW)["key"][:, 0]
    return keys


def judge(table: Table, geometry: Geometry, owner_epoch: int, blocks: Table | None = None) -> NDArray[np.uint8]:
    """A verdict per row, each by itself. `blocks` are the rows' block ids, if they are not 0, 1, 2, …"""
    word = table[:, layout.WORD]
    state = word & np.uint64(layout.STATE_MASK)
    full, free = state == layout.FULL, state == layout.FREE
    if blocks is None:
        blocks = np.arange(len(table), dtype=np.uint64)
    whole = sums(table, geometry.sum_key, blocks) == table[:, layout.SUM]
    right = (table[:, layout.EPOCH] <= np.uint64(owner_epoch)) & (
        (table[:, layout.SHAPE] & np.uint64(0xFFFFFFFF)) == np.uint64(geometry.block_tokens)
    )
    verdicts = np.full(len(table), QUARANTINED, np.uint8)
    verdicts[free] = FREE
    verdicts[full & whole & right] = YOURS
    verdicts[full & whole & ~right] = REFUSED
    return verdicts


def sums(table: Table, seed: int, blocks: Table) -> Table:
    """`index.entry_sum` of every row."""
    mix, half = np.uint64(layout.MIX), np.uint64(32)
    mixed = (blocks ^ np.uint64(seed)) * mix
    high = np.empty_like(mixed)
    for field in (layout.WORD, layout.EPOCH, layout.SHAPE, layout.KEY_LOW, layout.KEY_HIGH):
        mixed ^= np.right_shift(mixed, half, out=high)
        mixed ^= table[:, field]
        mixed *= mix
    mixed ^= np.right_shift(mixed, half, out=high)
    return mixed


def refuse_twins(verdicts: NDArray[np.uint8], table: Table, keys: NDArray[np.void]) -> None:
    """Of several blocks with one key the first is believed. A right owner makes none: look closely only if need be."""
    blocks = np.flatnonzero(verdicts == YOURS)
    # Four bytes of a key sort in half the time, and two of 65,536 agree in them by chance every other time.
    part = table[blocks, layout.KEY_LOW].astype(np.uint32)
    ordered = np.sort(part)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(repeated):
        return
    blocks = blocks[np.isin(part, repeated)]
    seen: set[bytes] = set()
    for block, key in zip(blocks.tolist(), keys[blocks].tolist(), strict=True):
        if key in seen:
            verdicts[block] = REFUSED
        seen.add(key)
