"""The JSON of OpenAI's answers, as bytes: whole responses, stream chunks, logprobs, usage.

Chunks are built from byte templates prepared once per choice; encoding structs for every token costs several times
as much (facts 33).
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.core.requests import TokenLogprobs
from holdfast.frontend.api.request import Usage
from holdfast.frontend.text.detokenizer import TokenTable

encode = msgspec.json.encode

Gathered = list[tuple[int, TokenLogprobs]]


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """The kind of answer that the client asked for."""

    chat: bool
    response_id: str
    created: int
    model: str
    usage: Usage
    token_ids: bool
    logprobs: bool
    deterministic: bool


# The fields of nearly every chunk besides its text: vLLM's clients read them without checking that they exist.
_NULLS = b',"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null'


class ChunkTemplate:
    """The constant parts of one choice's chunks."""

    __slots__ = ("_after", "_before", "_plain_after", "_plain_before")

    def __init__(self, shape: ReplyShape, index: int) -> None:
        head = encode(_head(shape)).removesuffix(b"}")
        self._before = b'data: %b,"choices":[{"index":%d,' % (head, index)
        self._after = b',"usage":null}\n\n' if shape.usage is Usage.LAST else b"}\n\n"
        self._plain_before = self._before + (b'"delta":{"content":' if shape.chat else b'"text":')
        self._plain_after = (b"}" if shape.chat else b"") + _NULLS + b"}]" + self._after

    def plain(self, text: str) -> bytes:
        """Return a chunk with only text, the kind of nearly every chunk."""
        return self._plain_before + encode(text) + self._plain_after

    def role(self, extra: dict[str, Any]) -> bytes:
        """Return the first chunk of a chat choice."""
        delta = {"role": "assistant", "content": ""}
        return self.full({"delta": delta, "logprobs": None, "finish_reason": None}, extra)

    def full(self, choice: dict[str, Any], extra: dict[str, Any]) -> bytes:
        """Return any chunk, from the choice's fields after `index` and the response's further fields."""
        fields = b"".join(b",%b:%b" % (encode(key), encode(value)) for key, value in extra.items())
        return self._before + encode(choice)[1:] + b"]" + fields + self._after


def _head(shape: ReplyShape) -> dict[str, Any]:
    kind = "chat.completion.chunk" if shape.chat else "text_completion"
    return {"id": shape.response_id, "object": kind, "created": shape.created, "model": shape.model}


def chat_logprobs(gathered: Gathered, table: TokenTable) -> dict[str, Any]:
    return {"content": [_chat_token(token, entry, table) for token, entry in gathered], "refusal": None}


def _chat_token(token: int, entry: TokenLogprobs, table: TokenTable) -> dict[str, Any]:
    top = [_labelled(other, logprob, table) for other, logprob in entry.top]
    return _labelled(token, entry.logprob, table) | {"top_logprobs": top}


def _labelled(token: int, logprob: float, table: TokenTable) -> dict[str, Any]:
    text, data = table.label(token)
    return {"token": text, "logprob": logprob, "bytes": list(data)}


class TextOffsets:
    """Computes where in a completion's text each token starts; a token inside a character starts where that does."""

    __slots__ = ("_decode", "_next")

    def __init__(self) -> None:
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        self._next = 0

    def advance(self, data: bytes) -> int:
        start = self._next
        self._next += len(self._decode(data))
        return start


def completion_logprobs(gathered: Gathered, table: TokenTable, offsets: TextOffsets) -> dict[str, Any]:
    """Return the logprobs; the chosen token is always among the top ones, as in OpenAI's API."""
    return {
        "text_offset": [offsets.advance(table.bytes_of(token)) for token, _ in gathered],
        "token_logprobs": [entry.logprob for _, entry in gathered],
        "tokens": [_name(token, table) for token, _ in gathered],
        "top_logprobs": [
            {_name(other, table): value for other, value in (*entry.top, (token, entry.logprob))}
            for token, entry in gathered
        ],
    }


def _name(token: int, table: TokenTable) -> str:
    """Return a token's name in a completion's logprobs. Tokens that are no text by themselves are named by their bytes,
    as in OpenAI's API, so that two of them have two names."""
    text, data = table.label(token)
    return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def usage_chunk(shape: ReplyShape, extra: dict[str, Any]) -> bytes:
    """Return the chunk without choices that closes a stream asked to include usage."""
    return b"data: " + encode(_head(shape) | {"choices": [], **extra}) + b"\n\n"
