"""Request bodies: what is read, what is refused, and that a refusal names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.core.errors import Code
from holdfast.core.requests import SEED_MAX
from holdfast.frontend.api.errors import ApiError, model_not_found, of_failure
from holdfast.frontend.api.fields import HARMLESS, REFUSED
from holdfast.frontend.api.parse import MESSAGES_AND_PARTS_MAX, parse_chat, parse_completion
from holdfast.frontend.api.request import ParsedRequest, Usage

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ParsedRequest:
    return parse_chat(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def completion(**fields: Any) -> ParsedRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "hello", **fields}).encode())


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert caught.value.status == 400
    return caught.value


def chat_refused(**fields: Any) -> ApiError:
    return refused(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def completion_refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert caught.value.status == 400
    return caught.value


def test_silence_is_none() -> None:
    """What the client did not say, or said as null, stays open for the model's defaults."""
    names = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "logit_bias", "stop", "n"]
    for parsed in (chat(), chat(**dict.fromkeys(names)), chat(**dict.fromkeys([*HARMLESS, *REFUSED]))):
        assert (parsed.kind, parsed.model, parsed.messages) == ("chat", "m", HELLO)
        assert (parsed.n, parsed.stream, parsed.stops) == (1, False, ())
        unsaid = (parsed.temperature, parsed.top_p, parsed.top_k, parsed.min_p, parsed.seed, parsed.max_tokens)
        assert set(unsaid) == {None}
        assert parsed.top_logprobs is None


def test_everything_said_is_read() -> None:
    """Each supported field arrives under its name and in its type."""
    parsed = chat(
        n=2, best_of=2, stream=True, stream_options={"include_usage": True}, return_token_ids=True, priority=0,
        stop=["a", "b"], stop_token_ids=[5], include_stop_str_in_output=True, ignore_eos=True, max_tokens=9,
        max_completion_tokens=9, min_tokens=9, seed=-1, temperature=0, top_p=1, top_k=-1, min_p=0.5,
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.1, logit_bias={"7": -100, "08": 1.5},
        logprobs=True, top_logprobs=20, user="u", metadata={"k": "v"},
    )  # fmt: skip
    assert parsed == ParsedRequest(
        kind="chat", model="m", messages=HELLO, n=2, stream=True, usage=Usage.LAST, return_token_ids=True,
        stops=("a", "b"), stop_token_ids=(5,), include_stop=True, ignore_eos=True, max_tokens=9,
        max_tokens_field="max_completion_tokens", min_tokens=9, seed=SEED_MAX, temperature=0.0, top_p=1.0, top_k=0,
        min_p=0.5, presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.1,
        logit_bias={7: -100.0, 8: 1.5}, top_logprobs=20,
    )  # fmt: skip
    assert type(parsed.temperature) is float


def test_messages_become_one_string_each() -> None:
    """Text parts are joined, a developer is a system, an assistant may have said nothing."""
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
        {"role": "assistant", "tool_calls": [], "reasoning_content": "hm"},
        {"role": "assistant", "content": "y", "reasoning": "hm", "cache_control": {"type": "ephemeral"}, "id": "1"},
        {"role": "user", "content": [{"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}}]},
    ]
    assert chat(messages=messages).messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb", "name": "x"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "assistant", "content": "y", "reasoning_content": "hm"},
        {"role": "user", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("x", "messages"),
        ([], "messages"),
        ([3], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "tool", "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
        ([{"role": "user", "content": "x", "colour": 3}], "messages[0].colour"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
        (HELLO * (MESSAGES_AND_PARTS_MAX + 1), "messages"),
        ([{"role": "user", "content": [{"type": "text", "text": ""}] * MESSAGES_AND_PARTS_MAX}], "messages"),
    ],
)
def test_a_bad_message_is_named_by_its_path(messages: Any, param: str) -> None:
    """The refusal points into the array."""
    assert chat_refused(messages=messages).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"model": "x" * 257}, "model"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**4000}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "7"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {str(key): 1 for key in range(301)}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["x" * 513]}, "stop[0]"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"priority": 5}, "priority"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"guided_json": {}}, "guided_json"),
        ({"prompt": "x"}, "prompt"),
        ({"frobnicate": None}, "frobnicate"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"x" * 5000: 1}, "x" * 100),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    """Wrong types, wrong ranges, unsupported and unknown fields: a 400 with the field in `param` and in the text."""
    error = chat_refused(**fields)
    assert error.param == param
    assert f"'{param}'" in error.message
    assert json.loads(error.body())["error"] == {
        "message": error.message, "type": "invalid_request_error", "param": param, "code": error.code,
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_asking_for_what_happens_anyway_is_no_fault(name: str) -> None:
    """A field that is not supported is accepted where its value would change nothing."""
    for value in (None, *REFUSED[name]):
        chat(**{name: value})
    assert chat_refused(**{name: {"a": 1}}).code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "a JSON object"),
        (b'{"model": "m", ', "at byte 15"),
        (b'{"model": "\xff"}', "byte 11 is not UTF-8"),
        (b'{"model": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "deep"),
        (b'{"user":' * 50_000, "deep"),
        (b'{"user": ' + b"9" * 5_000 + b"}", "integer"),
        ('{"model": "m"}'.encode("utf-16"), "UTF-8"),
        (b'\xef\xbb\xbf{"model": "m"}', "BOM"),
        (b'{"model": "' + b"x" * 70_000, "truncated"),
    ],
)
def test_what_is_no_json_says_where(body: bytes, part: str) -> None:
    """Broken bodies get a 400 with the cause and, where there is one, the place."""
    assert part in refused(body).message


def test_required_fields() -> None:
    """A request without a model, messages or a prompt names what is missing."""
    assert refused(b'{"model": "m"}').param == "messages"
    assert refused(b'{"messages": [{"role": "user", "content": ""}]}').param == "model"
    assert completion_refused(prompt=None).param == "prompt"


def test_prompts_in_all_four_shapes() -> None:
    """Text or ids, one or several."""
    assert completion().prompts == ["hello"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]], n=64).prompts == [[1], [2, 3]]
    assert completion(logprobs=0, echo=False, suffix=None).top_logprobs == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 10**30]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [2, 2**31]]}, "prompt[1][1]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a", "b"], "n": 65}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": HELLO}, "messages"),
    ],
)
def test_a_bad_completion_is_named(fields: dict[str, Any], param: str) -> None:
    """The same for completions: the path into the prompts."""
    assert completion_refused(**fields).param == param


def test_failures_have_a_status() -> None:
    """Each name of what can go wrong is an OpenAI-shaped answer; a 500 is only what kills engines, or our own bug."""
    assert model_not_found("x").status == 404
    assert of_failure(Code.NO_WORKER, "none", retry_after_s=2).retry_after_s == 2
    ours = {Code.POISONED, Code.INTERNAL}
    assert {of_failure(code, "x").status for code in set(Code) - ours} == {400, 404, 429, 499, 503}
    assert {of_failure(code, "x").status for code in ours} == {500}
    poisoned = of_failure(Code.POISONED, "x")
    assert (poisoned.status, poisoned.type, poisoned.code) == (500, "server_error", "PoisonedRequest")


def test_a_minimum_above_the_maximum_is_refused_in_the_clients_own_words() -> None:
    """Whichever of its two names the maximum came under."""
    for field in ("max_tokens", "max_completion_tokens"):
        body = {"model": "m", "messages": HELLO, "min_tokens": 6, field: 5}
        with pytest.raises(ApiError, match=rf"'min_tokens' \(6\) is more than '{field}' \(5\)"):
            parse_chat(json.dumps(body).encode())
