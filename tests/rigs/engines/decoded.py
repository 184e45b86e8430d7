"""What an engine decoded in one turn, and how long it took: ours and `transformers` are compared by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Decode:
    """One turn: what each stream said, and the time from the first token of all to the last of all."""

    said: list[list[int]]
    wall_s: float
    cpu_s: float  # of all threads

    @property
    def tokens(self) -> int:
        """That were decoded in this time: the first of each stream is the prompt's."""
        return sum(len(one) - 1 for one in self.said)

    @property
    def per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def cpu_ms(self) -> float:
        """Return CPU time per token."""
        return self.cpu_s * 1000 / self.tokens
