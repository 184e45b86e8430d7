"""The lock machine of the weights: against a model that knows only what it was told; its table, bounds and restarts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.memory.vault import weights_machine as machine

SESSIONS_MAX = 6
SESSIONS = st.integers(0, SESSIONS_MAX - 1)
MODES = st.sampled_from(["rw", "ro", "rw_or_ro"])
ALL_MODES = st.sampled_from(["rw", "ro", "rw_or_ro", "drop"])
TIMEOUTS = st.sampled_from([20.0, 60.0, 4.0, 0.0])
HASHES = st.sampled_from(["h1", "h2", "h3"])


class WeightsModel(RuleBasedStateMachine):
    """Sessions do anything at any time. The model is built from effects alone; it never looks into the state."""

    def __init__(self) -> None:
        super().__init__()
        self.state = machine.WeightsState()
        self.now_s = 0.0
        self.held_until_s = 0.0
        self.writer: tuple[int, int] | None = None  # session, generation
        self.readers: dict[int, int] = {}
        self.waiting: dict[int, machine.RequestLock] = {}
        self.kept: dict[int, str] = {}  # committed and not dropped: generation -> hash
        self.current: int | None = None
        self.numbers: list[int] = []
        self.gone = 0  # the newest that was asked to go

        self.away = False

    @initialize(start=st.sampled_from(["empty", "held", "writing", "committed", "replacing", "replacing"]))
    def begin(self, start: str) -> None:
        """Anywhere: a walk from nothing seldom gets far."""
        self.held_until_s = 5.0 if start == "held" else 0.0
        self.state, effects = machine.restore((), refill_from_s=self.held_until_s or None)
        assert effects == ()
        if start in ("writing", "committed", "replacing"):
            self.ask_as(0, "rw", 20.0)
        if start in ("committed", "replacing"):
            self.do(machine.Commit(0, "h1"))
        if start == "replacing":
            self.ask_as(1, "rw", 20.0, replace="h1")

    # -- what happens

    def ask_as(
        self, session: int, mode: Any, timeout_s: float, patient: bool = False, replace: str | None = None
    ) -> None:
        ask = machine.RequestLock(session, mode, self.now_s + timeout_s, patient, replace)
        busy = self.holds(session) or session in self.waiting
        if not busy and (replace is None if mode in ("ro", "rw_or_ro") else mode == "rw" or replace is not None):
            self.waiting[session] = ask
        effects = self.do(ask)
        if busy:
            assert isinstance(effects[0], machine.RefuseLock)
            assert effects[0].session == session

    def free(self, pick: int) -> int:
        """A session that holds nothing and waits for nothing, if there is one."""
        idle = [s for s in range(SESSIONS_MAX) if s not in self.waiting and not self.holds(s)]
        return idle[pick % len(idle)] if idle else pick

    @rule(pick=SESSIONS, mode=MODES, timeout_s=TIMEOUTS, patient=st.booleans())
    def ask(self, pick: int, mode: Any, timeout_s: float, patient: bool) -> None:
        self.ask_as(self.free(pick), mode, timeout_s, patient)

    @rule(session=SESSIONS, mode=ALL_MODES, timeout_s=TIMEOUTS, replace=st.none() | HASHES)
    def ask_anything(self, session: int, mode: Any, timeout_s: float, replace: str | None) -> None:
        self.ask_as(session, mode, timeout_s, False, replace)

    @precondition(lambda self: self.current is not None)
    @rule(pick=SESSIONS, timeout_s=TIMEOUTS)
    def ask_to_replace_what_is_here(self, pick: int, timeout_s: float) -> None:
        assert self.current is not None
        self.ask_as(self.free(pick), "rw", timeout_s, replace=self.kept[self.current])

    @precondition(lambda self: self.current is not None)
    @rule(pick=SESSIONS, timeout_s=TIMEOUTS)
    def ask_to_drop_what_is_here(self, pick: int, timeout_s: float) -> None:
        assert self.current is not None
        self.ask_as(self.free(pick), "drop", timeout_s, replace=self.kept[self.current])

    @precondition(lambda self: self.writer is not None)
    @rule(layout_hash=HASHES)
    def commit(self, layout_hash: str) -> None:
        assert self.writer is not None
        self.do(machine.Commit(self.writer[0], layout_hash))

    @precondition(lambda self: self.can_leave_the_device or self.away)
    @rule()
    def move(self) -> None:
        """To host memory, or back."""
        self.away = not self.away
        self.do(machine.WeightsMoved(self.away))

    @property
    def can_leave_the_device(self) -> bool:
        return self.current is not None and self.writer is None and not self.readers

    @precondition(lambda self: self.readers)
    @rule()
    def all_readers_leave(self) -> None:
        for session in list(self.readers):
            self.leave(session)

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0, 4))
    def a_waiter_leaves(self, pick: int) -> None:
        self.leave(sorted(self.waiting)[pick % len(self.waiting)])

    @precondition(lambda self: self.writer is not None)
    @rule()
    def the_writer_leaves(self) -> None:
        assert self.writer is not None
        self.leave(self.writer[0])

    @precondition(lambda self: self.current is not None and len(self.numbers) > 2)
    @rule(held_s=st.sampled_from([0.0, 5.0]))
    def lose_everything(self, held_s: float) -> None:
        """Vault and keeper die together: without this, weights once committed would be there for ever."""
        self.waiting, self.readers, self.kept, self.current, self.writer = {}, {}, {}, None, None
        self.away = False
        self.held_until_s = self.now_s + held_s
        number = self.state.last_generation
        self.state, _ = machine.restore((), (), number, self.held_until_s if held_s else None)

    @rule(session=SESSIONS)
    def commit_by_anyone(self, session: int) -> None:
        self.do(machine.Commit(session, "h1"))

    @precondition(lambda self: self.now_s < self.held_until_s or self.current is not None)
    @rule(session=SESSIONS, layout_hash=HASHES)
    def donate(self, session: int, layout_hash: str) -> None:
        self.do(machine.DonateWeights(session, layout_hash))

    @rule(session=SESSIONS)
    def leave(self, session: int) -> None:
        self.waiting.pop(session, None)
        self.readers.pop(session, None)
        effects = self.do(machine.ReleaseLock(session))
        assert not [e for e in effects if getattr(e, "session", None) == session and not isinstance(e, machine.Aborted)]

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.do(machine.WeightsTick())

    @precondition(lambda self: len(self.numbers) > 1 and not self.away)
    @rule()
    def restart_the_vault(self) -> None:
        """Only what is recorded survives: generations, readers, and that the newest had to go. Waiters and writer lost
        their connection."""
        self.waiting, self.writer = {}, None
        records = [machine.Generation(number, layout_hash) for number, layout_hash in self.kept.items()]
        readers = [machine.GenerationHolder(session, number) for session, number in self.readers.items()]
        self.state, effects = machine.restore(
            records, readers, self.state.last_generation, self.state.refill_from_s, self.gone
        )
        assert effects == ()

    # -- what is told

    def do(self, event: machine.Event) -> tuple[machine.Effect, ...]:
        before = self.state
        self.state, effects = machine.step(self.state, event, self.now_s)
        assert machine.step(before, event, self.now_s) == (self.state, effects)
        for effect in effects:
            self.hear(effect)
        return effects

    def holds(self, session: int) -> bool:
        return session in self.readers or (self.writer is not None and self.writer[0] == session)

    def answered(self, session: int) -> machine.RequestLock:
        ask = self.waiting.pop(session)
        assert not self.holds(session)
        return ask

    def hear(self, effect: machine.Effect) -> None:
        match effect:
            case machine.GrantWrite(session, generation, replacing):
                ask = self.answered(session)
                assert self.writer is None, "two writers"
                assert not self.away
                assert ask.mode in ("rw", "rw_or_ro")
                assert replacing == ask.replace == (None if self.current is None else self.kept[self.current])
                assert generation > max(self.numbers, default=0)
                self.numbers.append(generation)
                self.writer = (session, generation)
            case machine.GrantRead(session, generation, layout_hash):
                if session in self.waiting:
                    assert self.answered(session).mode in ("ro", "rw_or_ro")
                assert generation == self.current
                assert not self.away, "a reader was granted what is not there"
                assert self.kept[generation] == layout_hash, "a reader was granted what is not committed"
                self.readers[session] = generation
            case machine.Committed(session, generation, layout_hash):
                if self.writer == (session, generation):
                    self.writer = None
                else:  # a donation, into nothing
                    assert self.current is None
                    assert self.writer is None
                    assert generation > max(self.numbers, default=0)
                    self.numbers.append(generation)
                self.told = [s for s, g in self.readers.items() if g == self.current]
                self.kept[generation] = layout_hash
                self.current = generation
                self.readers[session] = generation
            case machine.TellSuperseded(session, by_hash):
                self.told.remove(session)
                assert self.current is not None
                assert by_hash == self.kept[self.current]
            case machine.Aborted(session, generation):
                assert self.writer == (session, generation)
                self.writer = None
            case machine.AskToLetGo(session):
                assert self.readers[session] == self.current, "nobody else is in the way"
            case machine.DropGeneration(generation):
                if generation == self.current:
                    asked = [ask for ask in self.waiting.values() if ask.mode == "drop"]
                    assert self.kept[generation] in [ask.replace for ask in asked], "nobody asked it to go"
                    assert self.writer is None
                    assert not self.away
                    self.current, self.gone = None, generation
                assert generation not in self.readers.values(), "a generation was dropped under a reader"
                del self.kept[generation]
            case machine.AnswerEmpty(session):
                assert self.answered(session).mode in ("ro", "drop")
                assert self.current is None
                assert self.writer is None
            case machine.LockTimedOut(session):
                assert self.answered(session).deadline_s <= self.now_s
            case machine.RefuseLock(session, code):
                if code in (machine.WeightsRefusal.STALE, machine.WeightsRefusal.COMMITTED) and session in self.waiting:
                    here = None if self.current is None else self.kept[self.current]
                    asked = self.answered(session).replace
                    assert (
                        (asked != here)
                        if code is machine.WeightsRefusal.STALE
                        else (asked is None and here is not None)
                    )

    # -- what is always true

    def must_wait(self, ask: machine.RequestLock) -> bool:
        """Whether there is still a reason to wait, said without the table."""
        if ask.deadline_s <= self.now_s:
            return False
        read = self.current is not None and self.current in self.readers.values()
        wanted_gone = [each.replace for each in self.waiting.values() if each.mode == "drop"]
        dropping = read and self.current is not None and self.kept[self.current] in wanted_gone
        if ask.replace is not None:
            here = self.current is not None and self.kept[self.current] == ask.replace
            return here and (self.writer is not None or dropping or self.away)
        if self.away:
            return ask.mode != "rw"
        if self.current is not None:
            return dropping and ask.mode != "rw" and self.writer is None
        if self.writer is not None or self.now_s < self.held_until_s:
            return True
        return ask.mode == "ro" and ask.wait_for_writer

    @invariant()
    def nobody_waits_without_a_reason(self) -> None:
        assert all(self.must_wait(ask) for ask in self.waiting.values())
        assert {ask.session for ask in self.state.waiters} == set(self.waiting)

    @invariant()
    def superseded_and_unread_is_dropped(self) -> None:
        assert set(self.kept) == set(self.readers.values()) | ({self.current} if self.current is not None else set())

    @invariant()
    def the_next_deadline_is_ahead(self) -> None:
        due_s = machine.next_deadline_s(self.state)
        assert (due_s is not None) == bool(self.waiting)
        assert due_s is None or self.now_s < due_s <= min(ask.deadline_s for ask in self.waiting.values())

    @invariant()
    def the_status_line_can_be_read(self) -> None:
        assert repr(self.state).startswith(self.state.phase)

    def teardown(self) -> None:
        """Every waiter comes to an end by time alone."""
        for _ in range(len(self.waiting) + 2):
            if (due_s := machine.next_deadline_s(self.state)) is not None:
                self.now_s = due_s
                self.do(machine.WeightsTick())
        assert not self.waiting


TestWeightsModel = WeightsModel.TestCase
TestWeightsModel.settings = settings(max_examples=75, stateful_step_count=50, deadline=None)


def test_every_wish_has_an_answer_in_every_situation() -> None:
    """The table is whole: no wish in any situation is left open."""
    assert all(set(machine.TABLE[wish]) == set(machine.WeightsSituation) for wish in machine.LockKind)
    assert set(machine.TABLE) == set(machine.LockKind)


def test_the_waiters_are_bounded() -> None:
    """One more than the bound is refused by name, and those who wait are not touched."""
    state, _ = machine.step(machine.WeightsState(), machine.RequestLock(0, "rw", 100.0), 0.0)
    for session in range(1, machine.WAITERS_MAX + 1):
        state, effects = machine.step(state, machine.RequestLock(session, "ro", 100.0), 0.0)
        assert effects == ()
    full, effects = machine.step(state, machine.RequestLock(5000, "ro", 100.0), 0.0)
    assert [(e.session, e.code) for e in effects if isinstance(e, machine.RefuseLock)] == [
        (5000, machine.WeightsRefusal.TOO_MANY)
    ]
    assert full == state
    state, effects = machine.step(full, machine.Commit(0, "h1"), 1.0)
    assert [e.session for e in effects] == list(range(machine.WAITERS_MAX + 1)), "oldest first, all together"


def test_a_late_commit_grants_nothing_to_whom_time_has_run_out() -> None:
    """A waiter whose deadline has passed is timed out even if the commit is what tells the machine the time."""
    state, _ = machine.step(machine.WeightsState(), machine.RequestLock(0, "rw", 100.0), 0.0)
    state, _ = machine.step(state, machine.RequestLock(1, "ro", 5.0), 0.0)
    state, effects = machine.step(state, machine.Commit(0, "h1"), 5.0)
    assert effects == (machine.Committed(0, 1, "h1"), machine.LockTimedOut(1))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_restored_generations_nobody_reads_are_dropped(order: tuple[int, ...]) -> None:
    """A vault that died between a commit's record and dropping the old one finishes that when it starts again."""
    records = [machine.Generation(1, "h1"), machine.Generation(2, "h2"), machine.Generation(4, "h4")]
    state, effects = machine.restore([records[i] for i in order], [machine.GenerationHolder(7, 1)])
    assert effects == (machine.DropGeneration(2),)
    assert (state.current, state.last_generation) == (machine.Generation(4, "h4"), 4)
    _, effects = machine.step(state, machine.ReleaseLock(7), 0.0)
    assert effects == (machine.DropGeneration(1),)
