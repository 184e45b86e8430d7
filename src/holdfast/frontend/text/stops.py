"""Finds stop strings in a stream of text pieces.

Always true:
- The result does not depend on how the text was cut into pieces.
- No part of a stop string is emitted (unless it is to be included).
- Exactly the longest end of the text that may still become a stop string is withheld.
- Of several stop strings, the one *completed* first wins, and of those completed at once the longest: a stream must not
  wait for a longer one that may never come.

The cost depends on the new text, not on the number of stop strings: each new character is looked up once as the last
character of stop strings, and each position is tried once as their beginning.
"""

from __future__ import annotations

import re
from bisect import bisect_right


class StopWatcher:
    """Watches one stream for stop strings; nothing is pushed after a hit."""

    __slots__ = ("_by_last", "_first", "_held", "_include", "_may_start", "_sorted")

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        assert all(stops), "an empty stop string would stop before the first token"
        self._include = include_stop
        self._held = ""
        self._sorted = sorted(set(stops))
        by_last: dict[str, list[str]] = {}
        for stop in sorted(self._sorted, key=len, reverse=True):
            by_last.setdefault(stop[-1], []).append(stop)
        self._by_last = {last: tuple(ending) for last, ending in by_last.items()}  # the longest first
        starts = sorted({stop[0] for stop in stops})
        self._first = starts[0] if len(starts) == 1 else ""
        # With several first characters one class search beats a look for each of them.
        self._may_start = re.compile("[" + "".join(map(re.escape, starts)) + "]").search if starts else None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string that ended the stream, if one did."""
        if not self._held:
            if self._first:
                if self._first not in text:
                    return text, None
            elif self._may_start is None or self._may_start(text) is None:
                return text, None
        return self._push_slowly(self._held + text, len(self._held))

    def pass_by(self, text: str) -> str:
        """Take text in which no stop string may end, though one may begin there; return the text that may be shown
        now."""
        return self._hold(self._held + text)

    def flush(self) -> str:
        """Return the withheld text at the stream's end: it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _push_slowly(self, text: str, seen: int) -> tuple[str, str | None]:
        """Look for a stop string that ends after the first `seen` characters; those before were examined by earlier
        calls."""
        by_last = self._by_last
        for end in range(seen + 1, len(text) + 1):
            ending = by_last.get(text[end - 1])
            if ending is not None and text.endswith(ending, 0, end):
                hit = next(stop for stop in ending if text.endswith(stop, 0, end))
                self._held = ""
                return text[: end if self._include else end - len(hit)], hit
        return self._hold(text), None

    def _hold(self, text: str) -> str:
        """Withhold the longest end that begins a stop string; return the text before it. A position that fails is
        emitted and never tried again. Stop strings that begin with `end` follow it in sort order, so one lookup
        suffices."""
        found = self._may_start(text) if self._may_start is not None else None
        while found is not None and self._may_start is not None:
            end = text[found.start() :]
            place = bisect_right(self._sorted, end)
            if place < len(self._sorted) and self._sorted[place].startswith(end):
                self._held = end
                return text[: found.start()]
            found = self._may_start(text, found.start() + 1)
        self._held = ""
        return text
