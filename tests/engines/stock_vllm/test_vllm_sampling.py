"""Draws in a real vLLM on CPU: a stream that is resumed anywhere goes on with the tokens of the unbroken one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

# Not "vllm": where it is not installed this folder answers to that name.
pytest.importorskip("vllm.version", reason="vllm is not installed: what needs it is left out")

import torch

from holdfast.core.requests import CANARY_TIER, GenerateRequest, Output, Sampling
from tests.rigs.engines.vllm_core import BLOCK, CONTEXT, EOS, VOCABULARY, Core, tiny_model

pytestmark = pytest.mark.timeout(600)  # a core takes half a minute to be ready, and many times that on a busy machine

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_p": {"temperature": 1.2, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05, "top_k": 100, "top_p": 0.95},
    "penalties": {"temperature": 0.9, "presence_penalty": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "greedy with penalties": {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 1.0},
    "bias": {"temperature": 0.7, "logit_bias": {17: 6.0, 23: 5.0, 40: -50.0}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 30, "ignore_eos": False, "logit_bias": {EOS: 7.0}},
    "logprobs": {"temperature": 0.9, "top_p": 0.95, "top_logprobs": 4},
}
LENGTH = 70


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def core(model: Path) -> Iterator[Core]:
    made = Core(model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def small(model: Path) -> Iterator[Core]:
    """Room for a text to the context's end, and for a handful of the streams here, in steps that cut prompts."""
    made = Core(model, blocks=CONTEXT // BLOCK + 1, step_tokens=48)
    yield made
    made.close()


@pytest.fixture(scope="module")
def stock(model: Path) -> Iterator[Core]:
    made = Core(model, held=False)
    yield made
    made.close()


def prompt(length: int, number: int = 0) -> list[int]:
    return [(37 * number + 31 * place * place + 101 * place + 17) % 900 + 2 for place in range(length)]


def request(tokens: list[int], max_tokens: int = LENGTH, prompt_len: int = 0, **given: Any) -> GenerateRequest:
    stops = given.pop("stop_token_ids", [])
    sampling = Sampling(max_tokens, given.pop("seed", 5), **{"ignore_eos": True} | given)
    return GenerateRequest("r", tokens, prompt_len or len(tokens), sampling, stops)


def resumed(asked: GenerateRequest, emitted: list[int]) -> GenerateRequest:
    return msgspec.structs.replace(asked, tokens=[*asked.tokens, *emitted])


def of(told: list[Output]) -> list[int]:
    return [token for output in told for token in output.tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_stream_goes_on_as_the_unbroken_one(core: Core, kind: str) -> None:
    """At its first token, inside a block, at its border, and before the last: same tokens, same end, same logprobs."""
    asked = request(prompt(40, 3), **KINDS[kind])
    (whole,) = core.ask(asked)
    tokens = of(whole)
    assert len(tokens) > 30
    for at in (1, 7, BLOCK - 8, BLOCK + 3, len(tokens) - 1):
        if at >= len(tokens):
            continue
        (rest,) = core.ask(resumed(asked, tokens[:at]))
        assert of(rest) == tokens[at:], f"resumed after {at}"
        assert rest[-1].finish == whole[-1].finish
        if kind == "logprobs":
            for got, right in zip(rest, whole[at:], strict=True):
                assert got.logprobs is not None
                assert right.logprobs is not None
                assert [each for each, _ in got.logprobs[0].top] == [each for each, _ in right.logprobs[0].top]
                assert got.logprobs[0].logprob == pytest.approx(right.logprobs[0].logprob, abs=1e-4)


def test_all_kinds_together_cut_preempted_and_alone(core: Core, small: Core) -> None:
    """Beside all the others, prompts cut into chunks and streams preempted for want of blocks: what each draws alone,
    and what it draws resumed in that crowd."""
    asked = [request(prompt(60 + number, number), **given) for number, given in enumerate(KINDS.values())]
    alone = [core.tokens(each)[0] for each in asked]
    assert small.tokens(*asked) == alone
    assert small.preemptions > 0
    cuts = range(5, 5 + 3 * len(asked), 3)
    again = [resumed(each, tokens[:cut]) for each, tokens, cut in zip(asked, alone, cuts, strict=True)]
    assert small.tokens(*again) == [tokens[cut:] for tokens, cut in zip(alone, cuts, strict=True)]


def test_greedy_is_stock_vllms(stock: Core, core: Core) -> None:
    """Token for token, beside streams that are drawn, and so are stock's own penalties, bias and bans."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    kinds: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"logit_bias": {11: 3.0, 17: -4.0}},
        {"min_tokens": 20, "stop_token_ids": [3, 5, 7]},
    ]
    told = dict[str, list[int]]()
    for number, given in enumerate(kinds):
        params = SamplingParams(temperature=0.0, max_tokens=LENGTH, detokenize=False, **given)
        nothing = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"))
        stock.add(
            EngineCoreRequest(
                request_id=str(number),
                prompt_token_ids=prompt(50, number),
                sampling_params=params,
                arrival_time=float(number),
                **nothing,
            )
        )
    while stock.core.scheduler.has_requests():
        for each in stock.step():
            told.setdefault(each.request_id, []).extend(each.new_token_ids)
    ours = [request(prompt(50, number), temperature=0.0, **given) for number, given in enumerate(kinds)]
    drawn = [request(prompt(50, number), temperature=1.0) for number in range(5)]
    assert core.tokens(*ours, *drawn)[: len(ours)] == [told[str(number)] for number in range(len(kinds))]


def test_extremes_are_greedy(core: Core) -> None:
    """Of one token, or at a temperature near nothing, the likeliest is drawn, whatever the seed."""
    (right,) = core.tokens(request(prompt(33), temperature=0.0))
    for given in ({"top_k": 1}, {"temperature": 0.0005}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert core.tokens(request(prompt(33), seed=99, **given)) == [right]


def test_draws_follow_the_softmax(core: Core) -> None:
    """Over 2,000 seeds the first token is drawn as often as its logprob says: chi-square, of the tokens that are
    expected 5 times or more and all others as one, below 6 deviations over its mean."""
    (first,) = core.ask(request(prompt(20), 1, temperature=0.0, top_logprobs=VOCABULARY))
    assert first[0].logprobs is not None
    shares = torch.zeros(VOCABULARY)
    for token, logprob in first[0].logprobs[0].top:
        shares[token] = logprob
    shares = shares.exp()
    assert float(shares.sum()) == pytest.approx(1.0, abs=1e-3)
    count, seen = 2000, torch.zeros(VOCABULARY)
    for start in range(0, count, 16):
        for tokens in core.tokens(*(request(prompt(20), 1, seed=start + place) for place in range(16))):
            seen[tokens[0]] += 1
    expected = shares * seen.sum()
    often = expected >= 5
    seen = torch.cat([seen[often], seen[~often].sum().view(1)])
    expected = torch.cat([expected[often], expected[~often].sum().view(1)])
    square, degrees = float(((seen - expected) ** 2 / expected).sum()), len(expected) - 1
    assert degrees > 10
    assert square < degrees + 6 * (2 * degrees) ** 0.5


def test_logprobs_are_the_models_own(core: Core) -> None:
    """Before bias and penalties; the chosen token's, then as many as were asked for, best first."""
    given: dict[str, Any] = {"temperature": 0.0, "top_logprobs": 3}
    plain, biased, none = core.ask(
        request(prompt(30), 1, **given),
        request(prompt(30), 1, **given | {"logit_bias": {77: 100.0}, "top_logprobs": 2}),
        request(prompt(30), 1, temperature=0.0),
    )
    assert none[0].logprobs is None
    assert plain[0].logprobs is not None
    assert biased[0].logprobs is not None
    (best,), (forced,) = plain[0].logprobs, biased[0].logprobs
    assert biased[0].tokens == [77]
    assert forced.logprob < best.logprob
    assert forced.top == best.top[:2]
    assert best.top[0] == (plain[0].tokens[0], best.logprob)
    values = [value for _, value in best.top]
    assert values == sorted(values, reverse=True)


def test_ends(core: Core) -> None:
    """A stop token is the last, "length" at the context's end, and a stop is banned for as long as min_tokens says,
    counted from the prompt's end in a resumed stream too."""
    (whole,) = core.tokens(request(prompt(40), temperature=0.0))
    stop = whole[9]
    (told,) = core.ask(request(prompt(40), temperature=0.0, stop_token_ids=[stop]))
    assert (of(told), told[-1].finish) == (whole[: whole.index(stop) + 1], "stop")
    (told,) = core.ask(request(prompt(CONTEXT - 12), 1000))
    assert (len(of(told)), told[-1].finish) == (12, "length")
    eager = request(prompt(40), min_tokens=12, ignore_eos=False, logit_bias={EOS: 100.0})
    (told,) = core.ask(eager)
    assert (len(of(told)), of(told)[-1], told[-1].finish) == (13, EOS, "stop")
    assert core.tokens(resumed(eager, of(told)[:5])) == [of(told)[5:]]


def test_what_was_found_is_told_once(core: Core) -> None:
    """In a resumed stream's first output: whole blocks of its text; a canary's is computed anew."""
    asked = request(prompt(70, 8), 30)
    (whole,) = core.ask(asked)
    (rest,) = core.ask(resumed(asked, of(whole)[:20]))
    assert [output.cached for output in rest] == [64, *[0] * (len(rest) - 1)]
    canary = msgspec.structs.replace(asked, tier=CANARY_TIER)
    (told,) = core.ask(canary)
    assert (told[0].cached, of(told)) == (0, of(whole))
