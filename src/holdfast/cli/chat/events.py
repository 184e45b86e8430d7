"""A streamed chat answer read from its bytes: its text, that another engine took it over, that it waits for one.

Always true: bytes may be cut anywhere; an event that has no end is refused before it fills the memory; an answer ends
with `Ended` or with a `ChatTrouble` that says in one line what happened and whether asking again makes sense.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from holdfast.core.errors import Code

EVENT_BYTES_MAX = 4 * 1024 * 1024  # far more than any chunk of text


class Said(msgspec.Struct, frozen=True):
    text: str


class Resumed(msgspec.Struct, frozen=True):
    """An engine failed under the answer; what follows is another's."""

    pause_s: float


class Waiting(msgspec.Struct, frozen=True):
    """The answer is held: no engine is up, or all are full and it has a place in line."""

    place: int = 0  # 0: no engine is up


class Ended(msgspec.Struct, frozen=True):
    finish: str
    exact: bool  # the text is that of an unbroken run


Event = Said | Resumed | Waiting | Ended


class ChatTrouble(Exception):
    """Why there is no answer, or no more of it."""

    def __init__(self, message: str, *, again: bool = True) -> None:
        super().__init__(" ".join(message.split())[:500])
        self.again = again


# -- what comes over the wire


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class ErrorSaid(msgspec.Struct):
    message: str = "no reason given"
    type: str | None = None
    code: str | int | None = None

    def trouble(self, where: str) -> ChatTrouble:
        hopeless = self.type == "invalid_request_error" or self.code == Code.POISONED
        return ChatTrouble(f"{where}: {self.message}", again=not hopeless)


class _Holdfast(msgspec.Struct):
    exact: bool = True


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: ErrorSaid | None = None
    holdfast: _Holdfast = msgspec.field(default_factory=_Holdfast)


class SseReader:
    """Server-sent events from bytes, however they were cut: (field, value) pairs, "" for a comment's field."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[tuple[str, str]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) + self._size > EVENT_BYTES_MAX:
            raise ChatTrouble("the server sent an event without an end", again=False)
        for line in lines:
            yield from self._line(line.removesuffix(b"\r").decode(errors="replace"))

    def _line(self, line: str) -> Iterator[tuple[str, str]]:
        if not line:
            if self._data:
                yield "data", "\n".join(self._data)
            self._data, self._size = [], 0
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "":
            yield "", value
        elif name == "data":
            self._data.append(value)
            self._size += len(value)


_QUEUED = re.compile(r"queued (\d{1,9})")
_RESUMED = re.compile(r"resumed after (\d{1,9}(?:\.\d{1,9})?) s")


def of_comment(text: str) -> Event | None:
    """What a comment says; every server may send others."""
    if text.partition(":")[0] in ("provisioning", "held", "waiting"):  # why, behind it; older servers say "waiting"
        return Waiting()
    if found := _QUEUED.fullmatch(text):
        return Waiting(int(found[1]))
    found = _RESUMED.fullmatch(text)
    return Resumed(float(found[1])) if found else None


class AnswerReader:
    """Events of one answer from its bytes."""

    def __init__(self) -> None:
        self.done = False
        self._sse = SseReader()
        self._ended = Ended("", True)

    def feed(self, data: bytes) -> Iterator[Event]:
        for name, value in self._sse.feed(data):
            if not name:
                event = of_comment(value)
                if event is not None:
                    yield event
            elif value == "[DONE]":
                self.done = True
                yield self._ended
                return
            else:
                yield from self._chunk(value)

    def _chunk(self, text: str) -> Iterator[Event]:
        try:
            chunk = msgspec.json.decode(text, type=_Chunk)
        except msgspec.DecodeError as error:
            raise ChatTrouble(f"the server's response is not a chat answer: {error}", again=False) from None
        if chunk.error is not None:
            raise chunk.error.trouble("the answer broke off")
        for choice in chunk.choices[:1]:
            if choice.delta.content:
                yield Said(choice.delta.content)
            if choice.finish_reason is not None:
                self._ended = Ended(choice.finish_reason, chunk.holdfast.exact)
