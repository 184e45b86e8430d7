"""A vault of its own for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.memory.vaults import PATIENT, Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as started:
        yield started


@pytest.fixture
def patient_rig() -> Iterator[Rig]:
    """Whose vault, once lost with its keeper, waits long for what engines give back."""
    with Rig(**PATIENT) as started:
        yield started
