"""Attempts and failures of each set, from frontends' reports."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from holdfast.health.breaker import FailureKind
from holdfast.health.records import ReportRecord, WorkerSeen
from holdfast.rollout.trial import RequestCounts
from holdfast.supervise.observe import LISTENED_S, WINDOW_S, SetTraffic

OLD, NEW = ("Worker", "a"), ("Worker", "b")
SETS = {"1": OLD, "2": NEW, "3": NEW}


def report(frontend: str = "f", **workers: tuple[int, int]) -> ReportRecord:
    """Of each worker how many attempts succeeded, and how many failed."""
    seen = {
        one[1:]: WorkerSeen(succeeded=good, failed={FailureKind.STALLED: bad}) for one, (good, bad) in workers.items()
    }
    return ReportRecord(name=frontend, at_unix_s=1.0, workers=seen)


def told(traffic: SetTraffic, now_s: float, brought: Collection[tuple[str, str]] = (), since_s: float = 0.0) -> Any:
    return traffic.of(now_s, brought, since_s)


def test_only_what_happened_since_counts() -> None:
    """What a frontend told first is where counting begins; a worker that is new in a later report counts from its first
    attempt; frontends are summed."""
    traffic = SetTraffic()
    traffic.take([report(w1=(100, 7))], SETS, 10.0)
    both = [report(w1=(110, 7), w2=(4, 1)), report("g", w2=(50, 50))]
    traffic.take(both, SETS, 20.0)
    assert told(traffic, 20.0) == {"Worker": {"a": RequestCounts(10, 0), "b": RequestCounts(5, 1)}}
    traffic.take(both, SETS, 21.0)
    traffic.take([both[0], report("g", w2=(52, 53), w3=(1, 0))], SETS, 22.0)
    assert told(traffic, 22.0)["Worker"]["b"] == RequestCounts(5 + 5 + 1, 1 + 3)


def test_a_frontends_answers_are_its_sets() -> None:
    """By its process, since it was first heard of; answers of another deployment's frontends do not count."""
    sets, traffic = {"f-1": ("Frontend", "a"), "f-2": ("Frontend", "b")}, SetTraffic()

    def answered(process: str, answers: int, failed: int) -> ReportRecord:
        told = {"process": process, "answers": answers, "answers_failed": failed}
        return ReportRecord(name=f"peer-{process}", at_unix_s=1.0, **told)

    traffic.take([answered("f-1", 100, 1), answered("f-2", 0, 0)], sets, 0.0)
    traffic.take([answered("f-1", 150, 2), answered("f-2", 30, 29), answered("x", 9, 9)], sets, 20.0)
    assert told(traffic, 20.0) == {"Frontend": {"a": RequestCounts(50, 1), "b": RequestCounts(30, 29)}}


def test_who_has_only_begun_to_listen_does_not_say_that_nobody_asks() -> None:
    """A supervisor that goes on after another: it says nothing first, and then what there was, or that nobody asked."""
    traffic = SetTraffic()
    traffic.take([], {}, 50.0)
    assert told(traffic, 50.0) == {}, "without a worker there is nobody to ask"
    traffic.take([report(w1=(100, 7))], SETS, 100.0)
    traffic.take([report(w1=(130, 7))], SETS, 99.0 + LISTENED_S)
    assert told(traffic, 99.0 + LISTENED_S) is None
    assert told(traffic, 100.0 + LISTENED_S) == {"Worker": {"a": RequestCounts(30, 0)}}
    assert told(traffic, 99.0) is None, "a clock that was set back"


def test_what_is_older_than_a_minute_or_the_revision_that_brings_it_is_forgotten() -> None:
    """So that a set that is tried again is judged by this time alone; one that was there before is not cut."""
    traffic = SetTraffic()
    traffic.take([report(w2=(0, 1))], SETS, 0.0)
    traffic.take([report(w2=(0, 11))], SETS, 10.0)
    traffic.take([report(w2=(20, 11))], SETS, 30.0)
    assert told(traffic, 30.0)["Worker"]["b"] == RequestCounts(30, 10)
    assert told(traffic, 30.0, [NEW], 20.0)["Worker"]["b"] == RequestCounts(20, 0)
    assert told(traffic, 30.0, [OLD], 20.0)["Worker"]["b"] == RequestCounts(30, 10)
    traffic.take([report(w2=(20, 11))], SETS, 10.0 + WINDOW_S)
    assert told(traffic, 10.0 + WINDOW_S)["Worker"]["b"] == RequestCounts(20, 0)


def test_a_worker_that_is_gone_counts_on() -> None:
    """Its frontends report it for a while: its last failures are its set's, though nobody has its name any more."""
    traffic = SetTraffic()
    traffic.take([report(w2=(0, 1))], SETS, 0.0)
    traffic.take([report(w2=(0, 1))], {}, 1.0)
    traffic.take([report(w2=(0, 9))], {}, 20.0)
    assert told(traffic, 20.0) == {"Worker": {"b": RequestCounts(8, 8)}}


def test_counts_that_fell_are_not_counted() -> None:
    """Somebody else under a name that was another's; and an instance that nobody knows is nobody's."""
    traffic = SetTraffic()
    traffic.take([report(w2=(50, 9))], SETS, 0.0)
    traffic.take([report(w2=(60, 3), w9=(5, 5))], SETS, 20.0)
    assert told(traffic, 20.0) == {}
