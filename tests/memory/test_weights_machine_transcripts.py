"""Stories of the vault's locks: `> command` lines are what happens, the rest is what the machines made of it.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the outcomes anew, then read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lock_story import Story

TRANSCRIPTS = sorted((Path(__file__).parent.parent / "transcripts").glob("memory_*.txt"))


def tell(text: str) -> str:
    """The same transcript, with what comes of it today."""
    story = Story()
    told = []
    for line in text.splitlines():
        if line.startswith("> "):
            told += [line, *story.play(line[2:])]
        elif not line.startswith("    "):
            told.append(line)
    return "\n".join(told) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda p: p.stem)
def test_the_memory_story_goes_as_written(path: Path) -> None:
    """Every transcript's outcomes are exactly those of today's lock machines."""
    told = tell(path.read_text())
    if os.environ.get("HOLDFAST_WRITE_TRANSCRIPTS") == "1":
        path.write_text(told)
    assert told == path.read_text()


def test_there_are_memory_stories() -> None:
    """The transcripts are found where they are kept."""
    assert len(TRANSCRIPTS) >= 25
