"""Transcripts: text stories whose `> command` lines are what happens and whose indented lines are what came of it.

A room's test gives a `Story` (an object whose `play(command)` returns the indented lines) and checks each file that
`stories` finds.
HOLDFAST_WRITE_TRANSCRIPTS=1 writes the new outcomes; then read the diff.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

FOLDER = Path(__file__).parents[1] / "transcripts"


class Story(Protocol):
    def play(self, command: str) -> list[str]: ...


def transcripts(*prefixes: str) -> list[Path]:
    return [path for prefix in prefixes for path in sorted(FOLDER.glob(f"{prefix}_*.txt"))]


def stories(*prefixes: str, least: int) -> pytest.MarkDecorator:
    """Call a test with the `path` of each story. A folder without them must not pass silently."""
    found = transcripts(*prefixes)
    assert len(found) >= least, f"{FOLDER} has {len(found)} stories of {prefixes}, and not {least}"
    return pytest.mark.parametrize("path", found, ids=lambda path: path.stem)


def must_go_as_written(path: Path, begin: Callable[[], Story]) -> None:
    """Play the story again and compare."""
    story = begin()
    told = []
    for line in path.read_text().splitlines():
        if line.startswith("> "):
            told += [line, *story.play(line[2:])]
        elif not line.startswith("  "):
            told.append(line)
    text = "\n".join(told) + "\n"
    if os.environ.get("HOLDFAST_WRITE_TRANSCRIPTS") == "1":
        path.write_text(text)
    assert text == path.read_text()
