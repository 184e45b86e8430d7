"""Overlapping spans are grouped exactly, and a plan keeps the distances of what is shared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.memory.layout import TensorSpec, plan
from holdfast.memory.torch.modules import Span, overlapping

spans_drawn = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20), st.sampled_from([1, 2, 4, 8, 16])), max_size=12
)


@given(spans_drawn)
def test_groups_are_the_connected_pieces(drawn: list[tuple[int, int, int]]) -> None:
    """Two spans are in one group exactly if a chain of overlaps joins them; covers have every byte of their group."""
    spans = [Span(str(place), 1000 + start * 2, size, item) for place, (start, size, item) in enumerate(drawn)]
    groups = overlapping(spans)
    assert sorted(span.name for group in groups for span in group.spans) == sorted(s.name for s in spans if s.size)
    taken: set[int] = set()
    for group in groups:
        covered = set[int]()
        for span in group.spans:
            assert not covered or covered & set(range(span.start, span.end))
            covered |= set(range(span.start, span.end))
        assert covered == {byte for span in group.cover() for byte in range(span.start, span.end)}
        assert group.start <= min(covered) < group.start + 16
        assert group.start + group.size == max(covered) + 1
        widest = max(group.spans, key=lambda span: span.item_bytes)
        assert (widest.start - group.start) % widest.item_bytes == 0
        assert not covered & taken
        taken |= covered


@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(["", "", "a", "b"]), st.integers(0, 900)), max_size=20))
def test_a_plan_keeps_distances_and_nothing_else_overlaps(drawn: list[tuple[int, str, int]]) -> None:
    """Members of a shared piece lie `shared_at` from its start, in one slab; all others have bytes of their own."""
    specs = [
        TensorSpec(str(place), (size,), (1,), "uint8", size, shared, at if shared else 0)
        for place, (size, shared, at) in enumerate(drawn)
    ]
    layout = plan(specs, 4096, 1024, "test")
    assert layout.problem() is None
    starts: dict[str, set[tuple[int, int]]] = {}
    bytes_of: dict[str, set[tuple[int, int]]] = {}
    for spec, place in zip(specs, layout.tensors, strict=True):
        piece = spec.shared or f"alone {spec.name}"
        starts.setdefault(piece, set()).add((place.slab, place.offset - spec.shared_at))
        taken = {(place.slab, byte) for byte in range(place.offset, place.offset + place.size_bytes)}
        bytes_of.setdefault(piece, set()).update(taken)
    assert all(len(where) == 1 for where in starts.values())
    assert all(offset % 512 == 0 for where in starts.values() for _, offset in where)
    assert sum(map(len, bytes_of.values())) == len(set().union(*bytes_of.values()))
