"""What a terminal or a file that takes ASCII only is sent in place of other characters.

Always true: a character that cannot be written costs its looks, never the command: no write fails for it.
"""

from __future__ import annotations

import codecs
import sys

NAME = "holdfast-plain"
PLAIN = {"…": "...", "·": "-", "–": "-", "—": "-", "×": "x", "→": "->", "’": "'"}


def plain(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: what stands in for what cannot be encoded."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(char, "?") for char in error.object[error.start : error.end]), error.end


def soften_output() -> None:
    """Let standard output and error replace what their encoding does not have, where they would refuse it."""
    codecs.register_error(NAME, plain)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # else it is somebody's own, who decides for himself
            stream.reconfigure(errors=NAME)
