"""One HTTP answer: its choices, and what goes out to the client when.

Always true: no header goes out before the first engine output, so an error can still have its status; a stream ends
with `[DONE]` only if every choice reached its end, else with an error event that names the cause; a client that
goes away frees all its streams at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Code
from holdfast.frontend.api.errors import ApiError, of_failure
from holdfast.frontend.choice import Choice
from holdfast.frontend.shapes import (
    ChunkTemplate,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    encode,
    stream_choice,
    usage,
    usage_chunk,
)
from holdfast.frontend.text.detokenizer import TokenTable
from holdfast.wire.http import HttpConnection

EVENT_STREAM = b"text/event-stream; charset=utf-8"
_NO_CACHE = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """What kind of answer was asked for."""

    chat: bool
    response_id: str
    created: int
    model: str
    include_usage: bool
    token_ids: bool
    logprobs: bool
    deterministic: bool


Over = Callable[["Reply"], None]


class Reply:
    """What all answers share; `StreamReply` and `WholeReply` say what goes out. Implements `wire.http.Responder`."""

    def __init__(self, connection: HttpConnection, shape: ReplyShape, table: TokenTable, over: Over) -> None:
        self.connection = connection
        self.shape = shape
        self.table = table
        self._over = over  # called once, with the outcome set
        self.choices: list[Choice] = []
        self.prompts: list[list[int]] = []
        self.outcome = ""  # "success", "error" or "cancelled"
        self.first_token_s = 0.0
        self.release: Callable[[], None] = lambda: None  # lets go of all streams still running
        self.now: Callable[[], float] = lambda: 0.0
        self._offsets: dict[int, TextOffsets] = {}  # by choice; only for a completion's logprobs

    def client_gone(self) -> None:
        self._end("cancelled")

    def client_writable(self) -> None:
        for choice in self.choices:
            self.flush_choice(choice)

    def cut_off(self, why: str) -> None:
        self.choice_failed(self.choices[0], Code.ENGINE_SHUTDOWN, why, 1.0)

    def choice_failed(self, choice: Choice, code: Code, message: str, retry_after_s: float | None) -> None:
        if self.outcome:
            return
        self._send_error(of_failure(code, message), retry_after_s)
        self._end("error")

    def _end(self, outcome: str) -> None:
        if not self.outcome:
            self.outcome = outcome
            self.release()
            self._over(self)

    def _first_output(self) -> None:
        if not self.first_token_s:
            self.first_token_s = self.now()

    def _all_finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    # -- the parts of an answer

    def prompt_token_count(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    def completion_token_count(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)

    def _usage(self) -> dict[str, int]:
        return usage(self.prompt_token_count(), self.completion_token_count())

    def _holdfast(self, choices: list[Choice]) -> dict[str, Any]:
        """How many times the stream changed hands, and whether its tokens are those of an unbroken run."""
        ledgers = [choice.flight.ledger for choice in choices if choice.flight is not None]
        resumed = sum(ledger.resumed for ledger in ledgers)
        exact = all(ledger.exact for ledger in ledgers) and (self.shape.deterministic or resumed == 0)
        return {"resumed": resumed, "exact": exact}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self.shape.logprobs:
            return None
        gathered, choice.logprobs = choice.logprobs, []
        if self.shape.chat:
            return chat_logprobs(gathered, self.table)
        return completion_logprobs(gathered, self.table, self._offsets.setdefault(choice.index, TextOffsets()))

    # -- for the two kinds

    def flush_choice(self, choice: Choice) -> None:
        raise NotImplementedError

    def still_waiting(self) -> None:
        raise NotImplementedError

    def resumed(self, pause_s: float) -> None:
        """A choice's stream moves again after a failure; only a stream's client can be told at that moment."""

    def _send_error(self, error: ApiError, retry_after_s: float | None) -> None:
        headers = ((b"retry-after", b"%d" % max(1, round(retry_after_s))),) if retry_after_s is not None else ()
        self.connection.respond(error.status, error.body(), headers=headers)


class StreamReply(Reply):
    """Server-sent events."""

    def __init__(self, connection: HttpConnection, shape: ReplyShape, table: TokenTable, over: Over) -> None:
        super().__init__(connection, shape, table, over)
        self._head_sent = False
        self._note = b""  # a comment that could not go out yet; the last one only
        self._templates: list[ChunkTemplate] = []
        self._greeted: set[int] = set()
        self._closed: set[int] = set()

    def add(self, choice: Choice) -> None:
        shape = self.shape
        self.choices.append(choice)
        self._templates.append(
            ChunkTemplate(shape.chat, shape.response_id, shape.created, shape.model, choice.index, shape.include_usage)
        )

    def client_writable(self) -> None:
        if self._note and self._head_sent and not self.outcome:
            self.connection.write(self._note)
            self._note = b""
        super().client_writable()

    def flush_choice(self, choice: Choice) -> None:
        connection = self.connection
        if connection.paused or self.outcome or not choice.started:
            return  # it goes on gathering; client_writable comes back here
        plain = choice.finish is None and not choice.keep_ids and not self.shape.logprobs
        if plain and choice.index in self._greeted:
            if choice.text:
                connection.write(self._templates[choice.index].plain(choice.text))
                choice.text = ""
            return
        self._flush_other(choice)

    def _flush_other(self, choice: Choice) -> None:
        """The first chunk, the last chunk, and chunks with more than text."""
        if choice.index in self._closed:
            return
        data = self._greeting(choice)
        if choice.text or choice.finish is not None or choice.token_ids:
            data += self._chunk(choice)
        if choice.finish is not None:
            self._closed.add(choice.index)
        if not self._head_sent:
            self._head_sent = True
            self._first_output()
            note, self._note = self._note, b""
            self.connection.start_stream(EVENT_STREAM, _NO_CACHE, note + data)
            data = b""
        if len(self._closed) == len(self.choices):
            self.connection.end_stream(data + self._closing())
            self._end("success")
        else:
            self.connection.write(data)

    def _greeting(self, choice: Choice) -> bytes:
        if choice.index in self._greeted:
            return b""
        self._greeted.add(choice.index)
        if not self.shape.chat:
            return b""
        per_prompt = len(self.choices) // len(self.prompts)
        ids = self.prompts[choice.index // per_prompt] if self.shape.token_ids else None
        return self._templates[choice.index].role(ids)

    def _chunk(self, choice: Choice) -> bytes:
        template = self._templates[choice.index]
        ids = None
        if choice.keep_ids:
            ids, choice.token_ids = choice.token_ids, []
        body = stream_choice(self.shape.chat, choice.text, self._logprobs(choice), choice.finish, ids)
        choice.text = ""
        extra: dict[str, Any] = {}
        if choice.finish is not None:
            body["stop_reason"] = choice.stop_reason
            extra["holdfast"] = self._holdfast([choice])
        return template.full(body, extra)

    def _closing(self) -> bytes:
        shape = self.shape
        if not shape.include_usage:
            return b"data: [DONE]\n\n"
        extra = {"usage": self._usage(), "holdfast": self._holdfast(self.choices)}
        return usage_chunk(shape.chat, shape.response_id, shape.created, shape.model, extra) + b"data: [DONE]\n\n"

    def still_waiting(self) -> None:
        if self._head_sent and not self.connection.paused:
            self.connection.write(b": waiting\n\n")

    def resumed(self, pause_s: float) -> None:
        note = b": resumed after %.3f s\n\n" % pause_s
        if self._head_sent and not self.connection.paused:
            self.connection.write(note)
        else:
            self._note = note

    def _send_error(self, error: ApiError, retry_after_s: float | None) -> None:
        if not self._head_sent:
            super()._send_error(error, retry_after_s)
        else:
            self.connection.end_stream(b"data: " + error.body() + b"\n\n")


class WholeReply(Reply):
    """One JSON body at the end."""

    def add(self, choice: Choice) -> None:
        self.choices.append(choice)

    def flush_choice(self, choice: Choice) -> None:
        if self.outcome:
            return
        self._first_output()
        if self._all_finished():
            self.connection.respond(200, encode(self._body()))
            self._end("success")

    def still_waiting(self) -> None:
        """Nothing to keep warm: no header has gone out."""

    def _body(self) -> dict[str, Any]:
        shape = self.shape
        body: dict[str, Any] = {
            "id": shape.response_id,
            "object": "chat.completion" if shape.chat else "text_completion",
            "created": shape.created,
            "model": shape.model,
            "choices": [self._choice(choice) for choice in self.choices],
            "usage": self._usage(),
            "holdfast": self._holdfast(self.choices),
        }
        if shape.chat and shape.token_ids:
            body["prompt_token_ids"] = self.prompts[0]
        return body

    def _choice(self, choice: Choice) -> dict[str, Any]:
        body: dict[str, Any] = {"index": choice.index}
        if self.shape.chat:
            body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            body["text"] = choice.text
        body |= {
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self.shape.token_ids:
            body["token_ids"] = choice.token_ids
            if not self.shape.chat:
                body["prompt_token_ids"] = self.prompts[choice.index // (len(self.choices) // len(self.prompts))]
        return body
