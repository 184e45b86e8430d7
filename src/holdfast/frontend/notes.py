"""Comment events that tell a streaming client how its request waits; they are no part of the answer.

Always true:
- A comment is sent when it differs from the last, at most once a second. After `WARM_S` without a change it is sent
  again, to keep the connection open. None is sent in the first second of a wait.
- An answer begins with a comment, before any engine output, only if its client asked for that (`x-holdfast-progress`)
  or its model is started on request: that wait may be longer than clients and proxies keep a silent connection.
  Otherwise an error can still have its HTTP status.
- A client that asked for progress also reads when its request is sent to a worker, once for each wait.
"""

from __future__ import annotations

from urllib.parse import quote

from holdfast.frontend.api.errors import ApiError
from holdfast.streams.flight import RequestState, WaitStatus
from holdfast.wire.http.connection import HttpConnection

PROGRESS_HEADER = b"x-holdfast-progress"
QUEUED_HEADER = b"x-holdfast-queued-ms"
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


def add_queued_header(connection: HttpConnection, queued_s: float) -> None:
    """Let the answer's head say how long the request waited, if the head is not sent yet."""
    if not connection.streaming:
        connection.answer_headers = (*connection.answer_headers, (QUEUED_HEADER, b"%d" % round(queued_s * 1000)))


class WaitNotes:
    """Tells one client how its request waits. `progress`: the model's name, if the client asked for progress."""

    __slots__ = ("_connection", "_dispatched", "_last", "_last_s", "_progress", "_since_s")

    def __init__(self, connection: HttpConnection, began_s: float = 0.0, progress: str = "") -> None:
        self._connection = connection
        self._progress = progress
        self._since_s = began_s  # of the current wait
        self._last = b""  # the last comment about waiting, as of the start of its wait
        self._last_s = 0.0
        self._dispatched = False  # the last comment said so

    def tell(self, waiting: WaitStatus, now_s: float) -> None:
        """Tell how the request waits, if that is news or the connection was silent for long."""
        self._since_s = waiting.since_s
        silent_s = now_s - max(self._last_s, waiting.since_s)
        news = _note(waiting, self._progress, waiting.since_s)
        if silent_s < NOTE_S or (news == self._last and silent_s < WARM_S):
            return
        if self._send(_note(waiting, self._progress, now_s), begins=waiting.wanted or bool(self._progress)):
            self._last, self._last_s, self._dispatched = news, now_s, False

    def tell_dispatched(self, worker: str, now_s: float) -> None:
        """Tell a client that asked for progress that its request was sent to a worker."""
        if self._progress and not self._dispatched:
            note = f": dispatched worker={_word(worker)} waited_s={max(0.0, now_s - self._since_s):.1f}\n\n"
            self._dispatched, self._last = self._send(note.encode(), begins=True), b""

    def _send(self, note: bytes, *, begins: bool) -> bool:
        """Send a comment; return False if the client does not read, or if its answer must not begin with this."""
        connection = self._connection
        if connection.paused or not (connection.streaming or begins):
            return False
        if connection.streaming:
            connection.write(note)
        else:
            begin_events(connection, note)
        return True


def _note(waiting: WaitStatus, progress: str, now_s: float) -> bytes:
    # A line break would end the event.
    why = "".join(sign if sign.isprintable() else " " for sign in waiting.why[:WHY_CHARS_MAX])
    if progress:
        words = f"position={waiting.place} model={_word(progress)} waited_s={max(0.0, now_s - waiting.since_s):.1f}"
        return f": {waiting.state.lower()} {words}{f' why={why}' if why else ''}\n\n".encode()
    if waiting.state is RequestState.QUEUED:
        return b": queued %d\n\n" % waiting.place
    return f": {waiting.state.lower()}{f': {why}' if why else ''}\n\n".encode()


def _word(text: str) -> str:
    """Return the text as one word of ASCII: clients split a comment at spaces."""
    return quote(text[:WHY_CHARS_MAX], safe="/:@+,=", errors="replace")
