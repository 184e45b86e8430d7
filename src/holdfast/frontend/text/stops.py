"""Stop strings in a stream of text pieces.

Always true: the result does not depend on how the text was cut into pieces; nothing that belongs to a stop string is
ever emitted (unless it is to be included); what is withheld is exactly the longest end of the text that may still
become a stop string. Of several stop strings, the one *completed* first wins, and of those completed at once the
longest: a stream must not wait for a longer one that may never come.
"""

from __future__ import annotations

import re


class StopWatcher:
    """One stream's watcher; nothing is pushed after a hit."""

    __slots__ = ("_first", "_held", "_include", "_may_start", "_stops")

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        assert all(stops), "an empty stop string would stop before the first token"
        self._stops = stops
        self._include = include_stop
        self._held = ""
        starts = {stop[0] for stop in stops}
        self._first = starts.pop() if len(starts) == 1 else ""
        # With several first characters one class search beats a look for each of them.
        self._may_start = re.compile("[" + "".join(map(re.escape, starts)) + "]").search if starts else None

    def push(self, text: str) -> tuple[str, str | None]:
        """What may be shown now, and the stop string that ended the stream, if one did."""
        if not self._held:
            if self._first:
                if self._first not in text:
                    return text, None
            elif self._may_start is None or self._may_start(text) is None:
                return text, None
        return self._push_slowly(self._held + text, len(self._held))

    def pass_by(self, text: str) -> str:
        """Text in which no stop string may end, though one that ends later may begin there; what may be shown now."""
        text = self._held + text
        cut = self._hold_from(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was withheld, at the stream's end: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _push_slowly(self, text: str, seen: int) -> tuple[str, str | None]:
        """`seen`: how much of it was there before; a stop string that ended in that was passed by."""
        end, start, hit = len(text) + 1, 0, None
        for stop in self._stops:
            # One that ends later than the best so far cannot win.
            place = text.find(stop, max(0, seen - len(stop) + 1), end)
            if place >= 0 and (place + len(stop), place) < (end, start):
                end, start, hit = place + len(stop), place, stop
        if hit is not None:
            self._held = ""
            return text[: end if self._include else start], hit
        self._held = ""
        return self.pass_by(text), None

    def _hold_from(self, text: str) -> int:
        """Where the longest end that begins a stop string starts. A start that fails is emitted and never tried
        again, so with one stop string the work per character is constant over the stream."""
        cut = len(text)
        for stop in self._stops:
            place = text.find(stop[0], max(0, len(text) - len(stop) + 1), cut)
            while place >= 0:
                if stop.startswith(text[place:]):
                    cut = place
                    break
                place = text.find(stop[0], place + 1, cut)
        return cut
