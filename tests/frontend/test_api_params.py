"""What an engine is asked for: request, then card, then OpenAI's defaults; and it fits the context."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.requests import Sampling
from holdfast.frontend.api.errors import ApiError
from holdfast.frontend.api.params import build_sampling, check_defaults, check_token_ids
from holdfast.frontend.api.request import ParsedRequest


def chat(**fields: Any) -> ParsedRequest:
    return ParsedRequest(kind="chat", model="m", messages=[{"role": "user", "content": "x"}], **fields)


def refusal(parsed: ParsedRequest, prompt_tokens: int = 10, context: int = 100) -> ApiError:
    with pytest.raises(ApiError) as caught:
        build_sampling(parsed, {}, 1, prompt_tokens, context)
    assert caught.value.status == 400
    return caught.value


def test_defaults_without_a_card() -> None:
    """A silent request gets OpenAI's values and the rest of the context."""
    assert build_sampling(chat(), {}, 7, 10, 100) == Sampling(max_tokens=90, seed=7)


def test_the_card_speaks_where_the_request_is_silent() -> None:
    """Zero is a value: a request's 0 wins over the card."""
    card = check_defaults({"temperature": 0.6, "top_p": 0.9, "top_k": -1, "max_tokens": 50, "pad_token_id": 3})
    assert card == {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "max_tokens": 50}
    silent = build_sampling(chat(), card, 7, 10, 100)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.max_tokens) == (0.6, 0.9, 0, 50)
    assert build_sampling(chat(), card, 7, 60, 100).max_tokens == 40
    said = build_sampling(chat(temperature=0.0, top_p=1.0, max_tokens=90), card, 7, 10, 100)
    assert (said.temperature, said.top_p, said.max_tokens) == (0.0, 1.0, 90)


def test_a_bad_card_is_named() -> None:
    """A card's mistake is found when it is admitted, not by each client."""
    with pytest.raises(ValueError, match="'temperature'"):
        check_defaults({"temperature": "warm"})


def test_the_context_is_kept() -> None:
    """Prompt and answer must fit; the refusal names what would have to change, as the client called it."""
    error = refusal(chat(max_tokens=91))
    assert (error.param, error.code) == ("max_tokens", "context_length_exceeded")
    assert refusal(chat(max_tokens=91, max_tokens_field="max_completion_tokens")).param == "max_completion_tokens"
    for prompt_tokens in (100, 101):
        error = refusal(chat(), prompt_tokens)
        assert (error.param, error.code) == ("messages", "context_length_exceeded")
    assert refusal(chat(), 0).param == "messages"
    assert refusal(chat(min_tokens=91)).param == "min_tokens"
    assert refusal(ParsedRequest(kind="completion", model="m", prompts=["x"]), 100).param == "prompt"


def test_a_minimum_that_cannot_be_says_what_stands_against_it() -> None:
    """The context, or that a completion is short unless `max_tokens` says otherwise: then giving it is the mend."""
    assert "more than the 90 tokens that 'messages' leaves" in refusal(chat(min_tokens=91)).message
    completion = ParsedRequest(kind="completion", model="m", prompts=["x"], min_tokens=20)
    message = refusal(completion).message
    assert "more than the 16 tokens an answer has where 'max_tokens' is not given; give it" in message
    assert build_sampling(chat(min_tokens=90), {}, 1, 10, 100).min_tokens == 90


def test_an_overflow_begins_with_the_words_clients_look_for() -> None:
    """LiteLLM and others tell a prompt that is too long from other mistakes by the message's beginning."""
    for error in (refusal(chat(max_tokens=91)), refusal(chat(), 100)):
        assert error.message.startswith("This model's maximum context length is 100 tokens. However, ")


def test_a_completion_that_says_no_length_gets_sixteen_tokens() -> None:
    """As with OpenAI and vLLM, or what is left of the context, or the model's smaller default; a chat has the rest."""
    silent = ParsedRequest(kind="completion", model="m", prompts=["x"])
    assert build_sampling(silent, {}, 7, 10, 100).max_tokens == 16
    assert build_sampling(silent, {}, 7, 95, 100).max_tokens == 5
    assert build_sampling(silent, {"max_tokens": 40}, 7, 10, 100).max_tokens == 16
    assert build_sampling(silent, {"max_tokens": 4}, 7, 10, 100).max_tokens == 4
    assert build_sampling(chat(), {}, 7, 10, 100).max_tokens == 90


def test_ids_outside_the_vocabulary_are_refused() -> None:
    """A prompt, a bias or a stop id the model does not have is named before an engine sees it."""
    fine = ParsedRequest(kind="completion", model="m", prompts=[[1, 9], "x"], logit_bias={9: 1.0}, stop_token_ids=(9,))
    check_token_ids(fine, 10)
    for fields, param in (
        ({"prompts": [[1, 10]]}, "prompt"),
        ({"prompts": [[1], [10]]}, "prompt[1]"),
        ({"logit_bias": {10: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (10,)}, "stop_token_ids"),
    ):
        with pytest.raises(ApiError) as caught:
            check_token_ids(ParsedRequest(kind="completion", model="m", **fields), 10)
        assert caught.value.param == param
