"""Whole blocks that nobody holds, and which of them goes next when room is needed.

The order: adopted blocks of no running stream, the longest unused first; those released here, likewise; last the
*awaited* ones, of streams that ran when the last owner died and have not come back, the deepest first (a block without
its parent is of no use). Always true: a block that was taken is not given up, wherever it stood.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # adopt.py loads numpy; an owner that starts fresh does without
    from holdfast.kv.adopt import Adoption

YOURS = 1  # `adopt`'s verdict by the same number


class Cached:
    """No I/O; the index is read once, for the order of what was adopted."""

    def __init__(self, adoption: Adoption | None) -> None:
        self._adoption = adoption
        # One byte per block, 1 while it is as it was adopted.
        kept = bytes(verdict == YOURS for verdict in range(256))
        self._adopted = bytearray(adoption.verdicts.translate(kept) if adoption else b"")
        self._count = self._adopted.count(1)
        self._cool: OrderedDict[int, None] = OrderedDict()  # released here, oldest first
        # Adopted blocks, the next to go last; those taken since are passed over.
        self._cold: list[int] | None = None  # None: nobody asked yet
        self._awaited: list[int] = []
        self._awaited_left: set[int] = set()  # those of `_awaited` that were neither taken nor evicted

    def __len__(self) -> int:
        return self._count

    @property
    def awaited_count(self) -> int:
        self._order()
        return len(self._awaited_left)

    def is_awaited(self, block: int) -> bool:
        self._order()
        return block in self._awaited_left

    def add(self, block: int) -> None:
        """Its last holder gave it up."""
        self._cool[block] = None
        self._count += 1

    def take(self, block: int) -> None:
        """It is held again, or has no more use."""
        if block in self._cool:
            del self._cool[block]
        else:
            self._adopted[block] = 0
            self._awaited_left.discard(block)
        self._count -= 1

    def found(self, block: int) -> None:
        """Somebody looks for it, held or not. What was adopted is from now on like what was released here just now."""
        if self._adopted and self._adopted[block]:
            self.take(block)
            self.add(block)

    def next_to_go(self) -> int | None:
        """It stays until it is taken."""
        cold, awaited = self._order()
        block = self._last(cold)
        if block is None and self._cool:
            block = next(iter(self._cool))
        return self._last(awaited) if block is None else block

    def await_no_more(self) -> None:
        """What no stream came back for is cached like anything else, and the oldest of it."""
        cold, awaited = self._order()
        self._cold = awaited + cold
        self._awaited = []
        self._awaited_left = set()

    def _last(self, order: list[int]) -> int | None:
        while order and not self._adopted[order[-1]]:
            order.pop()
        return order[-1] if order else None

    def _order(self) -> tuple[list[int], list[int]]:
        """Sorted when room first runs short, not at adoption, where every millisecond is a stream's."""
        if self._cold is None:
            self._cold = []
            if self._adoption is not None:
                cold, awaited = self._adoption.coldest_first(bytes(self._adopted))
                self._cold, self._awaited = cold[::-1], awaited[::-1]
                self._awaited_left = set(awaited)
        return self._cold, self._awaited
