"""The picture in the docs is drawn from the results, and from nothing else."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from bench.fleet.plot import PICTURE, RESULTS, svg


def test_the_picture_shows_the_results() -> None:
    """Whoever measures anew draws anew; and it is a picture."""
    drawn = svg(json.loads(RESULTS.read_text()))
    assert PICTURE.read_text() == drawn
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
