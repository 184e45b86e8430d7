"""How the scheduler sees KV blocks: a small port, and the books of an engine whose blocks are only counted.

Always true of every implementation: blocks in use are those of the running streams and never exceed the budget; what
`start` or `grow` cannot give changes nothing.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.engines.sim.stream import Stream
from holdfast.kv.usage import KvUse


class Blocks(Protocol):
    """Who has which block."""

    @property
    def words(self) -> memoryview | None:
        """The pages as token ids, for the step's own stores; None: there are none."""

    @property
    def used(self) -> int: ...

    def use(self) -> KvUse:
        """How full they are; another thread may ask."""

    def start(self, stream: Stream) -> float | None:
        """Blocks for its text and one more token: the share of the text whose KV is still to be computed. None: there
        is no room now."""

    def grow(self, stream: Stream) -> bool:
        """One block more."""

    def prefill(self, stream: Stream) -> None:
        """Its prefill is over: the KV of all its text is written. Called where there are pages."""

    def filled(self, stream: Stream) -> None:
        """The store before `stream.at` completed a block. Called where there are pages."""

    def end(self, stream: Stream) -> None:
        """Give everything back."""


class CountedBlocks:
    """A budget without pages."""

    words: memoryview | None = None

    def __init__(self, count: int, block_size: int) -> None:
        self._count = count
        self._block_size = block_size
        self.used = 0

    def use(self) -> KvUse:
        return KvUse(self._count, self.used)

    def start(self, stream: Stream) -> float | None:
        blocks = blocks_for(stream.sequence.length + 1, self._block_size)
        if self.used + blocks > self._count:
            return None
        stream.blocks = blocks
        self.used += blocks
        return 1.0

    def grow(self, stream: Stream) -> bool:
        if self.used >= self._count:
            return False
        self.used += 1
        stream.blocks += 1
        return True

    def prefill(self, stream: Stream) -> None:
        raise AssertionError("there are no pages")

    def filled(self, stream: Stream) -> None:
        raise AssertionError("there are no pages")

    def end(self, stream: Stream) -> None:
        self.used -= stream.blocks
        stream.blocks = 0


def blocks_for(length: int, block_size: int) -> int:
    return -(-length // block_size)
