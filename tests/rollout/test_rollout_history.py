"""What became of each revision, which are kept, and where an undo goes back to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import UserError
from holdfast.rollout import records as h
from holdfast.rollout.machine import NOTHING, RolloutPhase, RolloutState
from holdfast.rollout.records import HistoryEntry, RevisionResult
from tests.rigs.worlds.rollout import Driver, World, part, revision


class Diary:
    """A driver that keeps its history as it goes: it looks at what is written, steps, and looks again."""

    def __init__(self, world: World | None = None) -> None:
        self.driver = Driver(world or World())
        self.entries: dict[int, HistoryEntry] = {}

    def apply(self, number: int, sets: str, seconds: int = 40) -> None:
        manifest = f"worker: {sets}"
        self.entries[number] = HistoryEntry(number=number, manifest=manifest, digest=sets, at_unix_s=self.driver.now_s)
        self.driver.desired = revision(number, worker=part(sets))
        self.note()
        for _ in self.driver.seconds(seconds):
            self.note()

    def note(self) -> None:
        for entry in h.updated_entries(list(self.entries.values()), self.driver.state):
            self.entries[entry.number] = entry

    def back(self, to: int = 0) -> int:
        return h.undo_target(list(self.entries.values()), self.driver.state, to).number

    @property
    def fates(self) -> dict[int, RevisionResult]:
        return {number: entry.result for number, entry in self.entries.items()}


def test_what_became_of_each() -> None:
    """In place, superseded, undone with its reason, rolling; and it stays so when nothing new is known."""
    diary = Diary(World(fates={"d": "canary"}))
    diary.apply(1, "a")
    diary.apply(2, "b", seconds=3)
    diary.apply(3, "c")
    diary.apply(4, "d")
    diary.apply(5, "e", seconds=3)
    assert diary.fates == {
        1: RevisionResult.IN_PLACE,
        2: RevisionResult.SUPERSEDED,
        3: RevisionResult.IN_PLACE,
        4: RevisionResult.UNDONE,
        5: RevisionResult.ROLLING,
    }
    assert diary.entries[4].why == "worker-4 failed its canary: another token at 3"
    assert h.updated_entries(list(diary.entries.values()), diary.driver.state) == []
    told = h.history_lines(list(diary.entries.values()))
    assert told[0] == "1  apply  in place, after 5.0 s"
    assert told[3] == "4  apply  undone: worker-4 failed its canary: another token at 3"


def test_an_undo_goes_to_the_last_that_was_in_place() -> None:
    """In mid-rollout to what was in place; when all is in place to the one before; and an undo of an undo returns."""
    diary = Diary()
    diary.apply(1, "a")
    with pytest.raises(UserError, match="no earlier revision"):
        diary.back()
    diary.apply(2, "b")
    assert diary.back() == 1
    diary.apply(3, "c", seconds=5)
    assert diary.back() == 2
    diary.apply(4, "b")
    assert diary.fates[3] is RevisionResult.SUPERSEDED
    assert diary.back() == 1, "2 asks for what 4 does, and 3 was never in place"
    diary.apply(5, "a")
    assert diary.back() == 4


def test_an_undo_of_a_change_of_replicas_goes_to_what_was_before_it() -> None:
    """A bad set was in place and was undone by hand; then replicas are added. Undo takes those away again, and does not
    go to the bad set."""
    diary = Diary()
    diary.apply(1, "a*1")
    diary.apply(2, "bad*1")
    assert diary.back() == 1
    diary.apply(3, "a*1")
    diary.apply(4, "a*3")
    assert diary.fates[4] is RevisionResult.IN_PLACE
    assert diary.back() == 3


def test_an_undo_that_would_change_nothing_is_refused_and_says_what_to_name() -> None:
    """While an undo is under way, a second one would ask for the same again."""
    diary = Diary()
    diary.apply(1, "a")
    diary.apply(2, "b", seconds=3)
    assert diary.back() == 1
    diary.apply(3, "a", seconds=1)
    with pytest.raises(UserError, match=r"revision 1 is what revision 3 asks for already; name one .*\(2\)"):
        diary.back()
    assert diary.back(to=2) == 2


def test_what_is_undone_already_is_not_undone_again() -> None:
    """It says so, with the reason; further back goes who names a revision."""
    diary = Diary(World(fates={"c": "refused"}))
    diary.apply(1, "a")
    diary.apply(2, "b")
    diary.apply(3, "c")
    with pytest.raises(UserError, match=r"revision 3 is undone already \(worker-3 has a card .*\), and 2 in its place"):
        diary.back()
    assert diary.back(to=1) == 1
    assert diary.back(to=2) == 2, "to ask for what is in place clears what was undone"


def test_a_named_revision_must_be_kept_and_another() -> None:
    """What is not kept, or is asked for already, is refused by name."""
    diary = Diary()
    diary.apply(1, "a")
    diary.apply(2, "b")
    with pytest.raises(UserError, match="revision 7 is not kept; there are 1, 2"):
        diary.back(to=7)
    with pytest.raises(UserError, match="revision 2 is what revision 2 asks for already"):
        diary.back(to=2)
    with pytest.raises(UserError, match="there are none"):
        h.undo_target([], NOTHING, to=1)


def entries(numbers: Sequence[int]) -> list[HistoryEntry]:
    return [HistoryEntry(number=number, manifest="", digest=str(number), at_unix_s=0.0) for number in numbers]


@given(st.sets(st.integers(1, 60), max_size=40), st.data())
def test_the_oldest_go_and_what_matters_stays(numbers: set[int], data: st.DataObject) -> None:
    """At most so many are kept beside those that are needed, and these are never forgotten."""
    chosen = data.draw(st.lists(st.sampled_from(sorted(numbers)), max_size=3)) if numbers else []
    stable, target, wanted = [*chosen, 0, 0, 0][:3]
    memory = RolloutState(
        phase=RolloutPhase.ROLLING,
        target=revision(target, worker=part("a")),
        stable=revision(stable, worker=part("a")),
        desired_number=wanted,
    )
    gone = h.surplus(entries(sorted(numbers)), memory)
    left = numbers - set(gone)
    assert not {stable, target, wanted} & set(gone)
    assert len(left) <= h.KEPT + 3
    assert len(left) >= min(len(numbers), h.KEPT)
    assert all(number > max(gone) or number in (stable, target, wanted) for number in left if gone)
