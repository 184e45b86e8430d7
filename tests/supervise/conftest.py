"""Supervisors over tiny processes, one for each test."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.rigs.supervise.rollouts import Site, place
from tests.rigs.supervise.supervisors import World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A job's settings are a shell script, which gets the state directory and the job's name."""
    made = World(tmp_path, lambda job, settings, state_dir: ["sh", str(settings), str(state_dir), job.name])
    yield made
    await made.close()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    with tempfile.TemporaryDirectory(prefix="hfr-", dir="/tmp") as folder:  # sockets' paths are short
        async with place(Path(folder)) as made:
            yield made
