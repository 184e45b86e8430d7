"""The variables that a launch says."""

from __future__ import annotations

import importlib
import os
from typing import Any

import msgspec
import pytest

from holdfast.spec.launch import StoreLaunch

started = importlib.import_module("holdfast.roles.__main__")


def test_a_process_has_the_variables_of_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides its starter's, over which they win, and before anything runs."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(os, "environ", {"A": "starter's", "B": "starter's"})
    monkeypatch.setattr(started, "run", lambda launch: seen.update(os.environ) or 0)
    launch = StoreLaunch(env=(("A", "its own"), ("C", "its own")))
    assert started.main(["store", msgspec.json.encode(launch).decode()]) == 0
    assert seen == {"A": "its own", "B": "starter's", "C": "its own"}
