"""Asking through the official client, and holding its answers against the client's own types."""

from __future__ import annotations

from typing import Any

from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from holdfast.frontend.text.tokenizer import TextTokenizer

MODEL = "holdfast-sim"
HELLO: Any = [{"role": "user", "content": "hello"}]
IDS = {"return_token_ids": True}
LONG = {"return_token_ids": True, "ignore_eos": True}


def decode(tokenizer: TextTokenizer, ids: list[int]) -> str:
    return str(tokenizer._tokenizer.decode(ids, skip_special_tokens=True))


def strict(answer: Any) -> Any:
    """The client builds its objects without checking them; here they are checked, types and all."""
    fields: Any = answer.to_dict(mode="json")
    if isinstance(answer, Completion) and answer.choices and answer.choices[0].finish_reason is None:
        # The client has no type of its own for a completion's chunk, whose reason is null until the last.
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
