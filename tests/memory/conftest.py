"""A vault of its own for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vault_rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as started:
        yield started
