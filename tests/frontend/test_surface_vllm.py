"""What clients of vLLM read and send beyond OpenAI's own fields: guidellm, vLLM's bench, LiteLLM, LlamaIndex."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from holdfast.testing.deployment import Deployment
from tests.rigs.frontend.official_client import HELLO, IDS, LONG, MODEL, ask, ids_of, stream, text_of
from tests.rigs.frontend.raw_http import Raw

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTINUOUS: Any = {"include_usage": True, "continuous_usage_stats": True}


def post(deployment: Deployment, path: str, **fields: Any) -> Any:
    """The body of an answer, without a client's own defaults; of a stream, its events."""
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "the sea"}
    body = {"model": MODEL, "max_tokens": 5, **asked, **fields}
    with Raw(deployment.port) as raw:
        reply = raw.post(path, body).reply()
    assert reply.status == 200, reply.body
    return reply.events()[:-1] if fields.get("stream") else reply.json()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_continuous_usage(deployment: Deployment, path: str) -> None:
    """Every chunk tells what its choice has taken so far, the last one of all what they took together."""
    events = post(deployment, path, stream=True, n=2, stream_options=CONTINUOUS, **LONG)
    counts: dict[int, int] = {0: 0, 1: 0}
    for event in events[:-1]:
        (choice,) = event["choices"]
        counts[choice["index"]] += len(choice.get("token_ids") or [])
        assert event["usage"]["completion_tokens"] == counts[choice["index"]]
        assert event["usage"]["total_tokens"] == event["usage"]["prompt_tokens"] + counts[choice["index"]]
    assert (events[-1]["choices"], events[-1]["usage"]["completion_tokens"]) == ([], 10)


def test_continuous_usage_needs_included_usage(client: OpenAI) -> None:
    """Alone it changes nothing, as in vLLM."""
    chunks = stream(client, stream_options={"continuous_usage_stats": True})  # type: ignore[arg-type]
    assert all("usage" not in chunk.to_dict() for chunk in chunks)


def test_null_fields_are_there(deployment: Deployment) -> None:
    """A client that reads a field of vLLM's without asking whether it is there finds it."""
    whole = post(deployment, CHAT)
    assert whole.keys() >= {"service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids"}
    assert whole["kv_transfer_params"] is None
    (choice,) = whole["choices"]
    assert choice.keys() >= {"logprobs", "stop_reason", "token_ids"}
    assert choice["message"].keys() >= {"refusal", "annotations", "audio", "function_call", "reasoning"}
    assert choice["message"]["tool_calls"] == []
    (text,) = post(deployment, COMPLETIONS)["choices"]
    assert text.keys() >= {"logprobs", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"}
    for path in (CHAT, COMPLETIONS):
        events = post(deployment, path, stream=True)
        for event in events[path == CHAT :]:
            assert event["choices"][0].keys() >= {"logprobs", "finish_reason", "stop_reason", "token_ids"}


def test_usage_tells_cached_tokens(client: OpenAI) -> None:
    """None are without a pool that keeps them, which is a number too."""
    answer = ask(client)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_prompt_ids_come_first_in_a_stream(deployment: Deployment, path: str) -> None:
    """In the first chunk of each choice, the same ids as in the whole answer."""
    asked: Any = {"return_token_ids": True, "seed": 1}
    whole, events = post(deployment, path, **asked), post(deployment, path, stream=True, **asked)
    place = (lambda body: body) if path == CHAT else (lambda body: body["choices"][0])
    assert place(events[0])["prompt_token_ids"] == place(whole)["prompt_token_ids"]
    assert all("prompt_token_ids" not in place(event) for event in events[1:])


def test_the_reason_of_a_stop(client: OpenAI) -> None:
    """None for the model's own end, the id of a stop token (shown or not), the text of a stop string."""
    asked = (ask(client, seed=seed, max_tokens=400, extra_body=IDS).choices[0] for seed in range(40))
    ended = next(choice for choice in asked if choice.finish_reason == "stop")
    assert ended.model_extra is not None
    assert ended.model_extra["stop_reason"] is None
    second = ended.model_extra["token_ids"][1]
    for shown in (False, True):
        more = {"stop_token_ids": [second], "include_stop_str_in_output": shown}
        stopped = ask(client, temperature=0, logit_bias={str(second): 100}, extra_body=more).choices[0]
        assert stopped.model_extra is not None
        assert (stopped.finish_reason, stopped.model_extra["stop_reason"]) == ("stop", second)
        assert bool(stopped.message.content) == shown


def test_min_tokens_hold_back_stop_strings(client: OpenAI) -> None:
    """A stop string that ends within them is text like any other; the same string counts afterwards."""
    full = ask(client, seed=2, max_tokens=60, extra_body=LONG)
    text = full.choices[0].message.content or ""
    stop = text[4:6]
    for chunks in (False, True):
        fields: Any = {"seed": 2, "max_tokens": 60, "stop": stop, "extra_body": {**LONG, "min_tokens": 20}}
        if chunks:
            made = stream(client, **fields)
            got, count, reason = text_of(made), len(ids_of(made)), made[-1].choices[0].finish_reason
        else:
            answer = ask(client, **fields)
            assert answer.usage is not None
            got, count = answer.choices[0].message.content or "", answer.usage.completion_tokens
            reason = answer.choices[0].finish_reason
        assert count > 20
        assert text.startswith(got)
        assert len(got) > 6
        assert (reason == "stop") == (count < 60)
    assert (ask(client, seed=2, max_tokens=60, stop=stop, extra_body=LONG).choices[0].message.content or "") == text[:4]


def test_an_overflow_is_known_by_its_words(client: OpenAI) -> None:
    """A prompt that can never fit is the client's to mend: 400, in the words clients look for."""
    begins = "This model's maximum context length is 32768 tokens"
    for prompt in ("word " * 40_000, "x" * 900_000):
        with pytest.raises(openai.BadRequestError, match=begins) as caught:
            client.completions.create(model=MODEL, prompt=prompt)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.processes
def test_a_prompt_that_no_pool_can_hold_is_the_clients_to_mend() -> None:
    """400, not 429: waiting would not help. What the pool holds is the context that clients are told of."""
    with Deployment(workers=1, sim={"kv_blocks": 4, "block_size": 16}) as deployment, Raw(deployment.port) as raw:
        (card,) = raw.get("/v1/models").reply().json()["data"]
        assert card["max_model_len"] == 64
        refused = raw.post(COMPLETIONS, {"model": MODEL, "prompt": [1] * 64}).reply()
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        assert raw.post(COMPLETIONS, {"model": MODEL, "prompt": [1] * 63}).reply().status == 200
