"""The machine of the weights' levels: against a model that knows only what it was told, and its table."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.memory.vault import warm_machine as machine
from holdfast.memory.vault.warm_machine import WeightsLevel

SIZE = 16


class LevelModel(RuleBasedStateMachine):
    """Anybody asks at any time; copies and the keeper answer when they like, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.state = machine.WarmState()
        self.asked = 0
        self.unanswered: set[int] = set()
        self.copies = {"device"}  # where all bytes are
        self.copying: str | None = None  # to where
        self.telling = False  # the keeper was told something
        self.granted = True  # whoever wants the weights gets them

    def do(self, event: machine.Event) -> None:
        before = self.state
        self.state, effects = machine.step(self.state, event)
        assert machine.step(before, event) == (self.state, effects)
        for effect in effects:
            self.hear(effect)

    def hear(self, effect: machine.Effect) -> None:
        match effect:
            case machine.HideWeights():
                assert self.granted
                self.granted = False
            case machine.ShowWeights():
                assert not self.granted
                assert self.copies >= {"device"}
                self.granted = True
            case machine.CopyOut(7) | machine.CopyIn(7):
                assert not self.granted
                assert self.copying is None
                self.copying = "host" if isinstance(effect, machine.CopyOut) else "device"
                assert self.copying not in self.copies
            case machine.FreeDevice(7) | machine.RecordSlabs(7):
                self.copies -= {"device"} if isinstance(effect, machine.FreeDevice) else set()
                self.telling = True
            case machine.FreeHost():
                self.copies -= {"host"}
            case machine.MoveDone(asker) | machine.RefuseMove(asker):
                self.unanswered.remove(asker)
            case _:
                raise AssertionError(effect)

    @rule(there=st.booleans(), used=st.booleans(), room=st.sampled_from([0, SIZE - 1, SIZE, 100]))
    def demote(self, there: bool, used: bool, room: int) -> None:
        self.asked += 1
        self.unanswered.add(self.asked)
        users = ("somebody",) if used else ()
        refused = used or not there or room < SIZE
        before = self.state
        self.do(machine.DemoteWeights(self.asked, 7 if there else None, SIZE, users, room))
        assert self.state == before or not refused

    @rule(room=st.sampled_from([None, None, 0, SIZE - 1, SIZE]))
    def promote(self, room: int | None) -> None:
        self.asked += 1
        self.unanswered.add(self.asked)
        self.do(machine.PromoteWeights(self.asked, room))
        assert self.state.level is not WeightsLevel.PROMOTING or self.copying or self.telling

    @precondition(lambda self: self.copying)
    @rule()
    def a_copy_is_done(self) -> None:
        assert self.copying is not None
        self.copies.add(self.copying)
        self.copying = None
        self.do(machine.Copied())

    @precondition(lambda self: self.copying)
    @rule()
    def a_copy_fails(self) -> None:
        self.copying = None
        self.do(machine.CopyFailed("no memory"))

    @precondition(lambda self: self.telling)
    @rule()
    def the_keeper_has_done_it(self) -> None:
        self.telling = False
        self.do(machine.KeeperUpdated())

    @invariant()
    def one_whole_copy_is_there(self) -> None:
        assert self.copies

    @invariant()
    def only_who_waits_for_a_move_is_unanswered(self) -> None:
        moving = self.state.level in (WeightsLevel.DEMOTING, WeightsLevel.PROMOTING)
        assert len(self.unanswered) == moving == bool(self.copying or self.telling)

    @invariant()
    def a_level_is_what_it_says(self) -> None:
        if self.state.level is WeightsLevel.HOT:
            assert (self.copies, self.granted) == ({"device"}, True)
        if self.state.level is WeightsLevel.WARM:
            assert (self.copies, self.granted) == ({"host"}, False)
        assert repr(self.state).startswith(self.state.level)


TestLevelModel = LevelModel.TestCase
TestLevelModel.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)


def test_every_question_is_answered_at_every_level() -> None:
    """And a report is expected only on the way."""
    for level, row in machine.TABLE.items():
        moving = level in (WeightsLevel.DEMOTING, WeightsLevel.PROMOTING)
        assert {machine.DemoteWeights, machine.PromoteWeights} <= set(row)
        assert {machine.Copied, machine.CopyFailed, machine.KeeperUpdated} & set(row) == (
            {machine.Copied, machine.CopyFailed, machine.KeeperUpdated} if moving else set()
        )
    assert set(machine.TABLE) == set(WeightsLevel)


@pytest.mark.parametrize("report", [machine.Copied(), machine.CopyFailed("x"), machine.KeeperUpdated()])
def test_a_report_that_nobody_waits_for_is_a_mistake(report: machine.Event) -> None:
    """It changes nothing: the vault has a bug, and says so."""
    with pytest.raises(AssertionError):
        machine.step(machine.WarmState(), report)
