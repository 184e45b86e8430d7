"""A slow worker is told from a slow set, whatever is measured."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.health.outliers import GAP_S, SLOW_RATIO, Outliers, PaceClass, Paced, ratio_of

NAMES = ["a", "b", "c", "d", "e"]


def run(outliers: Outliers, paces: dict[str, float], seconds: int, now_s: float = 0.0) -> list[Paced]:
    found: list[Paced] = []
    for second in range(seconds):
        found += outliers.measure(paces, now_s + second)
    return found


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
    outliers.restore("c", PaceClass.CRAWLING)
    usual = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert run(outliers, usual, 10) == []
    assert run(outliers, usual, 2, 10.0) == [Paced("c", PaceClass.NORMAL, 1.0)]
    outliers.restore("c", PaceClass.CRAWLING)
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
    paces_now: dict[str, PaceClass] = {}
    now_s = 0.0
    for gap_s, paces in story:
        now_s += gap_s
        found = one.measure(paces, now_s)
        again = other.measure({name: unit * pace for name, pace in paces.items()}, now_s)
        assert [(p.name, p.pace) for p in found] == [(p.name, p.pace) for p in again]
        for paced in found:
            assert paces_now.get(paced.name, PaceClass.NORMAL) is not paced.pace
            assert paced.pace is PaceClass.NORMAL or paced.ratio >= SLOW_RATIO
            assert paced.pace is PaceClass.NORMAL or paces[paced.name] > min(paces.values())
            paces_now[paced.name] = paced.pace
        crawling = [name for name in paces if paces_now.get(name) is PaceClass.CRAWLING]
        changed = any(paced.pace is PaceClass.CRAWLING for paced in found)
        assert not changed or len(crawling) < len(paces)
