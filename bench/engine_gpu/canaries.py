"""How far a busy batch moves a canary's answer: known questions, asked alone and beside more and more streams.

Each question is asked of an idle engine first; that is what is expected of it. Then the same beside streams with
prompts and samplings of their own, and told are: how many questions are fit (each first token leads by the band's
margin), and of those the tokens that flipped, the farthest any logprob moved, and the largest mean over one answer.
Always true: a question that is not fit counts in its own number only, as control does not ask it either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from bench.engine_gpu.words import Keep, Row, prompt_ids
from holdfast.control.questions import questions_of
from holdfast.core.address import parse_address
from holdfast.core.requests import GenerateRequest, Output, Sampling
from holdfast.health.expectations import (
    BANDS,
    TOP,
    WIDE,
    Band,
    CanaryAnswer,
    CanaryQuestion,
    answer_of,
    difference,
    is_fit,
)
from holdfast.spec.names import is_host
from holdfast.testing.supervised import Supervised
from holdfast.wire.messages import Generate, Step, ToFrontend, Welcome
from holdfast.wire.net import SocketNetwork
from holdfast.wire.worker_connection import WorkerConnection

CONNECT_S = 10.0
ANSWER_S = 60.0
LOADS = (0, 1, 7, 31, 63)  # streams beside it
SETS = 4  # of questions: as many models' worth of them
LONG = 4000  # tokens of a stream beside
FEW = 8  # questions between two looks at whether as many streams decode as should
WARM = 8  # tokens of each before the questions: it decodes


@dataclass(frozen=True, slots=True)
class CanaryBench:
    model: str
    device: str = "cuda-0"
    kv_gib: float = 20.0
    loads: tuple[int, ...] = LOADS
    sets: int = SETS
    start_s: float = 300.0

    def options(self) -> tuple[str, ...]:
        device = "cpu" if is_host(self.device) else self.device
        what = ("--engine", "torch", "--model", self.model, "--served-name", "bench", "--fast", "--controls", "0")
        return (*what, "--device", device, "--kv-gib", f"{self.kv_gib:g}", "--streams-max", str(max(self.loads) + 1))


@dataclass(slots=True)
class _Heard:
    outputs: list[Output] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)


class Asker(WorkerConnection):
    """A connection that asks."""

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose
        super().__init__("bench")
        self._heard: dict[int, _Heard] = {}
        self._number = 0

    def on_message(self, message: ToFrontend) -> None:
        if not isinstance(message, Step):
            super().on_message(message)
            return
        for output in message.outputs:
            heard = self._heard[output.stream]
            heard.outputs.append(output)
            if sum(len(each.tokens) for each in heard.outputs) >= WARM or output.finish or output.failure:
                heard.began.set()
            if output.finish is not None or output.failure is not None:
                heard.over.set()

    def generate(self, tokens: list[int], sampling: Sampling) -> _Heard:
        self._number += 1
        heard = self._heard[self._number] = _Heard()
        self.send(Generate(self._number, GenerateRequest(f"q{self._number}", tokens, len(tokens), sampling)))
        return heard

    async def answer_to(self, question: CanaryQuestion) -> CanaryAnswer:
        sampling = Sampling(question.tokens, 0, temperature=0.0, top_logprobs=TOP, ignore_eos=True)
        heard = self.generate(list(question.prompt), sampling)
        await asyncio.wait_for(heard.over.wait(), ANSWER_S)
        failed = [output.failure.message for output in heard.outputs if output.failure]
        assert not failed, failed
        tokens = [token for output in heard.outputs for token in output.tokens]
        return answer_of(tokens, [each for output in heard.outputs for each in output.logprobs or ()])


async def _connected(address: str, purpose: str) -> tuple[Asker, Welcome]:
    asker = Asker(purpose)
    await SocketNetwork().connect(parse_address(address), lambda: asker, CONNECT_S)
    return asker, await asker.welcome(CONNECT_S)


def moves(expected: CanaryAnswer, answer: CanaryAnswer) -> Iterator[float]:
    """Yield how far each logprob moved that both list."""
    for wants, gots in zip(expected.top, answer.top, strict=False):
        listed = dict(gots)
        yield from (abs(listed[token] - want) for token, want in wants if token in listed)


def figures(pairs: list[tuple[CanaryAnswer, CanaryAnswer]], band: Band) -> Row:
    """Return the figures of questions asked twice."""
    moved = [list(moves(want, got)) for want, got in pairs]
    return {
        "asked": len(pairs),
        "flipped": sum(want.tokens != got.tokens for want, got in pairs),
        "judged_wrong": sum(bool(difference(want, got, band)) for want, got in pairs),
        "farthest_nats": round(max((max(each) for each in moved), default=0.0), 4),
        "mean_nats_max": round(max((sum(each) / len(each) for each in moved), default=0.0), 4),
        "mean_nats_median": round(median(sum(each) / len(each) for each in moved), 4) if moved else 0.0,
    }


async def _top_up(beside: Asker, streams: list[_Heard], load: int) -> None:
    """As many streams decode as are to run beside the questions."""
    while sum(not stream.over.is_set() for stream in streams) < load:
        number = len(streams)
        sampling = Sampling(LONG, number, temperature=1.0, ignore_eos=True)
        streams.append(beside.generate(prompt_ids(number, 40 + 37 * number % 900, load), sampling))
    for stream in streams:
        await asyncio.wait_for(stream.began.wait(), ANSWER_S)
        assert not any(output.failure for output in stream.outputs), stream.outputs[-1]


async def _measure(bench: CanaryBench, address: str, keep: Keep) -> Row:
    asker, welcome = await _connected(address, "canary")
    band = BANDS.get(welcome.dtype, WIDE)
    seeds = [f"{welcome.checksum} {place}" for place in range(bench.sets)]
    questions = [each for seed in seeds for each in questions_of(seed, welcome.vocabulary)]
    expected = [await asker.answer_to(question) for question in questions]
    fit = sum(is_fit(answer, band) for answer in expected)
    told: Row = {"dtype": welcome.dtype, "device": welcome.device, "questions": len(questions), "fit": fit}
    told |= {"band": {"one": band.one, "mean": band.mean, "margin": band.margin}, "beside": {}}
    for load in bench.loads:
        beside, _ = await _connected(address, "data")
        answers: list[CanaryAnswer] = []
        streams: list[_Heard] = []
        for first in range(0, len(questions), FEW):
            await _top_up(beside, streams, load)
            answers += [await asker.answer_to(question) for question in questions[first : first + FEW]]
        pairs = list(zip(expected, answers, strict=True))
        sound = [(want, got) for want, got in pairs if is_fit(want, band)]
        made = sum(len(output.tokens) for stream in streams for output in stream.outputs)
        told["beside"][str(load)] = {"fit": figures(sound, band), "all": figures(pairs, band), "tokens_beside": made}
        beside.abort()
        print(load, told["beside"][str(load)], flush=True)
        keep(told)
    asker.abort()
    wrong = sum(row["fit"]["judged_wrong"] for row in told["beside"].values())
    told |= {"bound": "no sound answer is judged wrong", "met": wrong == 0 and fit > 0}
    keep(told)
    return told


def run(bench: CanaryBench, keep: Keep) -> Row:
    with Supervised(*bench.options(), start_s=bench.start_s) as up:
        return asyncio.run(_measure(bench, up.record(up.active().name)["address"], keep))
