"""Writes one HTTP answer: its choices, their text, and when each part is sent to the client.

`Choice` is the per-token path (facts 33): no task, queue, timer, metric or log line per token. It turns a stream's
tokens into text and gathers it until the reply sends it. A client that does not read costs only the memory of its text.

Always true:
- No header is sent before the first engine output, so an error can still have its HTTP status. The exception: a client
  that got a comment about its wait (`notes`).
- A stream ends with `[DONE]` only if every choice reached its end, else with an error event that names the cause.
- When a client leaves, all its streams end at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.core.errors import Code
from holdfast.core.requests import Output, TokenLogprobs
from holdfast.frontend.api.errors import ApiError, log_failure, of_failure
from holdfast.frontend.api.request import Usage
from holdfast.frontend.notes import WaitNotes, add_queued_header, begin_events, send_error
from holdfast.frontend.shapes import (
    ChunkTemplate,
    ReplyShape,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    encode,
    usage,
    usage_chunk,
)
from holdfast.frontend.text.detokenizer import Detokenizer, TokenTable
from holdfast.frontend.text.stops import StopWatcher
from holdfast.streams.flight import Flight, WaitStatus
from holdfast.wire.http.connection import HttpConnection

# Fields that clients of OpenAI or vLLM read unconditionally are present, as null: in a message, and in the body.
_SILENT: dict[str, Any] = {
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": [],
    "reasoning": None,
}
_NO_MORE: dict[str, Any] = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}


class EndTokens(NamedTuple):
    """How tokens that end a stream are shown to the client."""

    hidden: frozenset[int]  # not shown as text
    quiet: int  # not shown as `stop_reason` either: the model's own end of text, as in vLLM; -1: none


class Choice:
    """A stream as its client sees it. Implements `streams.flight.Consumer`."""

    __slots__ = (
        "_detokenizer",
        "_hidden_stops",
        "_push",
        "_quiet_end",
        "_stops",
        "_unwatched",
        "cached_tokens",
        "dirty",
        "finish",
        "flight",
        "index",
        "keep_ids",
        "logprobs",
        "reply",
        "started",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(
        self,
        reply: Reply,
        index: int,
        detokenizer: Detokenizer,
        stops: StopWatcher | None,
        ends: EndTokens,
        *,
        min_tokens: int = 0,
        keep_ids: bool,
    ) -> None:
        self.reply = reply
        self.index = index
        self.flight: Flight | None = None
        self._detokenizer = detokenizer
        self._push = detokenizer.push
        self._stops = stops
        self._hidden_stops, self._quiet_end = ends.hidden, ends.quiet
        self._unwatched = min_tokens if stops is not None else 0  # tokens in which no stop string may end
        self.keep_ids = keep_ids
        self.dirty = False
        self.started = False  # an output has come
        self.cached_tokens = 0  # of its prompt, found in the engine's KV cache
        self.text = ""  # gathered, not sent
        self.token_ids: list[int] = []  # gathered, not sent; only if asked for
        self.logprobs: list[tuple[int, TokenLogprobs]] = []  # gathered, not sent
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def on_output(self, output: Output) -> bool:
        tokens = output.tokens
        finish = output.finish
        if not self.started:
            self.started = True
            self.cached_tokens = output.cached
        if self.keep_ids:
            self.token_ids += tokens
        if output.logprobs is not None:
            self.logprobs += zip(tokens, output.logprobs, strict=False)
        if finish == "stop" and tokens:
            last = tokens[-1]
            self.stop_reason = last if last != self._quiet_end else None
            if last in self._hidden_stops:
                tokens = tokens[:-1]
        if self._unwatched:
            tokens = self._pass_by(tokens)
        text = self._push(tokens[0]) if len(tokens) == 1 else "".join([self._push(token) for token in tokens])
        if self._stops is not None and text:
            text, hit = self._stops.push(text)
            if hit is not None:
                self.text += text
                self.finish = "stop"
                self.stop_reason = hit
                return True
        self.text += text
        return self._ended(finish) if finish is not None else False

    def _pass_by(self, tokens: list[int]) -> list[int]:
        """Show the first `min_tokens` tokens, in which no stop string counts; return the remaining `tokens`."""
        assert self._stops is not None
        passed, rest = tokens[: self._unwatched], tokens[self._unwatched :]
        self._unwatched -= len(passed)
        self.text += self._stops.pass_by("".join([self._push(token) for token in passed]))
        return rest

    def _ended(self, finish: str) -> bool:
        """Show the withheld text, because the engine reported the end."""
        rest = self._detokenizer.flush()
        if self._stops is not None:
            rest, hit = self._stops.push(rest)
            self.text += rest
            if hit is None:
                self.text += self._stops.flush()
            else:
                finish, self.stop_reason = "stop", hit
        else:
            self.text += rest
        self.finish = finish
        return True

    def flush(self) -> None:
        self.reply.flush_choice(self)

    @property
    def answering(self) -> bool:
        return self.reply.answering

    @property
    def request(self) -> object:
        return self.reply

    def failed(self, code: Code, message: str, retry_after_s: float | None) -> None:
        self.reply.choice_failed(self, code, message, retry_after_s)

    def still_waiting(self, waiting: WaitStatus) -> None:
        self.reply.still_waiting(waiting)

    def resumed(self, pause_s: float) -> None:
        self.reply.resumed(pause_s)

    def dispatched(self, worker: str) -> None:
        self.reply.dispatched(worker)

    @property
    def completion_tokens(self) -> int:
        return self.flight.ledger.emitted if self.flight is not None else 0

    def end_fields(self, logprobs: Any, token_ids: list[int] | None) -> dict[str, Any]:
        """Return the choice's fields besides its text, for a chunk or a whole answer."""
        return {
            "logprobs": logprobs,
            "finish_reason": self.finish,
            "stop_reason": self.stop_reason,
            "token_ids": token_ids,
        }


Over = Callable[["Reply"], None]


class Reply:
    """Base class of answers; `StreamReply` and `WholeReply` decide what is sent. A `Responder` of `wire.http`."""

    def __init__(self, connection: HttpConnection, shape: ReplyShape, table: TokenTable, over: Over) -> None:
        self.connection = connection
        self.shape = shape
        self.table = table
        self._over = over  # called once, with the outcome set
        self.choices: list[Choice] = []
        self.prompts: list[list[int]] = []
        self.outcome = ""  # "success", "error", "cancelled" or "killed"
        self.first_token_s = 0.0
        self.release: Callable[[], None] = lambda: None  # abandons all streams that still run
        self.now: Callable[[], float] = lambda: 0.0
        self.began_s = 0.0  # when its request came
        self._offsets: dict[int, TextOffsets] = {}  # by choice; only for a completion's logprobs

    def add(self, choice: Choice) -> None:
        self.choices.append(choice)

    @property
    def answering(self) -> bool:
        """Return True if part of it was sent, or is about to be."""
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
        """End it and all its streams because a kill was requested."""
        if not self.outcome:
            self._send_error(error)
            self._end("killed")

    def _send_error(self, error: ApiError) -> None:
        self._tell_queued()
        send_error(self.connection, error)

    def _end(self, outcome: str) -> None:
        if not self.outcome:
            self.outcome = outcome
            self.release()
            self._over(self)

    def _first_output(self) -> None:
        if not self.first_token_s:
            self.first_token_s = self.now()

    def queued_s(self) -> float | None:
        """Return how long the request waited until its first stream was sent to a worker that took it; None: none
        was."""
        flights = (choice.flight for choice in self.choices)
        sent = [flight.dispatched_at_s for flight in flights if flight is not None and flight.dispatched_at_s]
        return max(0.0, min(sent) - self.began_s) if sent else None

    def _tell_queued(self) -> None:
        queued_s = self.queued_s()
        add_queued_header(self.connection, self.now() - self.began_s if queued_s is None else queued_s)

    def dispatched(self, worker: str) -> None:
        """Note that a stream was sent to a worker; only a streaming client is told."""

    # -- the parts of an answer

    def prompt_token_count(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    def completion_token_count(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)

    def _usage(self) -> dict[str, Any]:
        # A prompt's later choices find the KV of its first choice: only the first shows what was cached before.
        firsts = self.choices[:: len(self.choices) // len(self.prompts)]
        cached = sum(choice.cached_tokens for choice in firsts)
        used = usage(self.prompt_token_count(), self.completion_token_count())
        return used | {"prompt_tokens_details": {"cached_tokens": cached}}

    def _prompt_ids(self, choice: Choice) -> list[int] | None:
        """Return the ids that the choice continues, if the client asked for ids."""
        return self._prompt_of(choice) if self.shape.token_ids else None

    def _prompt_of(self, choice: Choice) -> list[int]:
        return self.prompts[choice.index * len(self.prompts) // len(self.choices)]

    def resumed_count(self, choices: list[Choice] | None = None) -> int:
        """Return how many times its streams were resumed."""
        flights = [choice.flight for choice in choices or self.choices]
        return sum(flight.ledger.resumed for flight in flights if flight is not None)

    def _holdfast(self, choices: list[Choice]) -> dict[str, Any]:
        """Return how often the streams were resumed, and whether their tokens are those of an unbroken run."""
        ledgers = [choice.flight.ledger for choice in choices if choice.flight is not None]
        resumed = self.resumed_count(choices)
        inexact = next((ledger.inexact_reason for ledger in ledgers if ledger.inexact_reason), "")
        if not inexact and resumed and not self.shape.deterministic:
            inexact = "resumed by an engine that does not compute the same tokens twice"
        facts: dict[str, Any] = {"resumed": resumed, "exact": not inexact}
        return facts | {"reason": inexact} if inexact else facts

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

    def still_waiting(self, waiting: WaitStatus) -> None:
        raise NotImplementedError

    def resumed(self, pause_s: float) -> None:
        """Note that a choice's stream resumed after a failure; only a streaming client is told."""


class StreamReply(Reply):
    """Server-sent events."""

    def __init__(self, connection: HttpConnection, shape: ReplyShape, table: TokenTable, over: Over) -> None:
        super().__init__(connection, shape, table, over)
        # Whether chunks in the middle have more than their text.
        self._rich = shape.token_ids or shape.logprobs or shape.usage is Usage.ALWAYS
        self.notes: WaitNotes | None = None  # comments to its client about waiting
        self._note = b""  # a comment that could not go out yet; the last one only
        self._templates: list[ChunkTemplate] = []
        self._greeted: set[int] = set()
        self._closed: set[int] = set()

    def add(self, choice: Choice) -> None:
        super().add(choice)
        self._templates.append(ChunkTemplate(self.shape, choice.index))

    def client_writable(self) -> None:
        if self._note and self.connection.streaming and not self.outcome:
            self.connection.write(self._note)
            self._note = b""
        super().client_writable()

    def flush_choice(self, choice: Choice) -> None:
        connection = self.connection
        if connection.paused or self.outcome or not choice.started:
            return  # the choice gathers more text; client_writable calls this again
        plain = choice.finish is None and not self._rich
        if plain and choice.index in self._greeted:
            if choice.text:
                connection.write(self._templates[choice.index].plain(choice.text))
                choice.text = ""
            return
        self._flush_other(choice)

    def _flush_other(self, choice: Choice) -> None:
        """Send the first chunk, the last chunk, and chunks with more than text."""
        if choice.index in self._closed:
            return
        data = self._greeting(choice)
        if choice.text or choice.finish is not None or choice.token_ids:
            data += self._chunk(choice)
        if choice.finish is not None:
            self._closed.add(choice.index)
        self._first_output()
        if not self.connection.streaming:
            note, self._note = self._note, b""
            self._tell_queued()
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
        """Return what the choice has used by now, if every chunk is to tell it."""
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
        body |= choice.end_fields(self._logprobs(choice), ids)
        if choice.index not in self._greeted:  # a completion's first chunk
            self._greeted.add(choice.index)
            body["prompt_token_ids"] = self._prompt_ids(choice)
        extra = self._so_far(choice, choice.completion_tokens)
        if choice.finish is not None:
            extra["holdfast"] = self._holdfast([choice])
        return template.full(body, extra)

    def _closing(self) -> bytes:
        if self.shape.usage is Usage.NEVER:
            return b"data: [DONE]\n\n"
        extra = {"usage": self._usage(), "holdfast": self._holdfast(self.choices)}
        return usage_chunk(self.shape, extra) + b"data: [DONE]\n\n"

    def still_waiting(self, waiting: WaitStatus) -> None:
        if self.notes is not None:
            self.notes.tell(waiting, self.now())

    def dispatched(self, worker: str) -> None:
        if self.notes is not None and not self.outcome:
            self.notes.tell_dispatched(worker, self.now())

    def resumed(self, pause_s: float) -> None:
        note = b": resumed after %.3f s\n\n" % pause_s
        if self.connection.streaming and not self.connection.paused:
            self.connection.write(note)
        else:
            self._note = note


class WholeReply(Reply):
    """An answer that is not streamed: one JSON body, sent when every choice has reached its end."""

    def flush_choice(self, choice: Choice) -> None:
        if self.outcome:
            return
        self._first_output()
        if all(choice.finish is not None for choice in self.choices):
            self._tell_queued()
            self.connection.respond(200, encode(self._body()))
            self._end("success")

    def still_waiting(self, waiting: WaitStatus) -> None:
        """Do nothing: no header has gone out, so there is nothing to keep alive."""

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
        if shape.chat:
            body |= {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids(self.choices[0])}
        return body | _NO_MORE

    def _choice(self, choice: Choice) -> dict[str, Any]:
        ids = choice.token_ids if choice.keep_ids else None
        end = choice.end_fields(self._logprobs(choice), ids)
        if self.shape.chat:
            return {"index": choice.index, "message": {"role": "assistant", "content": choice.text} | _SILENT} | end
        prompt = {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids(choice)}
        return {"index": choice.index, "text": choice.text} | end | prompt
