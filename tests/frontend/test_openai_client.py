"""The whole API through the official client, its answers held against the client's own types, strictly."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from holdfast.bench.deployment import Deployment
from holdfast.engines.sim.vocabulary import asset
from holdfast.frontend.text.tokenizer import TextTokenizer

MODEL = "holdfast-sim"
HELLO: Any = [{"role": "user", "content": "hello"}]
IDS = {"return_token_ids": True}
LONG = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{deployment.port}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(asset("tokenizer.json"))


def decode(tokenizer: TextTokenizer, ids: list[int]) -> str:
    return str(tokenizer._tokenizer.decode(ids, skip_special_tokens=True))


def strict(answer: Any) -> Any:
    """The client builds its objects without checking them; here they are checked, types and all."""
    fields: Any = answer.to_dict(mode="json")
    if isinstance(answer, Completion) and answer.choices and answer.choices[0].finish_reason is None:
        # The one type the client does not have is a completion's chunk: its reason is null until the last, at OpenAI too.
        fields["choices"][0]["finish_reason"] = "stop"
    type(answer).model_validate(fields, strict=True)
    return answer


def ask(client: OpenAI, **more: Any) -> ChatCompletion:
    made: ChatCompletion = client.chat.completions.create(model=MODEL, messages=HELLO, **{"max_tokens": 20, **more})
    return strict(made)  # type: ignore[no-any-return]


def stream(client: OpenAI, **more: Any) -> list[ChatCompletionChunk]:
    with client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, **{"max_tokens": 20, **more}
    ) as chunks:
        return [strict(chunk) for chunk in chunks]


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in mine)


def ids_of(chunks: list[Any], index: int = 0) -> list[int]:
    mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return [token for choice in mine for token in getattr(choice, "token_ids", None) or []]


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    """Each with the fields OpenAI gives it."""
    listed = list(client.models.list())
    assert [strict(model).id for model in listed] == [MODEL]
    assert strict(client.models.retrieve(MODEL)) == listed[0]
    with pytest.raises(openai.NotFoundError, match="org/other"):
        client.models.retrieve("org/other")


def test_a_chat_answer(client: OpenAI, tokenizer: TextTokenizer) -> None:
    """Role, text, reason, usage; the text is what the ids say, the usage counts the ids."""
    answer = ask(client, extra_body=LONG)
    choice = answer.choices[0]
    assert (answer.object, answer.model, choice.message.role) == ("chat.completion", MODEL, "assistant")
    assert answer.id.startswith("chatcmpl-")
    assert choice.finish_reason == "length"
    ids = choice.model_extra["token_ids"]  # type: ignore[index]
    assert choice.message.content == decode(tokenizer, ids)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids) == 20
    assert answer.usage.prompt_tokens == len(answer.model_extra["prompt_token_ids"])  # type: ignore[index]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20
    assert answer.model_extra["holdfast"] == {"resumed": 0, "exact": True}  # type: ignore[index]


def test_a_streamed_chat_answer(client: OpenAI) -> None:
    """The role first, text in between, the reason and `holdfast` last; one id for all; the same as unstreamed."""
    chunks = stream(client, seed=3, extra_body=LONG)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert last.choices[0].finish_reason == "length"
    assert last.model_extra["holdfast"] == {"resumed": 0, "exact": True}  # type: ignore[index]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    whole = ask(client, seed=3, extra_body=LONG)
    assert text_of(chunks) == whole.choices[0].message.content
    assert ids_of(chunks) == whole.choices[0].model_extra["token_ids"]  # type: ignore[index]


def test_usage_comes_last_when_asked_for(client: OpenAI) -> None:
    """One more chunk, without choices; the others say null."""
    chunks = stream(client, n=2, stream_options={"include_usage": True}, extra_body=LONG)
    *others, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(ids_of(others, 0)) + len(ids_of(others, 1)) == 40
    assert all(chunk.usage is None and "usage" in chunk.to_dict() for chunk in others)


def test_several_choices(client: OpenAI) -> None:
    """All there, all different, the same whether streamed or not."""
    whole = ask(client, n=4, seed=11)
    chunks = stream(client, n=4, seed=11)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert [text_of(chunks, index) for index in range(4)] == texts
    roles = [c.index for chunk in chunks for c in chunk.choices if c.delta.role]
    ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(roles) == sorted(ends) == [0, 1, 2, 3]


def test_text_completions(client: OpenAI, tokenizer: TextTokenizer) -> None:
    """Of one text and of several, streamed and not."""
    one = strict(client.completions.create(model=MODEL, prompt="the sea", max_tokens=12, seed=5, extra_body=IDS))
    assert (one.object, len(one.choices)) == ("text_completion", 1)
    assert one.choices[0].text == decode(tokenizer, one.choices[0].model_extra["token_ids"])
    many = strict(client.completions.create(model=MODEL, prompt=["the sea", "a hill"], n=2, max_tokens=12, seed=5))
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == one.choices[0].text
    with client.completions.create(model=MODEL, prompt="the sea", max_tokens=12, seed=5, stream=True) as chunks:
        assert "".join(strict(chunk).choices[0].text for chunk in chunks) == one.choices[0].text


def test_completions_of_token_ids(client: OpenAI, tokenizer: TextTokenizer) -> None:
    """The ids of a text answer like the text, alone and as a list of lists."""
    ids = tokenizer.encode_now("the sea", add_special_tokens=True)
    text = client.completions.create(model=MODEL, prompt="the sea", max_tokens=12, seed=5).choices[0].text
    alone = strict(client.completions.create(model=MODEL, prompt=ids, max_tokens=12, seed=5, extra_body=IDS))
    listed = client.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=12, seed=5)
    assert alone.choices[0].text == text
    assert alone.choices[0].model_extra["prompt_token_ids"] == ids
    assert listed.choices[0].text == text
    assert alone.usage is not None
    assert alone.usage.prompt_tokens == len(ids)


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
    """Without ignore_eos an answer ends by itself with "stop"; min_tokens puts that off; the end marker is not shown."""
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
    """Four lists of one length; the offsets point at the tokens in the text; the chosen token is always among the top."""
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
    more: Any = {"model": MODEL, "seed": 21, "max_tokens": 600, "extra_body": LONG}
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


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"max_tokens": 40_000}, "max_tokens"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_refusals_name_the_field(client: OpenAI, changes: dict[str, Any], param: str, streaming: bool) -> None:
    """BadRequestError with `param`, for streams too: nothing has been sent before."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "stream": streaming, **changes})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    """By its name, on both endpoints."""
    with pytest.raises(openai.NotFoundError, match="gpt-5") as caught:
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="x", stream=True)


def test_harmless_fields_are_accepted(client: OpenAI) -> None:
    """And so are unsupported ones that ask for what happens anyway."""
    answer = ask(
        client, user="u", metadata={"a": "b"}, store=False, service_tier="auto", parallel_tool_calls=True,
        response_format={"type": "text"}, tools=[], tool_choice="none", logit_bias={"5": -100},
    )  # fmt: skip
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_messages_of_every_kind(client: OpenAI) -> None:
    """System, developer, assistant and parts; a past answer may be sent back as it came."""
    first = ask(client).choices[0].message
    answer = client.chat.completions.create(
        model=MODEL,
        max_tokens=5,
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "developer", "content": "be kind"},
            {
                "role": "user",
                "name": "ada",
                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            },
            first.to_dict(),  # type: ignore[list-item]
            {"role": "user", "content": "go on"},
        ],
    )
    assert answer.choices[0].message.content


async def test_the_async_client(deployment: Deployment) -> None:
    """Many at once on few connections, streamed and not, each with its own answer."""
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{deployment.port}/v1", api_key="none", max_retries=0) as client:

        async def streamed(seed: int) -> str:
            chunks = await client.chat.completions.create(
                model=MODEL, messages=HELLO, seed=seed, max_tokens=30, stream=True, extra_body=LONG
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        async def whole(seed: int) -> str:
            answer = await client.chat.completions.create(
                model=MODEL, messages=HELLO, seed=seed, max_tokens=30, extra_body=LONG
            )
            return answer.choices[0].message.content or ""

        seeds = range(20)
        texts = await asyncio.gather(*map(streamed, seeds), *map(whole, seeds))
        assert texts[:20] == texts[20:]
        assert len(set(texts)) > 10  # seeds that share their first bits may draw alike for a while
        assert [model.id async for model in client.models.list()] == [MODEL]


def test_completion_chunks_are_completions(client: OpenAI) -> None:
    """A completion's stream is made of the same type as its whole answer, the end on its last chunk."""
    with client.completions.create(model=MODEL, prompt="x", max_tokens=5, stream=True, extra_body=LONG) as chunks:
        made: list[Completion] = [strict(chunk) for chunk in chunks]
    assert len(ids_of(made)) == 5
    assert made[-1].choices[0].finish_reason == "length"
    assert made[-1].model_extra["holdfast"]["exact"] is True  # type: ignore[index]
