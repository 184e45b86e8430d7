"""Progress as lines, for who cannot be shown a bar."""

from __future__ import annotations

from collections.abc import Callable

SHARES = 4  # lines per piece of work where nobody watches: it moves, and does not fill


class Lines:
    """Progress as lines, a few per piece of work."""

    def __init__(self, write: Callable[[str], None], shares: int = SHARES, unknown: str = " …") -> None:
        self._write, self._shares, self._unknown = write, shares, unknown
        self._last = ("", -1)

    def __call__(self, work: str, done: int, total: int | None) -> None:
        share = done * self._shares // total if total else 0
        if (work, share) != self._last:
            self._last = (work, share)
            self._write(f"{work}: {done / 2**20:.0f} of {total / 2**20:.0f} MiB" if total else f"{work}{self._unknown}")
