"""Known questions as an operator gives them: what is read, and what is said of a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import UserError
from holdfast.engines.sim.vocabulary import tokenizer_json
from holdfast.roles.small_files import canary_text, card_canaries

GOOD = {"prompt": "2 + 2 = ", "expected_tokens": [7], "logprob_range": [-2, 0]}


def test_a_file_and_its_text_mean_the_same(tmp_path: Path) -> None:
    """A launch carries the text, so that a file may go; a card carries tokens."""
    file = tmp_path / "canaries.json"
    file.write_text(json.dumps([GOOD, {"prompt_tokens": [5, 6], "expected_tokens": [7]}]))
    text = canary_text(str(file))
    assert text == canary_text(text) == canary_text(f" {text}")
    first, second = card_canaries(text, tokenizer_json(), 1000)
    assert (first.expected_tokens, first.logprob_range) == ((7,), (-2.0, 0.0))
    assert len(first.prompt) > 1
    assert (second.prompt, second.logprob_range) == ((5, 6), None)
    assert card_canaries("", tokenizer_json(), 1000) == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([GOOD | {"prompt": ""}], "[0].prompt: give prompt (text) or prompt_tokens (ids)"),
        ([GOOD, {"prompt": "a"}], "[1].expected_tokens: must be 1 to 32 token ids, got 0"),
        ([GOOD | {"logprob_range": [0, 1]}], "[0].logprob_range: must be rising and 0 or less"),
        ([GOOD | {"expected_tokens": ["x"]}], "Expected `int`, got `str` - at `$[0].expected_tokens[0]`"),
        ([GOOD | {"max_tokens": 1}], "unknown field `max_tokens`"),
        ([GOOD] * 17, "must have 16 questions or fewer, got 17"),
        ([GOOD | {"expected_tokens": [10**8]}], "[0].expected_tokens: there is no token 100000000; the model has"),
        ([{"prompt_tokens": [1] * 600, "expected_tokens": [1]}], "more than the model's context of 512"),
        ({"prompt": "a"}, "[{"),
    ],
)
def test_a_mistake_is_told_with_its_place(given: Any, said: str, tmp_path: Path) -> None:
    """By the option, the question's number and its field."""
    file = tmp_path / "canaries.json"
    file.write_text(json.dumps(given))
    with pytest.raises(UserError) as told:
        card_canaries(str(file), tokenizer_json(), 512)
    assert "--canary-prompts" in str(told.value)
    assert said in str(told.value)


def test_a_file_that_is_not_there_is_named() -> None:
    """With the reason."""
    with pytest.raises(UserError, match=r"--canary-prompts /nowhere/x.json cannot be read: No such file"):
        canary_text("/nowhere/x.json")
