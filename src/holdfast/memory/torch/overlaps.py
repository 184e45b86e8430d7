"""Which pieces of memory overlap, so that what is one memory for the writer is one memory for the reader. Pure.

Always true: spans of two groups have no byte in common; the spans of a group hang together, each overlapping another
of it; a group's start suits the widest element in it, so that offsets in it are whole elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# The widest element there is: a complex number of two doubles.
_ITEM_BYTES_MAX = 16


@dataclass(frozen=True, slots=True)
class Span:
    """A tensor's bytes, from its first to its last, gaps of its strides included."""

    name: str
    start: int
    size: int
    item_bytes: int  # a power of two

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class Group:
    """Spans that overlap, by start, the largest first; `start` is at most an element below the first."""

    start: int
    size: int
    spans: tuple[Span, ...]

    def cover(self) -> list[Span]:
        """Spans that have all bytes of all of them: who lies inside another is left out."""
        chosen: list[Span] = []
        for span in self.spans:
            if not chosen or span.end > chosen[-1].end:
                chosen.append(span)
        return chosen


def overlapping(spans: Iterable[Span]) -> list[Group]:
    """Groups of spans with bytes in common, by start; spans without bytes are in none."""
    groups: list[list[Span]] = []
    reached = 0
    for span in sorted((span for span in spans if span.size), key=lambda span: (span.start, -span.size)):
        if groups and span.start < reached:
            groups[-1].append(span)
        else:
            groups.append([span])
        reached = max(reached, span.end)
    return [_group(members) for members in groups]


def _group(spans: list[Span]) -> Group:
    widest = max(spans, key=lambda span: span.item_bytes)
    first = spans[0].start
    start = first - (first - widest.start) % _ITEM_BYTES_MAX
    return Group(start, max(span.end for span in spans) - start, tuple(spans))
