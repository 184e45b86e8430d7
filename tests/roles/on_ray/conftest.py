"""One Ray cluster of three nodes for all tests here that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.rigs.roles.ray_cluster import made_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    with made_cluster(nodes=3) as made:
        yield made
