"""Any body at all gives a request or a 400, for both endpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.frontend.api.chat import parse_chat
from holdfast.frontend.api.completions import parse_completion
from holdfast.frontend.api.errors import ApiError
from holdfast.frontend.api.fields import HARMLESS, REFUSED, SHARED
from holdfast.frontend.api.request import CHOICES_MAX, ParsedRequest

FIELDS = sorted({*SHARED, *HARMLESS, *REFUSED, "messages", "prompt", "logprobs", "top_logprobs", "frobnicate"})

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 130), st.just(10**500), st.floats(), st.text(max_size=5)
)
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.sampled_from(["role", "content", "type", "text", "include_usage", "7"]), st.text(max_size=4)),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant"])},
        optional={"content": json_values, "name": json_values},
    ),
    max_size=3,
)
bodies = st.fixed_dictionaries(
    {"model": st.just("m")},
    optional={
        **dict.fromkeys([name for name in SHARED if name != "model"], scalars),
        "messages": st.one_of(messages, json_values),
        "prompt": st.one_of(st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3), json_values),
    },
)
few_fields = st.builds(
    lambda key, value: {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        **({"stream": True} if key == "stream_options" else {}),
        key: value,
    },
    st.sampled_from(FIELDS),
    json_values,
)


def outcome(parse: Callable[[bytes], ParsedRequest], body: bytes) -> ParsedRequest | ApiError:
    try:
        return parse(body)
    except ApiError as error:
        return error


def judge(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        result = outcome(parse, body)
        if isinstance(result, ApiError):
            assert result.status == 400
            assert json.loads(result.body())["error"]["message"]
        else:
            assert_sound(result)


def assert_sound(parsed: ParsedRequest) -> None:
    assert parsed.messages if parsed.kind == "chat" else parsed.prompts
    assert 1 <= parsed.n * max(1, len(parsed.prompts)) <= CHOICES_MAX
    assert all(type(message["content"]) is str for message in parsed.messages)
    assert parsed.seed is None or 0 <= parsed.seed < 2**63
    assert parsed.temperature is None or 0 <= parsed.temperature <= 2
    assert all(parsed.stops)


def without(body: dict[str, Any], key: str) -> bytes:
    return json.dumps({name: value for name, value in body.items() if name != key}).encode()


@settings(max_examples=400, deadline=None)
@given(few_fields)
def test_any_value_in_any_field(body: dict[str, Any]) -> None:
    """One field at a time, with arbitrary JSON in it, NaN and Infinity included."""
    judge(without(body, "messages"))
    judge(without(body, "prompt"))


@settings(max_examples=150, deadline=None)
@given(bodies)
def test_any_values_in_all_fields(body: dict[str, Any]) -> None:
    """Many fields at once."""
    judge(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 70), st.integers(0, 70))
def test_any_bytes(junk: bytes, start: int, end: int) -> None:
    """Noise, and a good body with noise written over a part of it."""
    judge(junk)
    good = b'{"model": "m", "messages": [{"role": "user", "content": "caf\xc3\xa9"}], "n": 2}'
    judge(good[:start] + junk + good[end:])
