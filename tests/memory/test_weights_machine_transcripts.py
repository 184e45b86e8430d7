"""Stories of the vault's locks: `> command` lines are what happens, the rest is what the machines made of it.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the outcomes anew, then read the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from lock_story import Story

from transcript_book import must_go_as_written, transcripts

TRANSCRIPTS = transcripts("memory")


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda p: p.stem)
def test_the_memory_story_goes_as_written(path: Path) -> None:
    """Every transcript's outcomes are exactly those of today's lock machines."""
    must_go_as_written(path, Story)


def test_there_are_memory_stories() -> None:
    """The transcripts are found where they are kept."""
    assert len(TRANSCRIPTS) >= 25
