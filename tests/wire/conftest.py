"""The worker under fire."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.testing.deployment import Deployment
from tests.rigs.wire_peer import Target


@pytest.fixture(scope="module")
def target(deployment: Deployment) -> Iterator[Target]:
    made = Target(deployment)
    yield made
    made.judge()
