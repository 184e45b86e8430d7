"""Garbage collection while tests are collected: none. Hardly anything of what is imported and listed is garbage, and
looking through it again and again takes a tenth of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[object]:
    """Collect without garbage collection, and leave what there is then out of every later one."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
