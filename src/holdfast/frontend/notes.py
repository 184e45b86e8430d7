"""Comment events that tell a streaming client how its request waits; they are no part of the answer.

Always true:
- A comment is sent when it differs from the last, at most once a second. After `WARM_S` without a change it is sent
  again, to keep the connection open. None is sent in the first second of a wait.
- An answer begins with a comment, before any engine output, only if its model is started on request: that wait may be
  longer than clients and proxies keep a silent connection. Otherwise an error can still have its HTTP status.
"""

from __future__ import annotations

from holdfast.frontend.api.errors import ApiError
from holdfast.streams.flight import RequestState, WaitStatus
from holdfast.wire.http.connection import HttpConnection

NOTE_S = 1.0
WHY_CHARS_MAX = 300
WARM_S = 5.0  # proxies close connections that are silent for half a minute or more

_EVENT_STREAM = b"text/event-stream; charset=utf-8"
_NO_CACHE = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


def begin_events(connection: HttpConnection, data: bytes) -> None:
    """Send the head of a streamed answer, and its first bytes."""
    connection.start_stream(_EVENT_STREAM, _NO_CACHE, data)


def send_error(connection: HttpConnection, error: ApiError) -> None:
    """Send an error as the answer, or as the last event of a stream that has begun."""
    if connection.streaming:
        connection.end_stream(b"data: " + error.body() + b"\n\n")
    else:
        connection.respond(error.status, error.body(), headers=error.headers)


class WaitNotes:
    """Tells one client how its request waits."""

    __slots__ = ("_connection", "_last", "_last_s")

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self._last = b""
        self._last_s = 0.0

    def tell(self, waiting: WaitStatus, now_s: float) -> None:
        connection = self._connection
        note = _note(waiting)
        silent_s = now_s - max(self._last_s, waiting.since_s)
        if silent_s < NOTE_S or (note == self._last and silent_s < WARM_S) or connection.paused:
            return
        if connection.streaming:
            connection.write(note)
        elif waiting.wanted:
            begin_events(connection, note)
        else:
            return
        self._last, self._last_s = note, now_s


def _note(waiting: WaitStatus) -> bytes:
    if waiting.state is RequestState.QUEUED:
        return b": queued %d\n\n" % waiting.place
    # A line break would end the event.
    why = "".join(sign if sign.isprintable() else " " for sign in waiting.why[:WHY_CHARS_MAX])
    return f": {waiting.state.lower()}{f': {why}' if why else ''}\n\n".encode()
