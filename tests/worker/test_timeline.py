"""A takeover's timeline: what its zero is, and that it says so."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.core.ports import SystemClock
from holdfast.failover.journal import Journal
from holdfast.worker.failover_worker import UNSEEN, WOKEN, Timeline


def after_a_leader(folder: Path) -> Timeline:
    """One that takes over from a leader who sent nothing for a while."""
    Journal(folder / "a.journal", SystemClock()).begin(5)
    return Timeline(folder, 6, 1000.0, after=5)


def test_one_that_stood_by_counts_from_the_end_it_saw(tmp_path: Path) -> None:
    """The vault's news came 3 ms before the lock was won."""
    timeline, now_s = after_a_leader(tmp_path), time.monotonic() + 10
    timeline.mark_end(5, now_s)
    timeline.mark("lock", now_s + 0.003)
    facts = timeline.facts()
    assert (facts["zero"], facts["eof_ms"], facts["lock_ms"]) == ("its end, as seen by the vault", 0.0, 3.0)


def test_the_end_of_an_earlier_leader_is_not_this_ones(tmp_path: Path) -> None:
    """Another standby took over then; when that one died, the lock was quicker than the vault's news of it."""
    timeline, now_s = after_a_leader(tmp_path), time.monotonic() + 10
    timeline.mark_end(4, now_s - 12)
    timeline.mark("lock", now_s)
    timeline.mark_end(5, now_s + 0.001)
    facts = timeline.facts()
    assert (facts["zero"], facts["lock_ms"], facts["eof_ms"]) == ("its end, as seen by the vault", 0.0, 1.0)


def test_one_that_came_later_does_not_claim_to_have_seen_the_end(tmp_path: Path) -> None:
    """Its zero is its own lock, and is called that."""
    timeline = after_a_leader(tmp_path)
    timeline.mark("lock", time.monotonic() + 10)
    facts = timeline.facts()
    assert (facts["zero"], facts["lock_ms"], facts["from_epoch"]) == (UNSEEN, 0.0, 5)
    assert "eof_ms" not in facts


def test_one_that_was_woken_takes_over_from_nobody(tmp_path: Path) -> None:
    """Its zero is when it was woken, if the last leader had gone by then; who was awake when it went takes over."""
    Journal(tmp_path / "a.journal", SystemClock()).begin(5)
    now_s = time.monotonic() + 10
    for gone_s, woke in ((now_s - 60, True), (now_s + 1, False)):
        timeline = Timeline(tmp_path, 6, 1000.0, after=5, woken_s=now_s)
        timeline.mark_end(5, gone_s)
        timeline.mark("lock", now_s + 2)
        facts = timeline.facts()
        assert (facts["woke"], facts["zero"] == WOKEN, "eof_ms" in facts) == (woke, woke, not woke)
        assert facts["lock_ms"] == (2000.0 if woke else 1000.0)


def test_a_first_start_has_no_end_before_it(tmp_path: Path) -> None:
    """Nobody led before, so no end was seen."""
    timeline = Timeline(tmp_path, 6, 1000.0, after=0)
    timeline.mark_end(0, 0.0)
    timeline.mark("lock", time.monotonic())
    assert "eof_ms" not in timeline.facts()
