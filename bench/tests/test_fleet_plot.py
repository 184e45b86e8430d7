"""The pictures in the docs are drawn from the results, and from nothing else."""

from __future__ import annotations

import json
from types import ModuleType
from xml.etree import ElementTree

import pytest

from bench.fleet import plot as planned
from bench.fleet_local import plot as local


@pytest.mark.parametrize("drawing", [planned, local], ids=lambda module: module.PICTURE.name)
def test_the_picture_shows_the_results(drawing: ModuleType) -> None:
    """New results are drawn again; and it is a picture."""
    drawn = drawing.svg(json.loads(drawing.RESULTS.read_text()))
    assert drawing.PICTURE.read_text() == drawn
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
