"""What a model's own files say of how it is drawn from and where its texts end reaches its card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.checkpoint import FileCheckpoint
from holdfast.engines.torch.files.config import check_context, from_hugging_face, with_end
from holdfast.engines.torch.files.generation import generation_defaults, token_id, token_text
from holdfast.engines.torch.files.safetensors_files import look_at_directory
from small_model import LLAMA, weights

MODEL = LLAMA | {"eos_token_id": 7}
TOKENIZER = {"added_tokens": [{"id": 9, "content": "<|end|>"}], "model": {"vocab": {"a": 0, "</s>": 2, "<s>": 1}}}
ADVICE = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}


def look_at(path: Path, **files: Any) -> FileCheckpoint:
    """A model's directory with these files, names with `__` for the dot."""
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(weights(MODEL))
    for name, content in {"config__json": MODEL, "tokenizer__json": TOKENIZER, **files}.items():
        (path / name.replace("__", ".")).write_text(json.dumps(content))
    return look_at_directory(path)


def test_the_makers_advice_becomes_the_cards_defaults(tmp_path: Path) -> None:
    """The fields that vLLM takes of generation_config.json, under a request's names; without advice there are none."""
    assert look_at(tmp_path).generation_defaults == {}
    more = {"max_new_tokens": 512, "min_p": 0.1, "do_sample": True, "pad_token_id": 3}
    advised = look_at(tmp_path, generation_config__json=ADVICE | more)
    assert advised.generation_defaults == ADVICE | {"max_tokens": 512, "min_p": 0.1}


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "hot"), ("temperature", 3.0), ("top_p", 0), ("top_k", 1.5), ("top_k", True), ("min_p", -1)],
)
def test_advice_that_cannot_be_followed_is_named_with_its_file(field: str, value: Any) -> None:
    """No client is to wonder which of two hundred answers followed it."""
    with pytest.raises(UserError, match=rf"generation_config.json says {field} = "):
        generation_defaults({field: value}, Path("/m/generation_config.json"))


def test_the_tokenizers_end_ends_a_text_too(tmp_path: Path) -> None:
    """It comes first, then those of generation_config.json and config.json; however its file names it."""
    advice = {"eos_token_id": [5, 7]}
    for named in ("<|end|>", {"content": "<|end|>", "special": True}):
        found = look_at(tmp_path, tokenizer_config__json={"eos_token": named}, generation_config__json=advice)
        assert found.config.eos_token_ids == (9, 5, 7)
    old = look_at(tmp_path / "old", special_tokens_map__json={"eos_token": "</s>", "bos_token": "<s>"})
    assert (old.config.eos_token_ids, old.bos_token) == ((2, 7), "<s>")


def test_an_end_that_the_model_has_no_row_for_is_left_out() -> None:
    """A tokenizer may have more tokens than the model it came with."""
    config = from_hugging_face(MODEL)
    assert with_end(config, 96) == with_end(config, None) == config
    assert with_end(config, 95).eos_token_ids == (95, 7)


def test_tokens_are_found_by_their_text() -> None:
    """Among the added ones, in a vocabulary by name, or in a unigram's list."""
    assert [token_id(TOKENIZER, text) for text in ("<|end|>", "</s>", "<none>", "")] == [9, 2, None, None]
    assert token_id({"model": {"vocab": [["<unk>", 0.0], ["</s>", 0.0]]}}, "</s>") == 1
    assert [token_text(said) for said in ("x", {"content": "x"}, None, 3)] == ["x", "x", "", ""]


def test_a_context_beyond_the_model_is_refused() -> None:
    """And one within it is not, nor none at all."""
    config = from_hugging_face(MODEL)
    for asked in (0, 100, 256):
        check_context(config, asked)
    with pytest.raises(UserError, match=r"--context 257 is beyond the 256 tokens"):
        check_context(config, 257)
