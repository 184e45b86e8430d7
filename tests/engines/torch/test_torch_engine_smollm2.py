"""The default model says through our engine what it says through transformers, on the same weights."""

from __future__ import annotations

import asyncio

import pytest
import torch
from default_model import smollm2_path
from engine_rig import Vault
from torch_rig import request, rig
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from holdfast.engines.torch.files.checkpoint import Checkpoint, tensor_shapes
from holdfast.engines.torch.files.gguf_model import open_gguf

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


def theirs(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """transformers' model with the checkpoint's own dequantised tensors, fp32."""
    config = checkpoint.config
    assert config.rope_scaling is None
    shape = LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        max_position_embeddings=config.context_tokens_max,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied,
        eos_token_id=list(config.eos_token_ids),
        bos_token_id=config.bos_token_id,
        pad_token_id=config.eos_token_ids[0],
    )
    with no_init_weights():  # random numbers for 135 million weights that are replaced at once take seconds
        made = LlamaForCausalLM(shape)
    state = {name: checkpoint.read(name).float() for name in tensor_shapes(config)}
    missing, unexpected = made.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    made.tie_weights()
    return made.eval()


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
    model = theirs(checkpoint)
    answers = []
    for tokens in asked:
        whole = model.generate(
            torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), max_new_tokens=TOKENS, do_sample=False
        )
        answers.append(whole[0, len(tokens) :].tolist())
    return answers


@pytest.mark.long
@pytest.mark.timeout(180)  # fetching, once, apart: about 30 s of two cores
async def test_greedy_text_is_that_of_transformers(vault: Vault, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ten chat prompts, greedy, all at once: the first tokens of each answer, or all of them, are transformers'."""
    path = smollm2_path()
    checkpoint = open_gguf(path, path.parent, lambda *_: None)
    asked = prompts(checkpoint, str(tmp_path_factory.mktemp("tokenizer")))
    expected = await asyncio.to_thread(generated, checkpoint, asked)
    async with rig(vault, checkpoint=checkpoint, exact=False, threads=0, kv_gib=0.05) as r:
        await r.run({n: request(tokens, TOKENS, ignore_eos=False) for n, tokens in enumerate(asked)})
        assert [r.tokens(number) for number in range(len(asked))] == expected
