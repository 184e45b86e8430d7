"""The table of the weights' lock machine, its bounds, and what a restart makes of its records."""

from __future__ import annotations

import itertools

import pytest

from holdfast.memory.vault import weights_machine as machine
from holdfast.memory.vault.weights_machine import (
    Ask,
    Commit,
    Committed,
    DropGeneration,
    Generation,
    Gone,
    Reader,
    Refuse,
    TimedOut,
    Weights,
    restore,
    step,
)
from holdfast.memory.vault.weights_state import TABLE, Situation, Wish


def test_every_wish_has_an_answer_in_every_situation() -> None:
    """The table is whole: no wish in any situation is left open."""
    assert all(set(TABLE[wish]) == set(Situation) for wish in Wish)
    assert set(TABLE) == set(Wish)


def test_no_reader_is_ever_delayed_by_a_replacement() -> None:
    """Whatever a wish to read gets on committed weights, it gets the same while they are being replaced."""
    for wish in (Wish.READ, Wish.READ_WHEN_WRITTEN, Wish.EITHER):
        assert TABLE[wish][Situation.REPLACING] == TABLE[wish][Situation.COMMITTED] == "read"


def test_the_waiters_are_bounded() -> None:
    """One more than the bound is refused by name, and those who wait are not touched."""
    state, _ = step(Weights(), Ask(0, "rw", 100.0), 0.0)
    for session in range(1, machine.WAITERS_MAX + 1):
        state, effects = step(state, Ask(session, "ro", 100.0), 0.0)
        assert effects == ()
    full, effects = step(state, Ask(5000, "ro", 100.0), 0.0)
    assert [(e.session, e.code) for e in effects if isinstance(e, Refuse)] == [(5000, machine.Code.TOO_MANY)]
    assert full == state
    state, effects = step(full, Commit(0, "h1"), 1.0)
    assert [e.session for e in effects] == list(range(machine.WAITERS_MAX + 1)), "oldest first, all together"


def test_a_late_commit_grants_nothing_to_whom_time_has_run_out() -> None:
    """A waiter whose deadline has passed is timed out even if the commit is what tells the machine the time."""
    state, _ = step(Weights(), Ask(0, "rw", 100.0), 0.0)
    state, _ = step(state, Ask(1, "ro", 5.0), 0.0)
    state, effects = step(state, Commit(0, "h1"), 5.0)
    assert effects == (Committed(0, 1, "h1"), TimedOut(1))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_restored_generations_nobody_reads_are_dropped(order: tuple[int, ...]) -> None:
    """A vault that died between a commit's record and dropping the old one finishes that when it starts again."""
    records = [Generation(1, "h1"), Generation(2, "h2"), Generation(4, "h4")]
    state, effects = restore([records[i] for i in order], [Reader(7, 1)])
    assert effects == (DropGeneration(2),)
    assert (state.current, state.last_generation) == (Generation(4, "h4"), 4)
    _, effects = step(state, Gone(7), 0.0)
    assert effects == (DropGeneration(1),)
