"""The ledger against everything that may happen to a stream, in any order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from streams_rig import make_request

from holdfast.streams.ledger import Ledger

TOKENS = st.lists(st.integers(0, 50), max_size=4)
PROMPT = [1, 2, 3]


class LedgerMachine(RuleBasedStateMachine):
    """A model that keeps only what a client may have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(make_request("r", list(PROMPT)))
        self.shown: list[int] = []
        self.running: int | None = None  # the attempt that may speak
        self.begun: list[int] = []
        self.ends = 0
        self.failures = 0

    @precondition(lambda self: not self.ledger.ended)
    @rule()
    def begin(self) -> None:
        self.running = self.ledger.begin_attempt()
        assert self.running not in self.begun
        self.begun.append(self.running)

    @precondition(lambda self: self.running is not None and not self.ledger.ended)
    @rule()
    def fail(self) -> None:
        self.ledger.fail_attempt()
        self.running = None
        self.failures += 1

    @rule(tokens=TOKENS, data=st.data())
    def speak(self, tokens: list[int], data: st.DataObject) -> None:
        """Any attempt there ever was says something."""
        if not self.begun:
            return
        attempt = data.draw(st.sampled_from(self.begun))
        taken = self.ledger.accept(attempt, tokens)
        assert taken is (attempt == self.running and not self.ledger.ended)
        if taken:
            self.shown += tokens

    @rule()
    def end(self) -> None:
        self.ends += self.ledger.end()

    @invariant()
    def nothing_lost_nothing_repeated(self) -> None:
        assert (self.ledger.prompt, self.ledger.made) == (PROMPT, self.shown)
        assert self.ledger.emitted == len(self.shown)
        assert self.ledger.resumed == self.failures

    @invariant()
    def ends_once(self) -> None:
        assert self.ends == int(self.ledger.ended)

    @invariant()
    def the_request_is_the_whole_truth(self) -> None:
        request = self.ledger.request()
        assert (request.tokens, request.prompt_len) == (PROMPT + self.shown, len(PROMPT))
        assert request.sampling.seed == self.ledger.sampling.seed


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


def test_an_ended_stream_is_not_attempted_again() -> None:
    """Beginning an attempt after the end is our own bug and says so."""
    ledger = Ledger(make_request("r", [1]))
    ledger.end()
    with pytest.raises(AssertionError, match="never attempted again"):
        ledger.begin_attempt()


def test_barren_attempts_are_counted_in_a_row() -> None:
    """A token clears the count; an attempt that never ran leaves it as it was, and is no resumption."""
    ledger = Ledger(make_request("r", [1]))
    for _ in range(2):
        ledger.begin_attempt()
        ledger.fail_attempt()
    turned_away = ledger.begin_attempt()
    ledger.void_attempt()
    assert (ledger.barren, ledger.resumed) == (2, 2)
    assert not ledger.accept(turned_away, [5])
    ledger.accept(ledger.begin_attempt(), [5])
    ledger.fail_attempt()
    assert ledger.barren == 0


def test_deaths_are_counted_in_a_row_and_apart() -> None:
    """A death is not a barren attempt nor the other way round; one token of its own clears both."""
    ledger = Ledger(make_request("r", [1]))
    for died in (True, False, True):
        ledger.begin_attempt()
        ledger.fail_attempt(died=died)
    assert (ledger.deaths, ledger.barren) == (2, 1)
    ledger.accept(ledger.begin_attempt(), [5])
    ledger.fail_attempt(died=True)
    assert (ledger.deaths, ledger.barren) == (0, 0)


def test_a_failed_attempt_is_void_at_once() -> None:
    """Between an attempt's failure and the next one's beginning nobody may speak."""
    ledger = Ledger(make_request("r", [1]))
    attempt = ledger.begin_attempt()
    ledger.fail_attempt()
    assert not ledger.accept(attempt, [5])
    assert (ledger.prompt, ledger.made) == ([1], [])


def test_the_ledger_is_its_own_status_line() -> None:
    """Its repr says what a person wants to know of a stream."""
    ledger = Ledger(make_request("r", [1, 2]))
    ledger.accept(ledger.begin_attempt(), [5])
    assert repr(ledger) == "<Ledger r 2+1 tokens, resumed 0, attempt 1>"


def test_choices_share_their_prompt() -> None:
    """One list for all of them, however many: it is not copied, and no choice writes to it."""
    prompt = list(range(100))
    ledgers = [Ledger(make_request(f"r-{index}", prompt)) for index in range(3)]
    for ledger in ledgers:
        assert ledger.request().tokens is prompt
        assert ledger.accept(ledger.begin_attempt(), [7, 8])
    assert all(ledger.prompt is prompt for ledger in ledgers)
    assert prompt == list(range(100))
    assert ledgers[0].request().tokens == [*prompt, 7, 8]
