"""Comments by which a stream's client learns how its request waits: events that say nothing to who reads the answer.

Always true: a comment goes out when it says something else than the last, at most once a second, and again after a
while in which nothing changed, to keep the connection warm; none goes out in the first second of a wait. An answer
begins with one, before any engine's output, only where its model is brought up when it is asked for: there the wait may
take longer than clients and what is between keep a silent connection. Elsewhere an error still has its status.
"""

from __future__ import annotations

from holdfast.streams.states import State, Waiting
from holdfast.wire.http.connection import HttpConnection

NOTE_S = 1.0
WHY_CHARS_MAX = 300
WARM_S = 5.0  # proxies end what was silent for half a minute or more

_EVENT_STREAM = b"text/event-stream; charset=utf-8"
_NO_CACHE = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


def begin_events(connection: HttpConnection, data: bytes) -> None:
    """The head of a streamed answer, and its first bytes."""
    connection.start_stream(_EVENT_STREAM, _NO_CACHE, data)


class WaitNotes:
    """What one client was told."""

    __slots__ = ("_connection", "_told", "_told_s")

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self._told = b""
        self._told_s = 0.0

    def tell(self, waiting: Waiting, now_s: float) -> None:
        connection = self._connection
        note = _note(waiting)
        silent_s = now_s - max(self._told_s, waiting.since_s)
        if silent_s < NOTE_S or (note == self._told and silent_s < WARM_S) or connection.paused:
            return
        if connection.streaming:
            connection.write(note)
        elif waiting.wanted:
            begin_events(connection, note)
        else:
            return
        self._told, self._told_s = note, now_s


def _in_a_line(text: str) -> str:
    """An event ends with its line."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:WHY_CHARS_MAX])


def _note(waiting: Waiting) -> bytes:
    if waiting.state is State.QUEUED:
        return b": queued %d\n\n" % waiting.place
    why = f": {_in_a_line(waiting.why)}" if waiting.why else ""
    return f": {waiting.state.lower()}{why}\n\n".encode()
