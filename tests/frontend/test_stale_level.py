"""A level that nobody renews, as one frontend sees it: on made-up time, with a real table of workers."""

from __future__ import annotations

import random
import re
from pathlib import Path

import msgspec
import pytest

from holdfast.core.tiers import Tier
from holdfast.discovery.card import ModelCard, WeightsIdentity
from holdfast.frontend.api.errors import REASONS, ApiError
from holdfast.frontend.shedding import STALE_S, DeploymentLevel
from holdfast.routing.degradation import SHED_REASONS, LevelRecord
from holdfast.routing.table import RouteSlot
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.stats import DispatchStats


class Frontend:
    """Its level, its one worker, and its clock."""

    def __init__(self, level: int, *, vacant: bool = False) -> None:
        self.now_s = 1000.0
        directory = ModelDirectory(random.Random(1), 8)
        card = ModelCard("m", WeightsIdentity("r1"), "tt", "hi", 4096, 16, [0])
        self.table = directory.set_for("d-00000000", card).table
        self.slot = RouteSlot(1, 4)
        self.table.add(self.slot)
        self.has_worker(True)
        self.levels = DeploymentLevel("d", directory, DispatchStats(), 30.0, lambda: self.now_s)
        self.levels.on_record(msgspec.json.encode(LevelRecord(level, "", vacant=vacant)))

    def has_worker(self, there: bool) -> None:
        self.table.update(self.slot, routable=there)

    def after(self, seconds: float) -> int:
        self.now_s += seconds
        return self.levels.level


def test_level_4_of_a_control_that_is_gone_goes_stale() -> None:
    """It stays for a minute after the last control led, and is 3 then while there is a worker; who leads next is
    believed at once, and has a whole minute when it goes."""
    one = Frontend(4)
    one.levels.note_control(True)
    assert one.after(10 * STALE_S) == 4
    one.levels.note_control(False)
    assert one.after(STALE_S - 1) == 4
    one.levels.note_control(False)  # another that follows is gone too, or the store is: no news
    assert one.after(1) == 3
    one.levels.check(Tier.STANDARD)
    with pytest.raises(ApiError):
        one.levels.check(Tier.BEST_EFFORT)
    one.has_worker(False)
    assert one.after(0) == 4
    one.has_worker(True)
    one.levels.note_control(True)
    assert one.after(0) == 4
    one.levels.note_control(False)
    assert one.after(STALE_S - 1) == 4


def test_a_frontend_that_never_heard_of_a_control_counts_from_its_start() -> None:
    """What stands in the store may be of a control that ended yesterday."""
    one = Frontend(4)
    assert one.after(STALE_S - 1) == 4
    assert one.after(1) == 3


@pytest.mark.parametrize("level", range(4))
def test_every_other_level_stays_as_last_decided(level: int) -> None:
    """They serve; nobody is the worse for keeping to them."""
    assert Frontend(level).after(100 * STALE_S) == level


def test_a_worker_disproves_at_once_that_there_is_none() -> None:
    """Whether a control leads or not."""
    one = Frontend(4, vacant=True)
    one.levels.note_control(True)
    assert one.after(0) == 3
    one.has_worker(False)
    assert one.after(100 * STALE_S) == 4


def test_every_reason_is_in_the_documents_table() -> None:
    """docs/degradation.md lists each word of x-holdfast-reason that the code can send, and no other."""
    page = (Path(__file__).parents[2] / "docs" / "degradation.md").read_text()
    rows = re.findall(r"^  \| `(\w+)` \| (?:429|503) \|", page, re.MULTILINE)
    assert sorted(rows) == sorted({*SHED_REASONS, *REASONS.values()})
