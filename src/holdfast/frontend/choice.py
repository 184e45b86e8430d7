"""One choice of a reply: tokens in, text gathered until the reply sends it on.

This is the per-token path (facts 33): no task, queue, timer, metric or log line per token. What is gathered waits
here while the client does not read, so a slow client costs its own text and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from holdfast.core.errors import Code
from holdfast.core.requests import Output, TokenLogprobs
from holdfast.frontend.text.detokenizer import Detokenizer
from holdfast.frontend.text.stops import StopWatcher
from holdfast.streams.flight import Flight
from holdfast.streams.states import Waiting


class ReplySide(Protocol):
    """The reply a choice belongs to."""

    @property
    def answering(self) -> bool: ...

    def flush_choice(self, choice: Choice) -> None: ...

    def choice_failed(self, choice: Choice, code: Code, message: str, retry_after_s: float | None) -> None: ...

    def still_waiting(self, waiting: Waiting) -> None: ...

    def resumed(self, pause_s: float) -> None: ...


class EndTokens(NamedTuple):
    """What is told of a token that ends a stream."""

    hidden: frozenset[int]  # not shown as text
    quiet: int  # not told as `stop_reason` either: the model's own end, as in vLLM; -1: none


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
        reply: ReplySide,
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
        self._unwatched = min_tokens if stops is not None else 0  # tokens in whose text no stop string may end
        self.keep_ids = keep_ids
        self.dirty = False
        self.started = False  # an output has come
        self.cached_tokens = 0  # of its prompt, found in the engine's KV cache
        self.text = ""  # gathered, not sent
        self.token_ids: list[int] = []  # gathered, not sent; only if asked for
        self.logprobs: list[tuple[int, TokenLogprobs]] = []  # gathered, not sent
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def take(self, output: Output) -> bool:
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
        """The first tokens, as long as no stop string counts; what is left of `tokens`."""
        assert self._stops is not None
        passed, rest = tokens[: self._unwatched], tokens[self._unwatched :]
        self._unwatched -= len(passed)
        self.text += self._stops.pass_by("".join([self._push(token) for token in passed]))
        return rest

    def _ended(self, finish: str) -> bool:
        """The engine says it is the end: let out what was withheld."""
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
    def asker(self) -> object:
        return self.reply

    def failed(self, code: Code, message: str, retry_after_s: float | None) -> None:
        self.reply.choice_failed(self, code, message, retry_after_s)

    def still_waiting(self, waiting: Waiting) -> None:
        self.reply.still_waiting(waiting)

    def resumed(self, pause_s: float) -> None:
        self.reply.resumed(pause_s)

    @property
    def completion_tokens(self) -> int:
        return self.flight.ledger.emitted if self.flight is not None else 0
