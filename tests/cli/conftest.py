"""What tests of the command share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.cli.up_rig import UpRig


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[UpRig]:
    """A place for one deployment, of which nothing is left behind; a test's file says in SHAPE what runs there."""
    made = UpRig(*getattr(request.module, "SHAPE", ()))
    yield made
    made.close()
