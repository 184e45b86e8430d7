"""The first moments of a leadership: when the canary's word is given, and when it is not."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.core.requests import Failure, GenerateRequest, Output, Sampling
from holdfast.engines.shadow.proving import CANARY, Canary, Proving

TOKENS = (11, 12, 13)
SOON_S = 1.0  # longer than a canary of three tokens is judged, on a busy machine too
NEVER_S = 3600.0


class Trial:
    """A proving that began, and how often its word was given."""

    def __init__(self, belief_s: float) -> None:
        self.words = 0
        self.given = asyncio.Event()
        request = GenerateRequest("canary", [1], 1, Sampling(len(TOKENS), 0))
        self.proving = Proving(self._give, belief_s)
        self.proving.begin(Canary(request, TOKENS))

    def _give(self) -> None:
        self.words += 1
        self.given.set()

    def canary(self, *tokens: int) -> list[Output] | None:
        return self.proving.judge([Output(7, [70]), Output(CANARY, list(tokens))])


async def test_the_word_comes_after_the_whole_canary_and_a_while() -> None:
    """Others' tokens pass; the word is given once, not before its time, though the canary was right long before."""
    trial = Trial(SOON_S)
    began_s = asyncio.get_running_loop().time()
    for token in TOKENS:
        assert [output.stream for output in trial.canary(token) or []] == [7]
    assert (trial.proving.left, trial.words) == ([], 0)
    async with asyncio.timeout(60):
        await trial.given.wait()
    assert asyncio.get_running_loop().time() - began_s >= SOON_S
    trial.proving.end(alive=True)
    assert trial.words == 1


async def test_a_late_canary_is_believed_at_once() -> None:
    """An engine that has lived long enough before its canary is over has nothing more to wait for."""
    trial = Trial(0.0)
    trial.canary(*TOKENS)
    async with asyncio.timeout(60):
        await trial.given.wait()


@pytest.mark.parametrize("wrong", [Output(CANARY, [11, 99]), Output(CANARY, [], failure=Failure("Cancelled", ""))])
async def test_a_wrong_canary_lets_nothing_through(wrong: Output) -> None:
    """One wrong token, or a failure: the batch is nobody's, and there is no word."""
    trial = Trial(NEVER_S)
    assert trial.proving.judge([Output(7, [70]), wrong]) is None
    trial.proving.end(alive=False)
    assert trial.words == 0


@pytest.mark.parametrize(("seen", "alive", "words"), [(3, True, 1), (3, False, 0), (2, True, 0), (2, False, 0)])
async def test_the_end_before_the_word(seen: int, alive: bool, words: int) -> None:
    """A planned end gives the word if the canary was seen whole; any other end does not; and nothing comes later."""
    trial = Trial(SOON_S)
    trial.canary(*TOKENS[:seen])
    trial.proving.end(alive=alive)
    after = asyncio.Event()
    asyncio.get_running_loop().call_later(1.2 * SOON_S, after.set)
    async with asyncio.timeout(60):
        await after.wait()
    assert trial.words == words


async def test_nobody_is_quicker_than_the_canary() -> None:
    """Tokens made before the canary's first one wait for it, keep their order, and are lost if it is wrong."""
    trial = Trial(NEVER_S)
    assert trial.proving.judge([Output(7, [70]), Output(8, [80])]) == []
    assert trial.proving.judge([Output(7, [71])]) == []
    said = trial.proving.judge([Output(8, [81]), Output(CANARY, [11])]) or []
    assert [(output.stream, *output.tokens) for output in said] == [(7, 70), (8, 80), (7, 71), (8, 81)]
    assert [output.stream for output in trial.proving.judge([Output(8, [82])]) or []] == [8]
    other = Trial(NEVER_S)
    assert other.proving.judge([Output(7, [70])]) == []
    assert other.proving.judge([Output(CANARY, [99])]) is None
