"""What comes out as text, through the official client: stops, lengths, seeds, logprobs, whole characters."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai import OpenAI

from holdfast.frontend.text.tokenizer import TextTokenizer
from tests.rigs.frontend.official_client import HELLO, IDS, LONG, MODEL, ask, decode, stream, strict, text_of


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_stop_strings(client: OpenAI, seed: int, include: bool) -> None:
    """The text ends before the stop string (or with it, if asked), streamed and not, and no part of it ever leaks."""
    full = ask(client, seed=seed, max_tokens=60, extra_body=LONG).choices[0].message.content
    assert full is not None
    stops = [full[25:31], full[40:52], "never said"]
    first = min(stops[:2], key=lambda stop: full.index(stop) + len(stop))
    expected = full[: full.index(first) + (len(first) if include else 0)]
    body = {**LONG, "include_stop_str_in_output": include}
    whole = ask(client, seed=seed, max_tokens=60, stop=stops, extra_body=body)
    chunks = stream(client, seed=seed, max_tokens=60, stop=stops, extra_body=body)
    assert whole.choices[0].message.content == text_of(chunks) == expected
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert whole.choices[0].model_extra["stop_reason"] == first  # type: ignore[index]
    sent = ""
    for chunk in chunks:
        sent += chunk.choices[0].delta.content or ""
        assert expected.startswith(sent)


def test_a_stop_string_that_does_not_come_withholds_nothing(client: OpenAI) -> None:
    """What looked like its start is let out at the end."""
    full = ask(client, seed=1, max_tokens=30, extra_body=LONG).choices[0].message.content
    assert full is not None
    chunks = stream(client, seed=1, max_tokens=30, stop=full[-5:] + "x", extra_body=LONG)
    assert text_of(chunks) == full
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_lengths(client: OpenAI, field: str) -> None:
    """Both names bound the answer."""
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={**LONG, field: 7})
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (7, "length")


def test_the_end_of_a_turn(client: OpenAI) -> None:
    """Without ignore_eos an answer ends by itself with "stop"; min_tokens puts that off; the marker is not shown."""
    ended = next(
        answer
        for seed in range(40)
        if (answer := ask(client, seed=seed, max_tokens=400, extra_body=IDS)).choices[0].finish_reason == "stop"
    )
    choice = ended.choices[0]
    ids = choice.model_extra["token_ids"]  # type: ignore[index]
    assert ended.usage is not None
    assert ended.usage.completion_tokens == len(ids) < 400
    assert "<|im_end|>" not in (choice.message.content or "")
    longer = ask(client, max_tokens=len(ids) + 50, temperature=0, extra_body={**IDS, "min_tokens": len(ids) + 1})
    assert longer.usage is not None
    assert longer.usage.completion_tokens > len(ids)


def test_a_seed_repeats_and_no_seed_does_not(client: OpenAI) -> None:
    """Also with temperature, top_p and penalties; at temperature 0 seeds change nothing."""
    more: Any = {
        "temperature": 1.3,
        "top_p": 0.9,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "extra_body": {**LONG, "top_k": 12},
    }

    def text(**values: Any) -> str | None:
        return ask(client, **values).choices[0].message.content

    assert text(seed=42, **more) == text(seed=42, **more)
    assert text(seed=42, **more) != text(seed=43, **more)
    assert text(seed=-1, **more) == text(seed=-1, **more)
    assert text(**more) != text(**more)
    assert text(seed=1, temperature=0) == text(seed=2, temperature=0) == text(temperature=0)


def test_logprobs_in_chat(client: OpenAI, tokenizer: TextTokenizer) -> None:
    """One entry per token with its bytes and its rivals, best first; the same streamed."""
    more: Any = {"seed": 9, "logprobs": True, "top_logprobs": 4, "max_tokens": 60, "extra_body": LONG}
    whole = ask(client, **more).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content
    assert content is not None
    ids = whole.model_extra["token_ids"]  # type: ignore[index]
    assert len(content) == len(ids)
    joined = b"".join(bytes(entry.bytes or []) for entry in content)
    assert joined.decode() == whole.message.content == decode(tokenizer, ids)
    for entry in content:
        ranks = [other.logprob for other in entry.top_logprobs]
        assert len(ranks) == 4 or len({bytes(o.bytes or []) for o in entry.top_logprobs}) == len(ranks)
        assert ranks == sorted(ranks, reverse=True)
        assert all(math.isfinite(value) and value <= 0 for value in [entry.logprob, *ranks])
    chunks = stream(client, **more)
    streamed = [e for chunk in chunks if (lp := chunk.choices[0].logprobs) for e in lp.content or []]
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in content]
    only = ask(client, seed=9, logprobs=True).choices[0].logprobs
    assert only is not None
    assert all(entry.top_logprobs == [] for entry in only.content or [])


def test_logprobs_in_completions(client: OpenAI) -> None:
    """Four lists of one length; offsets point at the tokens in the text; the chosen token is among the top."""
    more: Any = {"prompt": "the sea", "max_tokens": 300, "seed": 2, "logprobs": 3, "extra_body": LONG}
    choice = strict(client.completions.create(model=MODEL, **more)).choices[0]
    lists = choice.logprobs
    assert lists is not None
    count = len(choice.model_extra["token_ids"])
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(lists.text_offset) == count
    assert any(token.startswith("bytes:") for token in lists.tokens), (
        "the text should hold characters of several tokens"
    )
    for token, offset, logprob, top in zip(
        lists.tokens, lists.text_offset, lists.token_logprobs, lists.top_logprobs, strict=True
    ):
        assert token.startswith("bytes:") or choice.text[offset : offset + len(token)] == token
        assert top[token] == logprob
        assert 1 <= len(top) <= 4
    with client.completions.create(model=MODEL, stream=True, **more) as chunks:
        parts = [chunk.choices[0].logprobs for chunk in map(strict, chunks)]
    offsets = [offset for part in parts if part is not None for offset in part.text_offset]
    tokens = [token for part in parts if part is not None for token in part.tokens]
    assert (tokens, offsets) == (lists.tokens, lists.text_offset)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_characters_of_several_tokens(client: OpenAI, tokenizer: TextTokenizer, kind: str) -> None:
    """CJK and emoji come whole, never as replacement characters, streamed as unstreamed as detokenized."""
    words = "海風 and 🚀🎉 and été"
    more: Any = {"model": MODEL, "seed": 9, "max_tokens": 600, "extra_body": LONG}
    if kind == "chat":
        more["messages"] = [{"role": "user", "content": words}]
        whole: Any = client.chat.completions.create(**more)
        with client.chat.completions.create(stream=True, **more) as chunks:
            pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        text = whole.choices[0].message.content
    else:
        whole = client.completions.create(prompt=words, **more)
        with client.completions.create(prompt=words, stream=True, **more) as parts:
            pieces = [part.choices[0].text for part in parts]
        text = whole.choices[0].text
    assert "".join(pieces) == text == decode(tokenizer, whole.choices[0].model_extra["token_ids"])
    assert "\ufffd" not in text
    assert any(ord(letter) > 0x3000 for letter in text)
    assert any(ord(letter) > 0x1F000 for letter in text)
