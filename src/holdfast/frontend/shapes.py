"""The JSON of OpenAI's answers, as bytes: whole responses, stream chunks, logprobs, usage.

Chunks are built from byte templates prepared once per choice; encoding structs for every token costs several times
as much (facts 33).
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from typing import Any

import msgspec

from holdfast.core.requests import TokenLogprobs
from holdfast.frontend.choice import Choice
from holdfast.frontend.text.detokenizer import TokenTable

encode = msgspec.json.encode

Gathered = list[tuple[int, TokenLogprobs]]


# What nearly every chunk says besides its text: vLLM's clients read these fields without asking whether they are there.
_NULLS = b',"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null'


class ChunkTemplate:
    """The constant parts of one choice's chunks."""

    __slots__ = ("_after", "_before", "_plain_after", "_plain_before", "chat")

    def __init__(self, chat: bool, response_id: str, created: int, model: str, index: int, usage_null: bool) -> None:
        self.chat = chat
        kind = b"chat.completion.chunk" if chat else b"text_completion"
        self._before = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[{"index":%d,' % (
            encode(response_id),
            kind,
            created,
            encode(model),
            index,
        )
        self._after = b'"usage":null}\n\n' if usage_null else b"}\n\n"
        tail = b"," + self._after if usage_null else self._after
        self._plain_before = self._before + (b'"delta":{"content":' if chat else b'"text":')
        self._plain_after = (b"}" if chat else b"") + _NULLS + b"}]" + tail

    def plain(self, text: str) -> bytes:
        """Text and nothing else: nearly every chunk."""
        return self._plain_before + encode(text) + self._plain_after

    def role(self, extra: dict[str, Any]) -> bytes:
        """The first chunk of a chat choice."""
        delta = {"role": "assistant", "content": ""}
        return self.full({"delta": delta, "logprobs": None, "finish_reason": None}, extra)

    def full(self, choice: dict[str, Any], extra: dict[str, Any]) -> bytes:
        """Any chunk, from the choice's fields after `index` and the response's further fields."""
        fields = b"".join(b",%b:%b" % (encode(key), encode(value)) for key, value in extra.items())
        tail = b"," + self._after if self._after.startswith(b'"') else self._after
        return self._before + encode(choice)[1:] + b"]" + fields + tail


def end_of(choice: Choice, logprobs: Any, token_ids: list[int] | None) -> dict[str, Any]:
    """What a choice says besides its text, whole or in a chunk."""
    return {
        "logprobs": logprobs,
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_reason,
        "token_ids": token_ids,
    }


def chat_logprobs(gathered: Gathered, table: TokenTable) -> dict[str, Any]:
    return {"content": [_chat_token(token, entry, table) for token, entry in gathered], "refusal": None}


def _chat_token(token: int, entry: TokenLogprobs, table: TokenTable) -> dict[str, Any]:
    top = [_labelled(other, logprob, table) for other, logprob in entry.top]
    return _labelled(token, entry.logprob, table) | {"top_logprobs": top}


def _labelled(token: int, logprob: float, table: TokenTable) -> dict[str, Any]:
    text, data = table.label(token)
    return {"token": text, "logprob": logprob, "bytes": list(data)}


class TextOffsets:
    """Where in a completion's text each token starts; a token inside a character starts where the character does."""

    __slots__ = ("_decode", "_next")

    def __init__(self) -> None:
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        self._next = 0

    def take(self, data: bytes) -> int:
        start = self._next
        self._next += len(self._decode(data))
        return start


def completion_logprobs(gathered: Gathered, table: TokenTable, offsets: TextOffsets) -> dict[str, Any]:
    """The chosen token is always among the top ones, as OpenAI has it."""
    return {
        "text_offset": [offsets.take(table.bytes_of(token)) for token, _ in gathered],
        "token_logprobs": [entry.logprob for _, entry in gathered],
        "tokens": [_name(token, table) for token, _ in gathered],
        "top_logprobs": [
            {_name(other, table): value for other, value in (*entry.top, (token, entry.logprob))}
            for token, entry in gathered
        ],
    }


def _name(token: int, table: TokenTable) -> str:
    """A token as a completion's logprobs call it; OpenAI's way with one that is no text by itself, so that two such
    tokens have two names."""
    text, data = table.label(token)
    return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def usage_chunk(chat: bool, response_id: str, created: int, model: str, extra: dict[str, Any]) -> bytes:
    """The chunk without choices that closes a stream asked to include usage."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    body = {"id": response_id, "object": kind, "created": created, "model": model, "choices": [], **extra}
    return b"data: " + encode(body) + b"\n\n"
