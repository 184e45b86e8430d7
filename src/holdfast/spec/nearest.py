"""The name that was probably meant by one that there is not."""

from __future__ import annotations

from collections.abc import Iterable

NEAR = 0.65  # how alike what was meant must be to what was written


def nearest(word: str, known: Iterable[str], near: float = NEAR) -> str:
    """The known name that looks most like `word`, whatever its capitals; "" if none does."""
    import difflib  # only where somebody mistyped

    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), list(by_lower), 1, near)
    return by_lower[found[0]] if found else ""
