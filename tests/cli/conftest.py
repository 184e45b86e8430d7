"""What tests of the command share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.cli.up_place import Place


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place for one deployment, of which nothing is left behind; a test's file says in SHAPE what runs there."""
    made = Place(*getattr(request.module, "SHAPE", ()))
    yield made
    made.close()
