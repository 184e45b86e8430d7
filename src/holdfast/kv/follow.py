"""A standby's view of an index that someone else writes, kept up while it grows, so that adoption applies a difference.

Building key → block for 60,000 blocks from nothing takes tens of milliseconds between kill and first token (facts 34);
following, only what changed since the last look is left to do. The owner lives and stores while we read, and other
cores may show its stores in another order: what was read is a hint until the last `survey`, past the CPU fence, which
compares every word again. It answers exactly what `adopt.survey` would.
"""

from __future__ import annotations

import numpy as np

from holdfast.kv import adopt
from holdfast.kv.adopt import YOURS, Adoption, Survey, Table
from holdfast.kv.index import ENTRY_WORDS, HEAT, Index

# One byte per word of an entry; heat is a hint and changes all the time.
NOT_HEAT = np.array([word != HEAT for word in range(ENTRY_WORDS)], np.bool_).view(np.uint64) * np.uint64(0xFF)


class Follower:
    """Give it the index, mapped read-only or writable; call `poll` now and then, `adopt` once elected and fenced."""

    def __init__(self, index: Index) -> None:
        count = index.geometry.block_count
        self._index = index
        self._epoch = owner.epoch if (owner := index.owner) else 0  # by which the entries below were judged
        self._seen: Table = np.zeros((count, ENTRY_WORDS), np.uint64)
        self._verdicts = np.zeros(count, np.uint8)  # each row by itself, twins not yet refused
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}  # the first block of each key
        self._twins: dict[bytes, set[int]] = {}  # all blocks of the keys that several blocks claim

    def __repr__(self) -> str:
        return f"<kv follower: {len(self._blocks)} whole blocks of {len(self._seen)}>"

    def poll(self) -> int:
        """Take over what changed; says how many entries that were."""
        owner = self._index.owner
        epoch = owner.epoch if owner else 0
        table = adopt.read_table(self._index)
        if epoch != self._epoch:
            changed = np.arange(len(table))  # another owner judges every entry anew
        else:
            # Eight words of an entry give eight booleans, one word again: several times quicker than any(axis=1).
            changed = np.flatnonzero((table != self._seen).view(np.uint64)[:, 0] & NOT_HEAT)
        self._epoch = epoch
        if len(changed):
            self._apply(changed, table[changed])
        return len(changed)

    def survey(self) -> Survey:
        """Past the CPU fence: what `adopt.survey` would answer, for the price of the difference."""
        self.poll()
        owner = self._index.owner
        if owner is None or not self._index.same_geometry():
            return adopt.survey(self._index)
        verdicts = self._verdicts.copy()
        for key, blocks in self._twins.items():
            verdicts[list(blocks - {self._blocks[key]})] = adopt.REFUSED
        keys = adopt.read_keys(self._seen)
        return Survey("", owner.epoch, owner.adoptions, verdicts.tobytes(), keys.tobytes())

    def adopt(self, index: Index, epoch: int, agreed: Survey | None = None) -> Adoption:
        """Take over through `index`, the writable one; `agreed` is this rank's survey after `adopt.agree`. The follower
        hands its view over and is done."""
        found = self.survey() if agreed is None else agreed
        return adopt.settle(index, found, epoch, self._blocks)

    def _apply(self, changed: np.ndarray[tuple[int], np.dtype[np.intp]], rows: Table) -> None:
        """`rows` is a copy: what is judged is what is kept."""
        verdicts = adopt.judge(rows, self._index.geometry, self._epoch, changed.astype(np.uint64))
        for block in changed[self._verdicts[changed] == YOURS].tolist():
            self._forget(block)
        self._seen[changed] = rows
        self._verdicts[changed] = verdicts
        whole = verdicts == YOURS
        keys = adopt.read_keys(rows)[whole]
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
