"""The first moments of a leadership: when the canary's word is given, and when it is not."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.core.requests import Failure, GenerateRequest, Output, Sampling, TokenLogprobs
from holdfast.engines.host.proving import CANARY, Canary, Proving, Stage

TOKENS = (11, 12, 13)
SOON_S = 1.0  # longer than a canary of three tokens is judged, on a busy machine too
NEVER_S = 3600.0


class Trial:
    """A proving that began, and how often its word was given."""

    def __init__(self, belief_s: float, tolerance_nats: float = 0.0) -> None:
        self.words = 0
        self.given = asyncio.Event()
        request = GenerateRequest("canary", [1], 1, Sampling(len(TOKENS), 0))
        self.known = Canary(request, TOKENS, tolerance_nats=tolerance_nats)
        self.proving = Proving(self._give, belief_s)
        self.proving.begin(self.known)

    def _give(self) -> None:
        self.words += 1
        self.given.set()

    def hear(self, *outputs: Output) -> list[tuple[int, int]]:
        """What may be sent after a step with these, by stream and token."""
        return [(output.stream, *output.tokens) for output in self.proving.filter_outputs(list(outputs))]

    def canary(self, *tokens: int) -> list[tuple[int, int]]:
        return self.hear(Output(7, [70]), Output(CANARY, list(tokens)))


async def test_the_word_comes_after_the_whole_canary_and_a_while() -> None:
    """Others' tokens pass; the word is given once, not before its time, though the canary was right long before."""
    trial = Trial(SOON_S)
    began_s = asyncio.get_running_loop().time()
    for token in TOKENS:
        assert trial.canary(token) == [(7, 70)]
    assert (trial.proving.stage, trial.words) == (Stage.RIGHT, 0)
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


WRONG = [
    Output(CANARY, [11, 99]),
    Output(CANARY, [], failure=Failure("Cancelled", "")),
    Output(CANARY, [*TOKENS, 1]),
    Output(CANARY, [], finish="stop"),
]


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_answer_is_asked_for_again_and_everything_waits(wrong: Output) -> None:
    """One wrong token, one too many, none at all, or a failure: nothing leaves until the whole second answer was
    right; then everything does in its order, and the word is given."""
    trial = Trial(0.0)
    assert trial.hear(Output(7, [70]), wrong) == []
    assert trial.proving.stage is Stage.DOUBTED
    trial.proving.begin(trial.known)
    assert trial.canary(11) == trial.canary(12) == []
    assert trial.hear(Output(8, [80]), Output(CANARY, [13])) == [(7, 70), (7, 70), (7, 70), (8, 80)]
    async with asyncio.timeout(60):
        await trial.given.wait()


@pytest.mark.parametrize("wrong", WRONG)
async def test_wrong_twice_lets_nothing_through_unless_it_is_told_to(wrong: Output) -> None:
    """There is no word for that leadership, and what was held leaves only by `release`, with all that follows."""
    trial = Trial(0.0)
    trial.hear(Output(7, [70]), wrong)
    trial.proving.begin(trial.known)
    assert trial.hear(Output(7, [71]), wrong) == []
    assert trial.proving.stage is Stage.DISPROVED
    assert trial.hear(Output(7, [72])) == []
    assert [output.tokens for output in trial.proving.release()] == [[70], [71], [72]]
    assert not trial.proving.under_way
    trial.proving.end(alive=True)
    assert (trial.words, trial.proving.over) == (0, False)


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
    """Tokens made before the canary's first one wait for it, and keep their order."""
    trial = Trial(NEVER_S)
    assert trial.hear(Output(7, [70]), Output(8, [80])) == []
    assert trial.hear(Output(7, [71])) == []
    assert trial.hear(Output(8, [81]), Output(CANARY, [11])) == [(7, 70), (8, 80), (7, 71), (8, 81)]
    assert trial.hear(Output(8, [82])) == [(8, 82)]


def logprobs(*top: tuple[int, float]) -> list[TokenLogprobs]:
    return [TokenLogprobs(top[0][1], list(top))]


@pytest.mark.parametrize(
    ("behind", "tolerance_nats", "stage"),
    [(0.2, 1.0, Stage.RIGHT), (0.99, 1.0, Stage.RIGHT), (1.5, 1.0, Stage.DOUBTED), (0.2, 0.0, Stage.DOUBTED)],
)
async def test_a_token_that_is_about_as_likely_is_no_wrong_answer(
    behind: float, tolerance_nats: float, stage: Stage
) -> None:
    """Where an answer may round. What follows it is another text, and is not compared."""
    trial = Trial(NEVER_S, tolerance_nats)
    trial.canary(11)
    other = Output(CANARY, [99], logprobs=logprobs((99, -0.5), (12, -0.5 - behind)))
    said = trial.hear(Output(7, [71]), other)
    assert trial.proving.stage is stage
    assert said == ([(7, 71)] if stage is Stage.RIGHT else [])
    trial.hear(Output(CANARY, [55]))
    assert trial.proving.stage is stage


@pytest.mark.parametrize(
    ("tokens", "told", "fits"),
    [
        ([11, 12, 13], [], True),
        ([11, 12], [], False),
        ([11, 12, 13, 14], [], False),
        ([11, 99, 98], [[], [(99, -1.0), (12, -1.1)], []], True),
        ([11, 99, 98], [[], [(99, -1.0), (12, -3.0)], []], False),
        ([11, 99, 98], [[], [(99, -1.0), (77, -1.1)], []], False),
        ([11, 99, 98], [], False),
    ],
)
def test_a_whole_answer_is_compared_alike(tokens: list[int], told: list[list[tuple[int, float]]], fits: bool) -> None:
    """As a standby's is."""
    request = GenerateRequest("canary", [1], 1, Sampling(len(TOKENS), 0))
    said = [TokenLogprobs(top[0][1] if top else 0.0, top) for top in told]
    assert Canary(request, TOKENS, tolerance_nats=1.0).fits(tokens, said) is fits
