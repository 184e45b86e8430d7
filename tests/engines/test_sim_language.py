"""The sim engine's language: exact under replay, the same on both paths, always UTF-8; its tokenizer and
chat template."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from holdfast.core.requests import Sampling, TokenLogprobs
from holdfast.engines.sim.language import CANDIDATES, Sequence
from holdfast.engines.sim.vocabulary import (
    CHARACTERS,
    EOS_TOKEN_ID,
    CharacterNode,
    LanguageVariant,
    chat_template,
    load,
    tokenizer_json,
)

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_sim_tokenizer.py"
VOCABULARY = load()
PROMPT = [1, 300, 1200, 77, 2, 900, 5000]

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.7, "ignore_eos": True},
    "nucleus": {"temperature": 0.8, "top_p": 0.9, "top_k": 12, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "logprobs": {"top_logprobs": 5},
    "bias": {"logit_bias": {600: 31.0, 700: -100.0}, "min_tokens": 20},
}


def sampling_of(**kwargs: Any) -> Sampling:
    return Sampling(**{"max_tokens": 100, "seed": 11, **kwargs})


def generate(
    tokens: list[int], sampling: Sampling, count: int, prompt_len: int, stops: list[int] | None = None
) -> tuple[list[int], list[TokenLogprobs | None]]:
    sequence = Sequence(VOCABULARY, tokens, prompt_len, sampling, stops)
    made, logprobs = [], []
    for _ in range(count):
        made.append(sequence.advance())
        logprobs.append(sequence.logprobs)
    return made, logprobs


@pytest.mark.parametrize("name", SAMPLINGS)
def test_resume_at_every_position_is_exact(name: str) -> None:
    """Prompt + emitted tokens, replayed at any position, go on exactly as the unbroken run, logprobs included."""
    sampling = sampling_of(**SAMPLINGS[name])
    whole, logprobs = generate(PROMPT, sampling, 120, len(PROMPT))
    for position in range(120):
        count = min(12, 120 - position)
        made, again = generate(PROMPT + whole[:position], sampling, count, len(PROMPT))
        assert made == whole[position : position + count]
        assert again == logprobs[position : position + count]


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCABULARY.size - 1), min_size=1, max_size=30),
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 1e-6, 1e-4, 0.3, 1.0, 2.0]) | st.floats(0.0, 5.0),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 30),
)
def test_fast_path_equals_general_path(
    prompt: list[int], seed: int, temperature: float, ignore_eos: bool, min_tokens: int
) -> None:
    """Asking for nothing, or for what changes nothing, gives the same tokens, whichever path makes them."""
    plain = Sampling(60, seed, temperature, ignore_eos=ignore_eos, min_tokens=min_tokens)
    expected, _ = generate(prompt, plain, 60, len(prompt))
    assert Sequence(VOCABULARY, prompt, len(prompt), plain)._plain
    for change in ({"top_logprobs": 0}, {"top_k": CANDIDATES + 1}, {"logit_bias": {5: -1e6}}):
        general = msgspec.structs.replace(plain, **change)
        assert not Sequence(VOCABULARY, prompt, len(prompt), general)._plain
        assert generate(prompt, general, 60, len(prompt))[0] == expected


def test_text_is_always_utf8_and_characters_are_split() -> None:
    """Streams hold CJK and emoji, each over 2 to 4 tokens, and never an invalid byte."""
    tokenizer = Tokenizer.from_str(tokenizer_json().decode())
    text = ""
    for seed in range(6):
        made, _ = generate(PROMPT, sampling_of(seed=seed, ignore_eos=True), 700, len(PROMPT))
        sequence = Sequence(VOCABULARY, PROMPT + made, len(PROMPT), sampling_of(seed=seed, ignore_eos=True))
        while sequence._node is not None:
            made.append(sequence.advance())
        text += tokenizer.decode(made, skip_special_tokens=False)
    assert "\ufffd" not in text
    assert any("\u4e00" <= character <= "\u9fff" for character in text)
    assert any(ord(character) > 0xFFFF for character in text)
    for character in CHARACTERS:
        assert 2 <= len(tokenizer.encode(character).ids) == len(character.encode()) <= 4


def test_trie_never_offers_more_than_there_are_logits() -> None:
    """Every unfinished character has at most as many continuations as candidates."""

    def widest(node: CharacterNode) -> int:
        return max([len(node.choices), *(widest(child) for child in node.children.values() if child)])

    assert widest(VOCABULARY.root) <= CANDIDATES


def test_candidates_are_distinct_and_disjoint() -> None:
    """Words, marks and first bytes share no id, so a candidate list holds 20 different ones."""
    groups = [set(VOCABULARY.words), set(VOCABULARY.punctuation), set(VOCABULARY.root.choices), {EOS_TOKEN_ID}]
    assert len(set().union(*groups)) == sum(map(len, groups))
    _, logprobs = generate(PROMPT, sampling_of(top_logprobs=20, ignore_eos=True), 400, len(PROMPT))
    lists = [each.top for each in logprobs if each is not None]
    assert all(len({token for token, _ in top}) == len(top) for top in lists)
    assert sum(len(top) == CANDIDATES for top in lists) > 300
    assert all(math.isclose(sum(math.exp(value) for _, value in top), 1.0) for top in lists)


def test_end_of_turn_comes_about_once_in_200() -> None:
    """Ends come at their rate, and not at all under ignore_eos or before min_tokens."""
    count = 20_000
    for temperature in (0.0, 1.0):
        made, _ = generate(PROMPT, sampling_of(temperature=temperature), count, len(PROMPT))
        assert 60 <= made.count(EOS_TOKEN_ID) <= 150
    assert EOS_TOKEN_ID not in generate(PROMPT, sampling_of(ignore_eos=True), count, len(PROMPT))[0]
    assert EOS_TOKEN_ID not in generate(PROMPT, sampling_of(min_tokens=3000), 3000, len(PROMPT))[0]


def test_seed_and_every_token_move_draws() -> None:
    """Seeds give different texts at a temperature and the same text without one; so does another first token."""
    drawn = {tuple(generate(PROMPT, sampling_of(seed=seed), 30, len(PROMPT))[0]) for seed in range(8)}
    greedy = {tuple(generate(PROMPT, sampling_of(seed=seed, temperature=0.0), 30, 7)[0]) for seed in range(8)}
    assert len(drawn) == 8
    assert len(greedy) == 1
    assert generate([0, *PROMPT[1:]], sampling_of(seed=0), 30, 7)[0] != generate(PROMPT, sampling_of(seed=0), 30, 7)[0]


def test_top_k_one_and_tiny_top_p_are_greedy() -> None:
    """Cutting all but the likeliest leaves the likeliest."""
    greedy, _ = generate(PROMPT, sampling_of(temperature=0.0), 200, 7)
    for change in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert generate(PROMPT, sampling_of(**change), 200, 7)[0] == greedy


def test_bias_can_force_and_forbid() -> None:
    """+100 on a token outside the candidates gives that token only; -100 on the likeliest takes it away."""
    made, _ = generate(PROMPT, sampling_of(logit_bias={4000: 100.0}), 50, 7)
    assert set(made) == {4000}
    likeliest = generate(PROMPT, sampling_of(temperature=0.0), 1, 7)[0][0]
    assert generate(PROMPT, sampling_of(logit_bias={likeliest: -100.0}), 1, 7)[0] != [likeliest]
    barred, _ = generate(PROMPT, sampling_of(logit_bias={EOS_TOKEN_ID: 100.0}, min_tokens=10), 11, 7)
    assert barred.index(EOS_TOKEN_ID) == 10


def test_stop_tokens_are_barred_before_min_tokens() -> None:
    """A stop token id is not drawn while fewer than min_tokens are made."""
    free, _ = generate(PROMPT, sampling_of(temperature=0.0), 5, 7)
    held, _ = generate(PROMPT, sampling_of(temperature=0.0, min_tokens=5), 5, 7, stops=free)
    assert not set(free) & set(held)


def test_penalties_forbid_what_was_said() -> None:
    """A heavy presence penalty makes every word new; a repetition penalty counts the prompt's words too."""
    forced = dict.fromkeys(VOCABULARY.words[:30], 60.0)
    made, _ = generate(PROMPT, sampling_of(logit_bias=forced, presence_penalty=100.0, temperature=0.0), 30, 7)
    assert len(set(made)) == 30
    first = generate(PROMPT, sampling_of(logit_bias=forced, temperature=0.0), 1, 7)[0][0]
    prompt = [first, *PROMPT[1:]]
    assert first not in generate(prompt, sampling_of(logit_bias=forced, repetition_penalty=5.0), 1, 7)[0]


def test_tokenizer_is_a_small_byte_level_bpe() -> None:
    """At least 4,096 tokens in at most 1 MB, ChatML's special tokens, any text there and back."""
    data = tokenizer_json()
    tokenizer = Tokenizer.from_str(data.decode())
    assert len(data) <= 1_000_000
    assert tokenizer.get_vocab_size() >= 4096
    assert json.loads(data)["pre_tokenizer"]["add_prefix_space"] is False
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>").ids == [0, 1, EOS_TOKEN_ID]
    for text in ("Hello, world!\n", "  two  spaces", "漢字 and 😀 mixed é", "\x00\t\r\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_template_is_chatml() -> None:
    """Turns are closed, parts are joined, and the generation prompt comes only when asked for."""
    template = ImmutableSandboxedEnvironment().from_string(chat_template())
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "yo"}]}]
    turns = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>user\nyo<|im_end|>\n"
    assert template.render(messages=messages) == turns
    assert template.render(messages=messages, add_generation_prompt=True) == turns + "<|im_start|>assistant\n"


@pytest.mark.long
@pytest.mark.processes
def test_training_script_runs_anywhere(tmp_path: Path) -> None:
    """The script makes a working tokenizer from this Python's docstrings alone."""
    subprocess.run([sys.executable, str(SCRIPT), "--out", str(tmp_path)], check=True, timeout=60)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() >= 4096
    assert len(tokenizer.encode("世").ids) == 3


@pytest.mark.parametrize(
    "tongue", [LanguageVariant(revision=2), LanguageVariant(quantization="int8"), LanguageVariant(2, "int8")]
)
def test_another_tongue_says_other_words(tongue: LanguageVariant) -> None:
    """Weights of another revision, or stored otherwise, go on otherwise from the same text, and always alike."""

    def said(one: LanguageVariant) -> list[int]:
        sequence = Sequence(load(one), PROMPT, len(PROMPT), sampling_of(temperature=0.0, ignore_eos=True))
        return [sequence.advance() for _ in range(20)]

    assert said(tongue) == said(tongue)
    assert said(tongue)[0] != said(LanguageVariant())[0]
    assert tongue.weights != LanguageVariant().weights


def test_another_tokenizer_has_other_ids_for_the_same_words() -> None:
    """It reads and writes every text, and what one wrote the other would read as something else."""
    first, second = (Tokenizer.from_str(tokenizer_json(which).decode()) for which in (1, 2))
    text = "Tell me a story, and then another one."
    assert second.decode(second.encode(text).ids) == first.decode(first.encode(text).ids) == text
    assert second.decode(first.encode(text).ids) != text
    assert load(LanguageVariant(tokenizer=2)).words[0] == VOCABULARY.words[1]
    assert load(LanguageVariant(tokenizer=2)).size == VOCABULARY.size
