"""The ledger against everything that may happen to a stream, in any order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.streams.ledger import Ledger
from tests.rigs.worlds.streams import make_request

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
        self.fruitless = {"barren": 0, "deaths": 0}  # attempts in a row without a token, each kind apart
        self.fresh = 0  # tokens of the current attempt

    @precondition(lambda self: not self.ledger.ended)
    @rule()
    def begin(self) -> None:
        self.running = self.ledger.begin_attempt()
        assert self.running not in self.begun
        self.begun.append(self.running)
        self.fresh = 0

    @precondition(lambda self: self.running is not None and not self.ledger.ended)
    @rule(why=st.sampled_from(["deaths", "barren", ""]))
    def fail(self, why: str) -> None:
        """By a failure or a death, or given back by a worker that was told to stop. One token clears both counts."""
        if why:
            self.ledger.fail_attempt(died=why == "deaths")
            self.fruitless[why] += 1
        else:
            self.ledger.hand_back()
        if self.fresh:
            self.fruitless = {"barren": 0, "deaths": 0}
        self.running = None
        self.failures += 1

    @precondition(lambda self: self.running is not None and not self.fresh and not self.ledger.ended)
    @rule()
    def never_ran(self) -> None:
        """Turned away by a full worker: no resumption, and the counts are as they were."""
        self.ledger.void_attempt()
        self.running = None

    @rule(tokens=TOKENS, data=st.data())
    def speak(self, tokens: list[int], data: st.DataObject) -> None:
        """Any attempt there ever was says something."""
        if not self.begun:
            return
        attempt = data.draw(st.just(self.begun[-1]) | st.sampled_from(self.begun))
        taken = self.ledger.accept(attempt, tokens)
        assert taken is (attempt == self.running and not self.ledger.ended)
        if taken:
            self.shown += tokens
            self.fresh += len(tokens)

    @rule()
    def end(self) -> None:
        self.ends += self.ledger.end()

    @invariant()
    def nothing_lost_nothing_repeated(self) -> None:
        assert (self.ledger.prompt, self.ledger.made) == (PROMPT, self.shown)
        assert self.ledger.emitted == len(self.shown)
        assert self.ledger.resumed == self.failures
        assert {"barren": self.ledger.empty_attempts, "deaths": self.ledger.deaths} == self.fruitless

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
