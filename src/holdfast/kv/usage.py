"""How full a KV pool is, and how much of what was asked for was found in it: plain numbers, for whoever shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvUse:
    """One pool at one moment; the totals since its owner took it."""

    blocks: int = 0  # all there are
    held: int = 0  # by streams
    cached: int = 0  # whole, nobody's, and found by whoever has the same prefix
    prefix_tokens: int = 0  # that streams looked for as they started
    prefix_hit_tokens: int = 0  # of these, found

    @property
    def usage(self) -> float:
        """The share that streams hold."""
        return self.held / self.blocks if self.blocks else 0.0

    @property
    def hit_rate(self) -> float:
        return self.prefix_hit_tokens / self.prefix_tokens if self.prefix_tokens else 0.0
