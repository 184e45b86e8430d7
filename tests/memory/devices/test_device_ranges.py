"""The book of addresses agrees with a simple model that keeps one letter per page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.memory.devices import BusyError, DeviceError
from holdfast.memory.devices.ranges import Ranges, SlabMapping, scratch_pieces

PAGE = 16
PAGES = 12  # two reservations of six pages each, side by side
place = st.tuples(st.integers(-1, PAGES), st.integers(1, 5))


def book() -> Ranges:
    ranges = Ranges(PAGE)
    ranges.add_reserved(0, 6 * PAGE)
    ranges.add_reserved(6 * PAGE, 6 * PAGE)
    return ranges


@given(st.lists(place, max_size=10), place)
def test_it_agrees_with_a_page_by_page_model(places: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    """What may be mapped, what is within a range, and whether all of it is covered."""
    ranges, pages = book(), ["."] * PAGES
    for number, (start, length) in enumerate(places):
        inside = start >= 0 and start + length <= PAGES and (start < 6) == (start + length <= 6)
        free = inside and all(page == "." for page in pages[start : start + length])
        if free:
            ranges.check_free(start * PAGE, length * PAGE)
            ranges.add(SlabMapping(start * PAGE, length * PAGE, writable=True))
            pages[start : start + length] = [chr(ord("a") + number)] * length
        else:
            with pytest.raises(DeviceError):
                ranges.check_free(start * PAGE, length * PAGE)
    start, length = max(0, asked[0]), asked[1]
    span = pages[start : start + length]
    rest = pages[:start] + pages[start + length :]
    touched = {page for page in span if page != "."}
    if touched & set(rest):
        with pytest.raises(DeviceError, match="whole"):
            ranges.within(start * PAGE, length * PAGE)
    else:
        assert len(ranges.within(start * PAGE, length * PAGE)) == len(touched)
    if len(span) == length and "." not in span:
        ranges.check_covered(start * PAGE, length * PAGE, writable=True)
        ranges.check_covered(start * PAGE + 3, length * PAGE - 3)
    else:
        with pytest.raises(DeviceError, match="not all"):
            ranges.check_covered(start * PAGE, length * PAGE)


def test_a_range_in_use_is_not_released() -> None:
    """Nor a part of one."""
    ranges = book()
    ranges.add(SlabMapping(PAGE, PAGE, writable=False))
    with pytest.raises(BusyError):
        ranges.check_release(0, 6 * PAGE)
    with pytest.raises(DeviceError):
        ranges.check_release(6 * PAGE, PAGE)
    with pytest.raises(DeviceError, match="read-only"):
        ranges.check_covered(PAGE, 1, writable=True)
    ranges.check_release(6 * PAGE, 6 * PAGE)
    ranges.drop_reserved(6 * PAGE)
    with pytest.raises(DeviceError):
        ranges.check_free(6 * PAGE, PAGE)


@given(st.data(), st.integers(1, 400), st.integers(0, 6))
def test_scratch_is_made_of_a_few_sizes(data: st.DataObject, size: int, power: int) -> None:
    """In granules: all of it once, in order; what is itself alone, the rest of slabs of a whole, a half, …: a GPU
    maps a slab only as a whole."""
    cuts = sorted(data.draw(st.sets(st.integers(0, size), max_size=8)))
    own = [(start, end - start) for start, end in zip(cuts[::2], cuts[1::2], strict=False)]
    pieces = list(scratch_pieces(size, 1 << power, own))
    ends = [at + length for at, length, _ in pieces]
    assert [at for at, _, _ in pieces] == [0, *ends[:-1]]
    assert ends[-1] == size
    assert [(at, length) for at, length, alone in pieces if alone] == own
    assert {length for _, length, alone in pieces if not alone} <= {1 << each for each in range(power + 1)}
