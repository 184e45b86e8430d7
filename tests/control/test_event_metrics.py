"""The mirror of events in Prometheus' words: what the docs list, and nothing where no Redis was named."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.control.event_mirror import EventMetrics

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_what_the_docs_list_is_exposed() -> None:
    """Each, and no other."""
    listed = set(re.findall(r"`(holdfast_events_[a-z_]+?)(?:_total)?(?:\{[^`]*\})?`", DOCS.read_text()))
    shown = EventMetrics()
    assert shown.families() == []
    shown.on = True
    assert {one.name for one in shown.families()} == listed
