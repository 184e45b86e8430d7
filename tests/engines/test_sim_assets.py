"""The sim engine's packaged tokenizer and chat template."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from holdfast.engines.sim import EOS_TOKEN_ID, chat_template, tokenizer_json

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_sim_tokenizer.py"


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


@pytest.mark.processes
def test_training_script_runs_anywhere(tmp_path: Path) -> None:
    """The script makes a working tokenizer from this Python's docstrings alone."""
    subprocess.run([sys.executable, str(SCRIPT), "--out", str(tmp_path)], check=True, timeout=60)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() >= 4096
    assert len(tokenizer.encode("世").ids) == 3
