"""A slow worker is told from a slow set, whatever is measured."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.health.outliers import CRAWL_S, GAP_S, SLOW_RATIO, Outliers, Pace, Paced, ratio_of

NAMES = ["a", "b", "c", "d", "e"]


def run(outliers: Outliers, paces: dict[str, float], seconds: int, now_s: float = 0.0) -> list[Paced]:
    found: list[Paced] = []
    for second in range(seconds):
        found += outliers.measure(paces, now_s + second)
    return found


@pytest.mark.parametrize("times", [3.0, 20.0, 1000.0])
def test_when_all_are_slow_nobody_is(times: float) -> None:
    """A machine that slows its whole set down changes no worker's pace."""
    outliers = Outliers()
    usual = {"a": 1.0, "b": 1.3, "c": 0.8, "d": 1.1}
    assert run(outliers, usual, 10) == []
    assert run(outliers, {name: times * pace for name, pace in usual.items()}, 120, 10.0) == []


def test_three_times_slower_is_slow_and_never_crawls() -> None:
    """It is found, and it is not drained, for however long it lasts."""
    found = run(Outliers(), {"a": 1.0, "b": 1.1, "c": 3.0, "d": 0.9}, 600)
    assert [(paced.name, paced.pace) for paced in found] == [("c", Pace.SLOW)]


def test_twenty_times_slower_crawls_after_ten_seconds_and_not_before() -> None:
    """At ten seconds of it, and only if every measurement says so."""
    paces = {"a": 1.0, "b": 1.1, "c": 20.0, "d": 0.9}
    found = run(Outliers(), paces, int(CRAWL_S))
    assert [paced.pace for paced in found] == [Pace.SLOW]
    interrupted = Outliers()
    run(interrupted, paces, 9)
    interrupted.measure(paces | {"c": 3.0}, 9.0)
    assert all(paced.pace is not Pace.CRAWLING for paced in run(interrupted, paces, 10, 10.0))
    found = run(Outliers(), paces, int(CRAWL_S) + 1)
    assert [paced.pace for paced in found] == [Pace.SLOW, Pace.CRAWLING]


def test_a_worker_alone_is_compared_with_nobody() -> None:
    """There is nothing to be slower than, and nothing to divide by."""
    assert ratio_of("a", {"a": 5.0}) is None
    assert ratio_of("a", {"a": 5.0, "b": 0.0}) is None
    assert run(Outliers(), {"a": 500.0}, 60) == []


def test_a_pause_proves_no_duration() -> None:
    """Two slow measurements with a long pause between them are not that long a slowness."""
    outliers = Outliers()
    paces = {"a": 1.0, "b": 20.0}
    assert outliers.measure(paces, 0.0) == ()
    assert outliers.measure(paces, GAP_S + 1.0) == ()


def test_what_is_written_down_is_kept_until_measured_otherwise() -> None:
    """One that was drained before a restart is not in pace again because nobody remembers."""
    outliers = Outliers()
    outliers.restore("c", Pace.CRAWLING)
    usual = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert run(outliers, usual, 10) == []
    assert run(outliers, usual, 2, 10.0) == [Paced("c", Pace.NORMAL, 1.0)]
    outliers.restore("c", Pace.CRAWLING)
    outliers.forget("c")
    assert run(outliers, usual, 30, 20.0) == []


measurements = st.lists(
    st.tuples(
        st.sampled_from([0.5, 1.0, 5.0, 20.0]),
        st.dictionaries(st.sampled_from(NAMES), st.sampled_from([0.01, 0.5, 1.0, 1.4, 2.6, 12.0, 25.0, 300.0])),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(measurements, st.sampled_from([0.001, 7.0, 1000.0]))
def test_whatever_is_measured_a_set_is_not_drained_and_units_do_not_matter(
    story: list[tuple[float, dict[str, float]]], unit: float
) -> None:
    """Not all that are measured together crawl; the fastest never becomes slow; another unit gives the same."""
    one, other = Outliers(), Outliers()
    paces_now: dict[str, Pace] = {}
    now_s = 0.0
    for gap_s, paces in story:
        now_s += gap_s
        found = one.measure(paces, now_s)
        again = other.measure({name: unit * pace for name, pace in paces.items()}, now_s)
        assert [(p.name, p.pace) for p in found] == [(p.name, p.pace) for p in again]
        for paced in found:
            assert paces_now.get(paced.name, Pace.NORMAL) is not paced.pace
            assert paced.pace is Pace.NORMAL or paced.ratio >= SLOW_RATIO
            assert paced.pace is Pace.NORMAL or paces[paced.name] > min(paces.values())
            paces_now[paced.name] = paced.pace
        crawling = [name for name in paces if paces_now.get(name) is Pace.CRAWLING]
        changed = any(paced.pace is Pace.CRAWLING for paced in found)
        assert not changed or len(crawling) < len(paces)
