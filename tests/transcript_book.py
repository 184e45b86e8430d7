"""Transcripts: text stories whose `> command` lines are what happens and whose indented lines are what came of it.

A room's test gives a `Story` (an object whose `play(command)` returns the indented lines) and checks each file.
HOLDFAST_WRITE_TRANSCRIPTS=1 writes the outcomes anew; then read the diff.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

FOLDER = Path(__file__).parent / "transcripts"


class Story(Protocol):
    def play(self, command: str) -> list[str]: ...


def transcripts(prefix: str) -> list[Path]:
    return sorted(FOLDER.glob(f"{prefix}_*.txt"))


def must_go_as_written(path: Path, begin: Callable[[], Story]) -> None:
    """Play the story anew and compare."""
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
