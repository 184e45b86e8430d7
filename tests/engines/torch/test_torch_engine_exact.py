"""Under `exact` a stream's tokens are its own: alone, among others, chunked, found, preempted, resumed anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from holdfast.core.requests import GenerateRequest, TokenLogprobs
from tests.rigs.engines.any_engine import Said, Vault
from tests.rigs.engines.torch_engine import BLOCK, BLOCK_GIB, Rig, prompt, request, rig

TOKENS = 18  # over the end of a block, wherever in one a prompt ends
# Every way to draw, each with a prompt of its own length: none, one and several whole blocks.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (5, {}),
    "temperature": (16, {"temperature": 0.8}),
    "top-p and top-k": (37, {"temperature": 1.0, "top_p": 0.9, "top_k": 40}),
    "min-p": (64, {"temperature": 1.2, "min_p": 0.02}),
    "penalties": (
        50,
        {"temperature": 0.7, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    ),
    "logprobs": (33, {"temperature": 0.8, "top_logprobs": 3}),
    "greedy with penalties and bias": (
        90,
        {"frequency_penalty": 0.5, "logit_bias": {5: 2.0, 77: -3.0}, "top_logprobs": 0},
    ),
    "short and long prompts": (130, {"temperature": 0.8, "seed": 2**62}),
}
ASKED = {
    number: request(prompt(length, number), TOKENS, **{"seed": 100 + number, **given})
    for number, (length, given) in enumerate(KINDS.values())
}
Answers = dict[int, tuple[list[int], list[TokenLogprobs]]]


def answer(said: Said, number: int) -> tuple[list[int], list[TokenLogprobs]]:
    """Tokens and their logprobs, bit for bit."""
    assert [output.finish for output in said.of(number)][-1] == "length"
    return said.tokens(number), [each for output in said.of(number) for each in output.logprobs or []]


@pytest.fixture(scope="module")
def unbroken() -> Answers:
    """Each stream alone in its engine's pool, its prompt in one piece."""

    async def run() -> Answers:
        found: Answers = {}
        with Vault() as vault:
            async with rig(vault, step_tokens_max=512) as r:
                for number, asked in ASKED.items():
                    await r.run({number: asked})
                    found[number] = answer(r, number)
                assert r.blocks.found_tokens_total == 0, "each prompt is a new one"
        return found

    answers = asyncio.run(run())
    assert all(len(tokens) == TOKENS for tokens, _ in answers.values())
    assert len({token for tokens, _ in answers.values() for token in tokens}) > 50, "these answers say something"
    return answers


def check(said: Said, unbroken: Answers) -> None:
    for number, name in enumerate(KINDS):
        assert answer(said, number) == unbroken[number], name


async def test_in_a_batch_with_others_coming_and_going(vault: Vault, unbroken: Answers) -> None:
    """Eight together, while others join, end and are cancelled, say what each says alone."""
    async with rig(vault) as r:
        guests = iter(range(100, 1000))

        def come_and_go(outputs: list[Any]) -> None:
            number = next(guests)
            if number % 3 == 0:
                r.engine.submit(number, request(prompt(3 + number % 40, number), 2 + number % 9, temperature=0.9))
            if number % 4 == 0:
                r.engine.cancel(number - 5)

        r.on_batch = come_and_go
        await r.run(ASKED)
        check(r, unbroken)
        assert max(map(len, r.batches)) > len(ASKED)


@pytest.mark.parametrize("step_tokens_max", [5, 13, 40])
async def test_with_prompts_in_chunks(vault: Vault, unbroken: Answers, step_tokens_max: int) -> None:
    """However a prompt is cut into steps, beside decodes of others, its stream says the same."""
    async with rig(vault, concurrency=4, step_tokens_max=step_tokens_max) as r:
        await r.run(ASKED)
        check(r, unbroken)


async def test_after_a_prefix_hit(vault: Vault, unbroken: Answers) -> None:
    """A prompt whose blocks are there computes its last part only, and says the same."""
    async with rig(vault) as r:
        await r.run(ASKED)
        before = r.blocks.found_tokens_total
        again = {number + 100: asked for number, asked in ASKED.items()}
        await r.run(again)
        whole = [(len(asked.tokens) - 1) // BLOCK * BLOCK for asked in ASKED.values()]
        assert r.blocks.found_tokens_total - before == sum(whole)
        for number in ASKED:
            assert answer(r, number + 100) == unbroken[number]


async def test_after_preemption(vault: Vault, unbroken: Answers) -> None:
    """With a pool of few blocks the youngest give way and come back; everyone says the same."""
    async with rig(vault, kv_gib=16 * BLOCK_GIB) as r:
        await r.run(ASKED)
        check(r, unbroken)
        assert r.scheduler.preemptions > 0
        assert r.blocks.used == 0


def resumed(number: int, made: list[int]) -> GenerateRequest:
    asked = ASKED[number]
    return GenerateRequest("r", asked.tokens + made, asked.prompt_len, asked.sampling)


def cuts(number: int, unbroken: Answers) -> dict[int, GenerateRequest]:
    tokens = unbroken[number][0]
    return {1000 * (number + 1) + cut: resumed(number, tokens[:cut]) for cut in range(TOKENS + 1)}


def check_cuts(r: Rig, streams: Iterable[int], unbroken: Answers) -> None:
    for stream in streams:
        number, cut = stream // 1000 - 1, stream % 1000
        tokens, logprobs = unbroken[number]
        assert answer(r, stream) == (tokens[cut:], logprobs[cut:]), (list(KINDS)[number], cut)


async def test_resumed_at_every_cut(vault: Vault, unbroken: Answers) -> None:
    """Prompt and the first tokens of an answer give the rest of it, at every cut, with less than a block
    computed again where its blocks are in the pool."""
    async with rig(vault) as r:
        for number in ASKED:
            first, *others = cuts(number, unbroken).items()
            await r.run(dict([first]))
            await r.run(dict(others))
            check_cuts(r, cuts(number, unbroken), unbroken)
        assert r.blocks.resumes.resumed_total == len(ASKED) * (TOKENS - 1)
        assert r.engine.resumes.recomputed_tokens_max <= BLOCK


async def test_resumed_where_nothing_is_found(vault: Vault, unbroken: Answers) -> None:
    """The same in a pool so small that what others leave is soon gone: computed again, it is what it was."""
    async with rig(vault, kv_gib=12 * BLOCK_GIB, concurrency=3, step_tokens_max=29) as r:
        asked = {
            stream: request for number in ASKED for stream, request in list(cuts(number, unbroken).items())[3:18:7]
        }
        await r.run(dict(sorted(asked.items(), key=lambda item: item[0] % 1000)))
        check_cuts(r, asked, unbroken)
        assert r.blocks.resumes.recomputed_tokens_max > BLOCK


async def test_fast_loses_and_repeats_nothing(vault: Vault) -> None:
    """Without `exact`, batched, chunked, preempted or resumed, each stream makes as many tokens as it should, one after
    the other; a resumed one goes on from what it was given."""
    async with rig(vault, exact=False, kv_gib=16 * BLOCK_GIB, concurrency=6, step_tokens_max=17) as r:
        assert not r.engine.capabilities.deterministic
        await r.run(ASKED)
        assert r.scheduler.preemptions > 0
        made = {number: answer(r, number)[0] for number in ASKED}
        assert all(len(tokens) == TOKENS for tokens in made.values())
        cut = {
            100 + 30 * number + at: resumed(number, tokens[:at])
            for number, tokens in made.items()
            for at in (1, 9, TOKENS - 1)
        }
        await r.run(cut)
        for stream, asked in cut.items():
            assert len(asked.tokens) + len(r.tokens(stream)) == asked.prompt_len + TOKENS
            assert [output.finish for output in r.of(stream)].count("length") == 1
        for batch in r.batches:
            assert len({output.stream for output in batch}) == len(batch), "one output of a stream in a step"
