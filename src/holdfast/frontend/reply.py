"""One HTTP answer: its choices, and what goes out to the client when.

Always true: no header goes out before the first engine output, so an error can still have its status, but for a stream
whose client was told for how long it waits (`notes`); a stream ends
with `[DONE]` only if every choice reached its end, else with an error event that names the cause; a client that
goes away frees all its streams at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Code
from holdfast.frontend.api.errors import ApiError, log_failure, of_failure
from holdfast.frontend.api.request import Usage
from holdfast.frontend.choice import Choice
from holdfast.frontend.notes import WaitNotes, begin_events
from holdfast.frontend.shapes import (
    ChunkTemplate,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    end_of,
    usage,
    usage_chunk,
)
from holdfast.frontend.text.detokenizer import TokenTable
from holdfast.streams.states import Waiting
from holdfast.wire.http.connection import HttpConnection


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """What kind of answer was asked for."""

    chat: bool
    response_id: str
    created: int
    model: str
    usage: Usage
    token_ids: bool
    logprobs: bool
    deterministic: bool


Over = Callable[["Reply"], None]


class Reply:
    """What all answers share; `StreamReply` and `WholeReply` say what goes out. A `Responder` of `wire.http`."""

    def __init__(self, connection: HttpConnection, shape: ReplyShape, table: TokenTable, over: Over) -> None:
        self.connection = connection
        self.shape = shape
        self.table = table
        self._over = over  # called once, with the outcome set
        self.choices: list[Choice] = []
        self.prompts: list[list[int]] = []
        self.outcome = ""  # "success", "error", "cancelled" or "killed"
        self.first_token_s = 0.0
        self.release: Callable[[], None] = lambda: None  # lets go of all streams still running
        self.now: Callable[[], float] = lambda: 0.0
        self._offsets: dict[int, TextOffsets] = {}  # by choice; only for a completion's logprobs

    @property
    def answering(self) -> bool:
        """Whether part of it is out, or about to be."""
        return self.first_token_s > 0 or self.connection.streaming

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
        error = of_failure(code, message, retry_after_s=retry_after_s)
        log_failure(self.connection.request_id, error)
        self._send_error(error)
        self._end("error")

    def kill(self, error: ApiError) -> None:
        """End it, and all its streams, by somebody's word."""
        if not self.outcome:
            self._send_error(error)
            self._end("killed")

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

    def _usage(self) -> dict[str, Any]:
        # A prompt's further choices find what its first has left: only that one tells what was there before.
        firsts = self.choices[:: len(self.choices) // len(self.prompts)]
        cached = sum(choice.cached_tokens for choice in firsts)
        used = usage(self.prompt_token_count(), self.completion_token_count())
        return used | {"prompt_tokens_details": {"cached_tokens": cached}}

    def _prompt_ids(self, choice: Choice) -> list[int] | None:
        """What the choice goes on from, if the client asked for ids."""
        return self._prompt_of(choice) if self.shape.token_ids else None

    def _prompt_of(self, choice: Choice) -> list[int]:
        return self.prompts[choice.index * len(self.prompts) // len(self.choices)]

    def resumed_count(self, choices: list[Choice] | None = None) -> int:
        """How many times its streams changed hands."""
        flights = [choice.flight for choice in choices or self.choices]
        return sum(flight.ledger.resumed for flight in flights if flight is not None)

    def _holdfast(self, choices: list[Choice]) -> dict[str, Any]:
        """How many times the stream changed hands, and whether its tokens are those of an unbroken run."""
        ledgers = [choice.flight.ledger for choice in choices if choice.flight is not None]
        resumed = self.resumed_count(choices)
        exact = all(ledger.exact for ledger in ledgers) and (self.shape.deterministic or resumed == 0)
        doubt = next((ledger.doubt for ledger in ledgers if ledger.doubt), "")
        return {"resumed": resumed, "exact": exact} | ({"reason": doubt} if doubt else {})

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

    def still_waiting(self, waiting: Waiting) -> None:
        raise NotImplementedError

    def resumed(self, pause_s: float) -> None:
        """A choice's stream moves again after a failure; only a stream's client can be told at that moment."""

    def _send_error(self, error: ApiError) -> None:
        self.connection.respond(error.status, error.body(), headers=error.headers)


class StreamReply(Reply):
    """Server-sent events."""

    def __init__(self, connection: HttpConnection, shape: ReplyShape, table: TokenTable, over: Over) -> None:
        super().__init__(connection, shape, table, over)
        # Whether chunks in the middle say more than their text.
        self._rich = shape.token_ids or shape.logprobs or shape.usage is Usage.ALWAYS
        self._head_sent = connection.streaming
        self.notes: WaitNotes | None = None  # what its client was told while it waited, if anything
        self._note = b""  # a comment that could not go out yet; the last one only
        self._templates: list[ChunkTemplate] = []
        self._greeted: set[int] = set()
        self._closed: set[int] = set()

    def add(self, choice: Choice) -> None:
        shape = self.shape
        self.choices.append(choice)
        self._templates.append(
            ChunkTemplate(
                shape.chat,
                shape.response_id,
                shape.created,
                shape.model,
                choice.index,
                usage_null=shape.usage is Usage.LAST,
            )
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
        plain = choice.finish is None and not self._rich
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
        if not self.first_token_s:
            self._first_output()
        if not self._head_sent:
            self._head_sent = True
            note, self._note = self._note, b""
            begin_events(self.connection, note + data)
            data = b""
        if len(self._closed) == len(self.choices):
            self.connection.end_stream(data + self._closing())
            self._end("success")
        else:
            self.connection.write(data)

    def _greeting(self, choice: Choice) -> bytes:
        if choice.index in self._greeted or not self.shape.chat:
            return b""
        self._greeted.add(choice.index)
        extra = {"prompt_token_ids": self._prompt_ids(choice)} | self._so_far(choice, 0)
        return self._templates[choice.index].role(extra)

    def _so_far(self, choice: Choice, completion_tokens: int) -> dict[str, Any]:
        """What the choice has taken by now, where every chunk is to tell it."""
        if self.shape.usage is not Usage.ALWAYS:
            return {}
        return {"usage": usage(len(self._prompt_of(choice)), completion_tokens)}

    def _chunk(self, choice: Choice) -> bytes:
        template, chat = self._templates[choice.index], self.shape.chat
        ids = None
        if choice.keep_ids:
            ids, choice.token_ids = choice.token_ids, []
        text, choice.text = choice.text, ""
        body: dict[str, Any] = {"delta": {"content": text} if text else {}} if chat else {"text": text}
        body |= end_of(choice, self._logprobs(choice), ids)
        if choice.index not in self._greeted:  # a completion's first chunk
            self._greeted.add(choice.index)
            body["prompt_token_ids"] = self._prompt_ids(choice)
        extra = self._so_far(choice, choice.completion_tokens)
        if choice.finish is not None:
            extra["holdfast"] = self._holdfast([choice])
        return template.full(body, extra)

    def _closing(self) -> bytes:
        shape = self.shape
        if shape.usage is Usage.NEVER:
            return b"data: [DONE]\n\n"
        extra = {"usage": self._usage(), "holdfast": self._holdfast(self.choices)}
        return usage_chunk(shape.chat, shape.response_id, shape.created, shape.model, extra) + b"data: [DONE]\n\n"

    def still_waiting(self, waiting: Waiting) -> None:
        if self.notes is None:
            self.notes = WaitNotes(self.connection)
        self.notes.tell(waiting, self.now())
        self._head_sent = self.connection.streaming

    def resumed(self, pause_s: float) -> None:
        note = b": resumed after %.3f s\n\n" % pause_s
        if self._head_sent and not self.connection.paused:
            self.connection.write(note)
        else:
            self._note = note

    def _send_error(self, error: ApiError) -> None:
        if not self._head_sent:
            super()._send_error(error)
        else:
            self.connection.end_stream(b"data: " + error.body() + b"\n\n")
