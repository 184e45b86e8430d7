"""Reports of frontends, summed: nothing is counted twice, and one cause is one failure."""

from __future__ import annotations

from typing import Any

from holdfast.control.reports import ENDED_SLOTS_MAX, ONE_CAUSE_S, ReportTally
from holdfast.health.breaker import FailureKind
from holdfast.health.records import ReportRecord, WorkerSeen


def report(name: str = "f1", **workers: dict[str, Any]) -> ReportRecord:
    return ReportRecord(name=name, at_unix_s=0.0, workers={one: WorkerSeen(**seen) for one, seen in workers.items()})


def test_only_what_happened_since_counts() -> None:
    """A frontend's first report is where counting begins; then differences, of several frontends together; a report
    that was missed is in the next; a worker that is new in a report counts from its first attempt."""
    tally = ReportTally()
    tally.add_report("f1", report(a={"succeeded": 1000, "failed": {FailureKind.TRUNCATED: 50}}))
    assert tally.flush(1.0) == {}
    tally.add_report("f1", report(a={"succeeded": 1003, "failed": {FailureKind.TRUNCATED: 52}}, b={"succeeded": 1}))
    tally.add_report("f2", report("f2", a={"succeeded": 7}))
    tally.add_report("f2", report("f2", a={"succeeded": 9, "tokens": 5}))
    found = tally.flush(2.0)
    assert (found["a"].attempts().succeeded, found["a"].attempts().failed) == (5, {FailureKind.TRUNCATED: 2})
    assert (found["a"].tokens, found["b"].succeeded) == (5, 1)
    assert tally.flush(3.0) == {}


def test_a_store_that_lost_all_reports_makes_nothing_count_again() -> None:
    """Frontends register anew with the counts that they had."""
    tally = ReportTally()
    for _ in range(2):
        tally.add_report("f1", report(a={"failed": {FailureKind.ENGINE_ERROR: 9}}))
    tally.add_report("f1", report(a={"failed": {FailureKind.ENGINE_ERROR: 10}}))
    assert tally.flush(1.0)["a"].attempts().failed == {FailureKind.ENGINE_ERROR: 1}


def test_the_streams_of_one_break_are_one_failure() -> None:
    """On however many frontends, each in its own second; the next break is the next failure. What each stream fails by
    itself counts for itself."""
    tally = ReportTally()
    for name in ("f1", "f2", "f3"):
        tally.add_report(name, report(name, a={}))
    tally.add_report("f1", report("f1", a={"failed": {FailureKind.DISCONNECTED: 16, FailureKind.TRUNCATED: 3}}))
    tally.add_report("f2", report("f2", a={"failed": {FailureKind.DISCONNECTED: 4}}))
    assert tally.flush(1.0)["a"].attempts().failed == {FailureKind.DISCONNECTED: 1, FailureKind.TRUNCATED: 3}
    tally.add_report("f3", report("f3", a={"failed": {FailureKind.DISCONNECTED: 8}}))
    assert tally.flush(2.0)["a"].attempts().failed == {}
    tally.add_report("f1", report("f1", a={"failed": {FailureKind.DISCONNECTED: 17, FailureKind.TRUNCATED: 3}}))
    assert tally.flush(2.0 + ONE_CAUSE_S)["a"].attempts().failed == {FailureKind.DISCONNECTED: 1}


def test_a_pace_is_of_the_last_moments() -> None:
    """Streams' seconds over tokens, of those whose clients had any; who only waits, or is quiet, has none."""
    tally = ReportTally()
    tally.add_report("f1", report(a={}, b={}))
    tally.add_report("f1", report(a={"tokens": 100, "stream_s": 2.0}, b={"stream_s": 4.0}))
    tally.flush(1.0)
    assert tally.paces(1.0) == {"a": 0.02}
    tally.add_report("f1", report(a={"tokens": 110, "stream_s": 4.0}, b={"tokens": 2, "stream_s": 8.0}))
    tally.flush(3.5)
    assert tally.paces(3.5) == {"a": 4.0 / 110, "b": 4.0}
    assert tally.paces(4.5) == {"a": 0.2, "b": 2.0}
    assert tally.paces(9.0) == {}


def test_answers_that_may_be_wrong_are_counted_from_then_on() -> None:
    """Those that ended since, and those that are open; it is told where there may have been more, before counting
    began."""
    tally = ReportTally(began_s=0.5)
    tally.add_report("f1", report(a={}))
    for second in range(1, 6):
        tally.add_report("f1", report(a={"succeeded": second, "open": 2}))
        tally.flush(float(second))
    assert tally.streams_since("a", 3.0) == (3 + 2, True)
    assert tally.streams_since("b", 0.6) == (0, True)
    assert tally.streams_since("a", 0.0) == (5 + 2, False)


def test_answers_of_too_long_ago_are_not_all_counted() -> None:
    """An hour with answers in every second is remembered; of what was before it is told that there may be more."""
    tally = ReportTally()
    for second in range(ENDED_SLOTS_MAX + 11):
        tally.add_report("f1", report(a={"succeeded": second}))
        tally.flush(float(second))
    assert tally.streams_since("a", 11.0) == (ENDED_SLOTS_MAX, True)
    assert tally.streams_since("a", 5.0) == (ENDED_SLOTS_MAX, False)
