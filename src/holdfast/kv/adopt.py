"""Takes over a KV pool: decides in one vectorised pass which entries of a dead owner are reused.

Call it with a newer epoch, after the CPU fence of all earlier owners: none of them can store any more. Always true:
- A block is *yours* only if its entry is FULL, has a correct sum, the full token count and an epoch up to the old
  owner's, and is the first entry with its key. The owner completes a block's content before it marks the entry FULL.
- A block that work queued on the device may still write is *quarantined* until the GPU fence of all earlier owners
  (facts 4b). These are OPEN blocks and blocks with a damaged state or sum. If the geometry differs, all blocks are
  quarantined, because a block id then means other bytes.
- An adopter that dies midway loses nothing: it stores the owner word last, so the next adopter repeats the adoption.
- No FULL entry is reused if the geometry differs, if the owner word is damaged, or if the pool was adopted before
  and no canary has passed since: the adopted content may be what crashed the last owner.

Ranks that share one block table each survey their own index and exchange the surveys. From these each rank computes
the same result (`agree`). No rank stores anything in its index before it has all surveys.

numpy is imported here only: the vault never loads this module.
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
    HEAT,
    Index,
    IndexOwner,
)

# Verdicts, one byte per block.
FREE, YOURS, REFUSED, QUARANTINED = range(4)

HEAD_BYTES = 256  # head of an encoded survey: the reason is a few words

OTHER_GEOMETRY = "other geometry"
DAMAGED_OWNER = "the owner's word is damaged or was never stored"
NO_CANARY = "adopted before, and no canary has passed since"

Table: TypeAlias = NDArray[np.uint64]
# Reads only the key of a table row.
ROW = np.dtype(
    {"names": ["key"], "formats": [f"V{KEY_BYTES}"], "offsets": [8 * layout.KEY_LOW], "itemsize": ENTRY_BYTES}
)


class StaleEpoch(Exception):
    """Raised if a newer epoch owns the pool; nothing has been stored."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The content of one rank's index before any change. Plain bytes, so that ranks can exchange surveys."""

    reason: str  # why no FULL entry may be reused; empty: they may
    epoch: int  # the old owner's
    adoptions: int  # since the last canary
    verdicts: bytes  # one per block
    keys: bytes  # KEY_BYTES per block, meaningful where the verdict is YOURS


@dataclass(frozen=True, slots=True)
class Adoption:
    """The state of the pool that a new owner starts with."""

    index: Index
    epoch: int
    adoptions: int  # since the last canary, including this one
    reason: str  # why no block was reused; empty: all whole blocks are
    verdicts: bytes
    keys: bytes
    by_key: dict[bytes, int]

    def blocks_of(self, verdict: int) -> list[int]:
        return np.flatnonzero(np.frombuffer(self.verdicts, np.uint8) == verdict).tolist()

    def had(self, key: bytes) -> bool:
        """Return True if a block of this key was adopted, even if it was evicted since. Slow: searches all keys."""
        at = self.keys.find(key)
        while at >= 0 and (at % KEY_BYTES or self.verdicts[at // KEY_BYTES] != YOURS):
            at = self.keys.find(key, at + 1)
        return at >= 0

    def coldest_first(self, wanted: bytes) -> tuple[list[int], list[int]]:
        """Return the blocks whose byte in `wanted` is not 0, as two lists in eviction order.

        - blocks of no running stream, the longest unused first
        - blocks of streams that ran when the owner died, deepest first (a block without its parent is unreachable)
        """
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
    return write_verdicts(index, survey(index), epoch)


def survey(index: Index) -> Survey:
    """Read the whole index once and return a verdict per block. Stores nothing."""
    owner, same = index.owner, index.same_geometry()
    if not same:
        return _nothing(index.geometry, owner)
    table = read_table(index).copy()
    verdicts = classify_entries(table, index.geometry, owner.epoch if owner else 0)
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
    """Return each rank's survey with the verdicts common to all ranks of a tensor-parallel engine.

    A block is yours if every rank has it whole under the same key, and quarantined if any rank has it quarantined. The
    smallest count of adoptions applies: an adopter that died before it finished all ranks has served nothing.
    """
    verdicts = np.stack([np.frombuffer(rank.verdicts, np.uint8) for rank in ranks])
    keys = np.stack([np.frombuffer(rank.keys, np.uint64).reshape(-1, 2) for rank in ranks])
    same = np.all(keys == keys[0], axis=(0, 2)) & np.all(verdicts == YOURS, axis=0)
    verdicts = np.where((verdicts == YOURS) & ~same, np.uint8(REFUSED), verdicts)
    verdicts = np.where(np.any(verdicts == QUARANTINED, axis=0), np.uint8(QUARANTINED), verdicts)
    reason = next((rank.reason for rank in ranks if rank.reason), "")
    adoptions = min(rank.adoptions for rank in ranks)
    return [
        # A rank with another geometry keeps that reason: its header has to be rewritten.
        replace(rank, reason=rank.reason or reason, adoptions=adoptions, verdicts=row.tobytes())
        for rank, row in zip(ranks, verdicts, strict=True)
    ]


class _Head(msgspec.Struct, frozen=True, array_like=True):
    reason: str
    epoch: int
    adoptions: int
    blocks: int


def packed(found: Survey) -> bytes:
    """Encode a survey for the other ranks. Its size depends only on the number of blocks."""
    head = msgspec.json.encode(_Head(found.reason, found.epoch, found.adoptions, len(found.verdicts)))
    assert len(head) <= HEAD_BYTES, "a reason is a few words"
    return head.ljust(HEAD_BYTES) + found.verdicts + found.keys


def unpacked(data: bytes) -> Survey:
    head = msgspec.json.decode(data[:HEAD_BYTES].rstrip(), type=_Head)
    verdicts, keys = data[HEAD_BYTES:][: head.blocks], data[HEAD_BYTES + head.blocks :]
    assert len(keys) == KEY_BYTES * head.blocks, "a survey was cut"
    return Survey(head.reason, head.epoch, head.adoptions, verdicts, keys)


def write_verdicts(index: Index, found: Survey, epoch: int, by_key: dict[bytes, int] | None = None) -> Adoption:
    """Write the verdicts to the index; the last store makes `epoch` its owner. A caller that followed the index passes
    its key → block map as `by_key`, which saves building one."""
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
    index.store_owner(IndexOwner(epoch, adoptions))  # last: if we die before, the next adopter repeats this
    if by_key is None or reason or len(by_key) != verdicts.count(YOURS):
        by_key = claims(replace(found, verdicts=verdicts))
    final = verdicts.replace(bytes([REFUSED]), bytes([FREE]))
    return Adoption(index, epoch, adoptions, reason, final, found.keys, by_key)


def of_new(index: Index, found: Survey, epoch: int) -> Adoption:
    """Return the adoption of a pool that this rank made under `epoch` while other ranks adopted theirs. None of its
    blocks is whole, and blocks that another rank quarantined stay unused here too."""
    assert YOURS not in found.verdicts, "a new pool has no whole block"
    final = found.verdicts.replace(bytes([REFUSED]), bytes([FREE]))
    return Adoption(index, epoch, 0, found.reason, final, found.keys, {})


def claims(found: Survey) -> dict[bytes, int]:
    """Return key → block for all blocks that are yours."""
    blocks = np.flatnonzero(np.frombuffer(found.verdicts, np.uint8) == YOURS)
    keys = np.frombuffer(found.keys, f"V{KEY_BYTES}")[blocks]
    return dict(zip(keys.tolist(), blocks.tolist(), strict=True))


def _nothing(geometry: Geometry, owner: IndexOwner | None) -> Survey:
    count = geometry.block_count
    adoptions = owner.adoptions if owner else 0
    quarantined = bytes([QUARANTINED]) * count
    return Survey(OTHER_GEOMETRY, owner.epoch if owner else 0, adoptions, quarantined, bytes(KEY_BYTES * count))


def _renew(index: Index) -> None:
    """Mark every block OPEN, then store the header. If this adopter dies, the next one quarantines all blocks too."""
    words = index.words
    for block in range(index.geometry.block_count):
        at = HEADER_WORDS + block * ENTRY_WORDS
        words[at] = words[at] & ~layout.STATE_MASK | layout.OPEN
    index.store_header()


# -- the vectorised pass


def read_table(index: Index) -> Table:
    """Return a view of all entries, one row of words each."""
    words = np.frombuffer(index.view, np.uint64, offset=HEADER_BYTES)
    return words.reshape(-1, ENTRY_WORDS)


def read_keys(table: Table) -> NDArray[np.void]:
    """Return a view of the keys of all rows."""
    keys: NDArray[np.void] = table.view(ROW)["key"][:, 0]
    return keys


def classify_entries(
    table: Table, geometry: Geometry, owner_epoch: int, blocks: Table | None = None
) -> NDArray[np.uint8]:
    """Return a verdict per row, each by itself. `blocks` are the rows' block ids, if they are not 0, 1, 2, …"""
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
    """Compute `index.entry_sum` of every row."""
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
    """Refuse all but the first of several blocks with one key. A correct owner makes none, so first check cheaply."""
    blocks = np.flatnonzero(verdicts == YOURS)
    # Sorting four bytes of each key takes half the time. Among 65,536 keys, two share them in about half of all pools.
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


# -- following an index that its owner writes


# One byte per word of an entry, 0 for heat: it is a hint and changes all the time.
NOT_HEAT = np.array([word != HEAT for word in range(ENTRY_WORDS)], np.bool_).view(np.uint64) * np.uint64(0xFF)


class Follower:
    """A standby's copy of an index that its owner still writes. Adoption then applies only the latest changes.

    Give it the index, mapped read-only or writable. Call `poll` periodically, and `adopt` once elected and fenced.
    Without it, building key → block for 60,000 blocks takes tens of milliseconds between kill and first token (facts
    34). A poll may see the owner's stores in another order, so its result is only a hint. The last `survey`, after the
    CPU fence, compares every word again."""

    def __init__(self, index: Index) -> None:
        count = index.geometry.block_count
        self._index = index
        self._epoch = owner.epoch if (owner := index.owner) else 0  # by which the entries below are classified
        self._seen: Table = np.zeros((count, ENTRY_WORDS), np.uint64)
        self._verdicts = np.zeros(count, np.uint8)  # each row by itself, twins not yet refused
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}  # the first block of each key
        self._twins: dict[bytes, set[int]] = {}  # key → its blocks, for keys with several blocks

    def __repr__(self) -> str:
        return f"<kv follower: {len(self._blocks)} whole blocks of {len(self._seen)}>"

    def poll(self) -> int:
        """Copy the changed entries; return how many there were."""
        owner = self._index.owner
        epoch = owner.epoch if owner else 0
        table = read_table(self._index)
        if epoch != self._epoch:
            changed = np.arange(len(table))  # the owner changed: classify every entry again
        else:
            # The eight booleans of an entry are read as one word: several times faster than any(axis=1).
            changed = np.flatnonzero((table != self._seen).view(np.uint64)[:, 0] & NOT_HEAT)
        self._epoch = epoch
        if len(changed):
            self._apply(changed, table[changed])
        return len(changed)

    def survey(self) -> Survey:
        """Return the same as `adopt.survey`, but read only what changed since `poll`. Call it after the CPU fence."""
        self.poll()
        owner = self._index.owner
        if owner is None or not self._index.same_geometry():
            return survey(self._index)
        verdicts = self._verdicts.copy()
        for key, blocks in self._twins.items():
            verdicts[list(blocks - {self._blocks[key]})] = REFUSED
        keys = read_keys(self._seen)
        return Survey("", owner.epoch, owner.adoptions, verdicts.tobytes(), keys.tobytes())

    def adopt(self, index: Index, epoch: int, agreed: Survey | None = None) -> Adoption:
        """Take over the pool through `index`, which must be writable. `agreed` is this rank's survey after
        `adopt.agree`. The follower hands over its map and must not be used afterwards."""
        found = self.survey() if agreed is None else agreed
        return write_verdicts(index, found, epoch, self._blocks)

    def _apply(self, changed: np.ndarray[tuple[int], np.dtype[np.intp]], rows: Table) -> None:
        """Classify the changed rows and store them. `rows` is a copy, so the owner cannot change it in between."""
        verdicts = classify_entries(rows, self._index.geometry, self._epoch, changed.astype(np.uint64))
        for block in changed[self._verdicts[changed] == YOURS].tolist():
            self._forget(block)
        self._seen[changed] = rows
        self._verdicts[changed] = verdicts
        whole = verdicts == YOURS
        keys = read_keys(rows)[whole]
        for block, key in zip(changed[whole].tolist(), keys.tolist(), strict=True):
            self._learn(block, key)

    def _learn(self, block: int, key: bytes) -> None:
        self._keys[block] = key
        first = self._blocks.setdefault(key, block)
        if first != block:
            self._twins.setdefault(key, {first}).add(block)
            self._blocks[key] = min(first, block)

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block)
        twins = self._twins.get(key)
        if twins is None:
            del self._blocks[key]
            return
        twins.discard(block)
        self._blocks[key] = min(twins)
        if len(twins) == 1:
            del self._twins[key]
