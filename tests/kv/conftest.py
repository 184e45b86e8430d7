"""The widths of keys that the index's tests run with: the own chain's, and 32 bytes with a group of 4 (vLLM's)."""

from __future__ import annotations

from collections.abc import Iterator

import kv_rig
import pytest


@pytest.fixture(params=[16, 36], ids=lambda width: f"keys{width}")
def key_width(request: pytest.FixtureRequest) -> Iterator[None]:
    """Geometries and keys that the test asks its rig for are of this width."""
    kv_rig.key_bytes = request.param
    yield
    kv_rig.key_bytes = 16
