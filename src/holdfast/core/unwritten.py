"""What this process could not write down: lines of its log, its record, its journal. For `ps` and for metrics.

Always true: a witness that cannot be written is missed, and is never a reason to end; what was missed is counted for
as long as the process lives, and what is said of it is the last failure that nothing written since has made good.
"""

from __future__ import annotations

import os
from collections import Counter

# Each is on the metrics page from the start, so that an alert can be written before it is needed.
KINDS = ("journal", "log", "record")


class Unwritten:
    """By kind of witness."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._why: dict[str, str] = {}

    def failed(self, kind: str, error: OSError) -> None:
        self.totals[kind] += 1
        self._why[kind] = error.strerror or str(error)

    def written(self, kind: str) -> None:
        self._why.pop(kind, None)

    @property
    def words(self) -> str:
        """One line for people; empty: all is written."""
        return "; ".join(f"its {kind} cannot be written: {why}" for kind, why in sorted(self._why.items()))


# One per process, as its log is.
UNWRITTEN = Unwritten()


def say(text: str) -> bool:
    """A line to standard error, at once; whether it could be written. Somebody who has to end must not stumble over the
    last words, and a supervisor not over its report."""
    try:
        os.write(2, f"{text}\n".encode(errors="replace"))
    except OSError as error:
        UNWRITTEN.failed("log", error)
        return False
    UNWRITTEN.written("log")
    return True
