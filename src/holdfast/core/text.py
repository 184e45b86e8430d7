"""Text from outside (a peer's name, a file's content) that is shown on one line of a log or terminal."""

from __future__ import annotations

CHARS_MAX = 200  # of a peer's text in logs and on status pages


def printable(text: str, chars_max: int = CHARS_MAX) -> str:
    """Return the text with control characters escaped (a newline would forge a log line), cut to `chars_max`."""
    if len(text) > chars_max:
        text = f"{text[: chars_max - 1]}…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
