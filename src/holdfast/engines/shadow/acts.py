"""What the leading rank did to its index, noted, told and done again by the others: every index says what its own says.

The leader alone decides about blocks. Block ids and keys are the same on every rank, generations are each index's own.
Always true: acts are done in the order they were noted; heat, a hint for the order of eviction, is the leader's only,
since nobody else evicts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import assert_never

import msgspec

from holdfast.kv.index import FREE, Index


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    block: int


class Freed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    block: int


class Published(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    block: int
    key: bytes
    depth: int


Act = Opened | Freed | Published


class NotedIndex(Index):
    """The leader's index. Another thread may free blocks while the step thread opens others: each note follows its
    store, and a block changes hands only after that."""

    __slots__ = ("_acts", "published")

    def __init__(self, index: Index) -> None:
        super().__init__(index.view, index.geometry)
        self._acts: deque[Act] = deque()  # bounded by what one step and the cancels before it do
        self.published = False  # since the last time

    def open(self, block: int) -> int:
        generation = super().open(block)
        self._acts.append(Opened(block))
        return generation

    def publish(
        self, block: int, generation: int, key: bytes, *, epoch: int, depth: int, tokens: int, heat: int = 0
    ) -> None:
        super().publish(block, generation, key, epoch=epoch, depth=depth, tokens=tokens, heat=heat)
        self._acts.append(Published(block, key, depth))
        self.published = True

    def free(self, block: int) -> None:
        super().free(block)
        self._acts.append(Freed(block))

    def taken(self) -> list[Act]:
        """What was done since the last time."""
        self.published = False
        return [self._acts.popleft() for _ in range(len(self._acts))]


def done_again(acts: Sequence[Act], index: Index, epoch: int) -> None:
    for act in acts:
        match act:
            case Opened(block):
                index.open(block)
            case Published(block, key, depth):
                tokens = index.geometry.block_tokens
                generation = index.entry(block).generation
                index.publish(block, generation, key, epoch=epoch, depth=depth, tokens=tokens)
            case Freed(block):
                if index.state(block) != FREE:  # it was in quarantine, and this rank's own fence has freed it
                    index.free(block)
            case _:
                assert_never(act)
