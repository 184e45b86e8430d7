"""The default model says through our engine what it says through transformers, on the same weights."""

from __future__ import annotations

import asyncio

import pytest
from transformers import PreTrainedTokenizerFast

from holdfast.control.questions import questions_of
from holdfast.engines.torch.files.checkpoint import Checkpoint
from holdfast.engines.torch.files.resolve import resolve
from holdfast.health.expectations import BANDS, PINNED_ENOUGH, TOP, answer_of, is_fit
from tests.rigs.engines.any_engine import Vault
from tests.rigs.engines.default_model import cache_dir, smollm2_path
from tests.rigs.engines.torch_engine import request, rig
from tests.rigs.engines.transformers_model import TheirModel

TOKENS = 24
QUESTIONS = [
    "What is gravity?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "How do I boil an egg?",
    "Who wrote Hamlet?",
    "Translate 'good morning' into French.",
    "Why is the sky blue? Answer for a child of five, in two short sentences, without difficult words.",
    "List the first five prime numbers.",
    "What is 12 plus 30?",
    "Tell me a joke about a cat.",
]


def prompts(checkpoint: Checkpoint, folder: str) -> list[list[int]]:
    path = f"{folder}/tokenizer.json"
    with open(path, "wb") as file:
        file.write(checkpoint.tokenizer_json)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=path)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            chat_template=checkpoint.chat_template,
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in QUESTIONS
    ]


def generated(checkpoint: Checkpoint, asked: list[list[int]]) -> list[list[int]]:
    """transformers' answers over the same weights, up to the end of the turn."""
    model, ends = TheirModel(checkpoint, "default", lambda text: None), checkpoint.config.eos_token_ids
    answers = [model.decode([tokens], TOKENS).said[0] for tokens in asked]
    return [said[: next((at for at, token in enumerate(said, 1) if token in ends), TOKENS)] for said in answers]


@pytest.mark.long
@pytest.mark.timeout(300)  # fetching, once, apart: about 30 s of two cores
async def test_greedy_text_is_that_of_transformers(vault: Vault, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ten chat prompts, greedy, all at once: the first tokens of each answer, or all of them, are transformers'."""
    smollm2_path()
    checkpoint = resolve("default", cache_dir(), lambda *_: None)
    asked = prompts(checkpoint, str(tmp_path_factory.mktemp("tokenizer")))
    expected = await asyncio.to_thread(generated, checkpoint, asked)
    async with rig(vault, checkpoint=checkpoint, exact=False, threads=0, kv_gib=0.05) as r:
        await r.run({n: request(tokens, TOKENS, ignore_eos=False) for n, tokens in enumerate(asked)})
        assert [r.tokens(number) for number in range(len(asked))] == expected


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_it_is_sure_of_enough_known_questions(vault: Vault) -> None:
    """Of those that control makes up for any model, as many as it keeps have the margin at every place."""
    smollm2_path()
    checkpoint = resolve("default", cache_dir(), lambda *_: None)
    questions = questions_of("default", checkpoint.config.vocabulary)
    async with rig(vault, checkpoint=checkpoint, exact=False, threads=0, kv_gib=0.05) as r:
        await r.run({n: request(list(q.prompt), q.tokens, top_logprobs=TOP) for n, q in enumerate(questions)})
        answers = [
            answer_of(r.tokens(n), [each for output in r.of(n) for each in output.logprobs or []])
            for n in range(len(questions))
        ]
    assert sum(is_fit(answer, BANDS["float32"]) for answer in answers) >= PINNED_ENOUGH
