"""Engines as real processes with torch in them: one physical copy, the same bits, and memory that no one can spoil."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch_agent import Engine
from torch_story import vault

pytestmark = [pytest.mark.processes, pytest.mark.long]

WIDTH = 2048  # weights of 17 MiB
WEIGHTS_KIB = 4 * (96 * WIDTH + WIDTH * WIDTH) // 1024


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Engine]]:
    with vault(tmp_path) as path, ExitStack() as stack:
        started = [Engine(path, WIDTH) for _ in range(3)]
        for engine in started:
            stack.callback(engine.reap)
        yield started


def test_engines_share_one_copy_that_none_of_them_can_write(engines: list[Engine]) -> None:
    """Bits are equal in all, PSS shows one copy, sleep and wake change nothing, and a write kills only who writes."""
    writer, first, second = engines
    expected = writer.do("publish")
    assert [engine.do("materialise") for engine in (first, second)] == ["done"] * 2
    assert [engine.do("answer") for engine in engines] == [expected] * 3

    sizes = [engine.do("size") for engine in engines]
    assert all(size["Rss"] >= WEIGHTS_KIB for size in sizes)
    assert sum(size["Pss"] for size in sizes) <= WEIGHTS_KIB + 4096  # one copy, up to a granule of rounding

    assert (first.do("sleep"), first.do("size")["Rss"], first.do("wake")) == ("done", 0, "ro")
    assert first.do("answer") == expected

    assert (writer.do("write"), writer.fate()) == (None, -signal.SIGSEGV)
    assert (first.do("write"), first.fate()) == (None, -signal.SIGSEGV)
    assert (second.do("answer"), second.do("sleep"), second.do("wake")) == (expected, "done", "ro")
    assert second.do("answer") == expected
