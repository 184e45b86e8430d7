"""Says in the summary when the torch engine's tests could not run."""

from __future__ import annotations

import pytest


def test_torch_is_here() -> None:
    """The torch engine is tested wherever torch is installed."""
    torch = pytest.importorskip("torch", reason="torch is not installed: tests/engines/torch was left out")
    assert torch.ones(2).sum().item() == 2
