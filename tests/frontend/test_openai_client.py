"""The whole API through the official client, its answers held against the client's own types, strictly."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion

from holdfast.frontend.text.tokenizer import TextTokenizer
from holdfast.testing.deployment import Deployment
from tests.rigs.frontend.official_client import HELLO, IDS, LONG, MODEL, ask, decode, ids_of, stream, strict, text_of


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    """Each with the fields OpenAI gives it, and those that vLLM's bench reads."""
    listed = list(client.models.list())
    assert [strict(model).id for model in listed] == [MODEL]
    more = listed[0].model_extra or {}
    assert (more["root"], more["parent"], more["max_model_len"]) == (MODEL, None, 32_768)
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
    """Of one text and of several, streamed and not; sixteen tokens where no length is asked for."""
    short: Completion = client.completions.create(model=MODEL, prompt="the sea", extra_body={"ignore_eos": True})
    assert short.usage is not None
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (16, "length")
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
        ({"extra_body": {"priority": 1}}, "priority"),
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
    """Marks for caches, sessions and stores, tools that may not be called; unsupported ones too that ask for what
    happens anyway."""
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    answer = ask(
        client, user="u", metadata={"a": "b"}, store=False, service_tier="auto", parallel_tool_calls=True,
        response_format={"type": "text"}, tools=tools, tool_choice="none", logit_bias={"5": -100},
        extra_body={"session_id": "s", "cache_control": {"type": "ephemeral"}, "priority": 0},
    )  # fmt: skip
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_messages_of_every_kind(client: OpenAI) -> None:
    """System, developer, assistant and parts; a past answer may be sent back as it came."""
    first = ask(client).choices[0].message
    answer = client.chat.completions.create(
        model=MODEL,
        max_tokens=5,
        extra_body=LONG,  # the end may be drawn as the first token
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "developer", "content": "be kind"},
            {
                "role": "user",
                "name": "ada",
                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            },
            first.to_dict(),  # type: ignore[list-item]
            {"role": "assistant", "content": "hm", "name": "x", "reasoning": "well", "cache_control": {}},  # type: ignore[list-item]
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
