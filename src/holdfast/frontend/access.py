"""The access log, for who asks for one: a line per request once it is over, under the request's own name.

Always true: a line is one line whatever a client sent; it costs nothing per token, and nothing at all where it is off.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from holdfast.frontend.reply import Reply
from holdfast.wire.http import HttpConnection, HttpRequest

log = logging.getLogger("holdfast.access")
PATH_CHARS_MAX = 200  # of a path, in the line


@dataclass(slots=True)
class _Entry:
    """One request under way."""

    who: str
    asked: str
    request_id: str
    began_s: float
    told: list[str] = field(default_factory=list)  # what its reply knows


class AccessLog:
    """Writes the lines."""

    def __init__(self) -> None:
        log.setLevel(logging.INFO)  # it was asked for, however quiet the rest is
        self._open: dict[HttpConnection, _Entry] = {}

    def begin(self, connection: HttpConnection, request: HttpRequest) -> None:
        """A request has its name and is about to be answered."""
        loop = asyncio.get_running_loop()
        asked = f"{request.method} {request.path[:PATH_CHARS_MAX]}".encode("unicode_escape").decode()
        asked = asked.replace('"', "%22")
        entry = _Entry(_peer(connection), asked, connection.request_id, loop.time())
        self._open[connection] = entry
        # Not at once: the reply is counted right after the last byte is handed over, and knows the most.
        connection.on_over = lambda status: loop.call_soon(self._write, connection, entry, status, loop.time())

    def measured(self, reply: Reply, model: str) -> None:
        """A reply is over, with an outcome."""
        entry = self._open.get(reply.connection)
        if entry is None:
            return
        entry.told = [f"model={model}", f"outcome={reply.outcome}"]
        entry.told += [f"prompt={reply.prompt_token_count()}", f"completion={reply.completion_token_count()}"]
        if reply.first_token_s:
            entry.told.append(f"ttft_ms={(reply.first_token_s - entry.began_s) * 1000:.1f}")
        if resumed := reply.resumed_count():
            entry.told.append(f"resumed={resumed}")

    def _write(self, connection: HttpConnection, entry: _Entry, status: int, now_s: float) -> None:
        if self._open.get(connection) is entry:
            del self._open[connection]
        shown = str(status) if status else "-"  # the client left before there was one
        took = f"total_ms={(now_s - entry.began_s) * 1000:.1f}"
        parts = (entry.who, f'"{entry.asked}"', shown, f"request={entry.request_id}", took, *entry.told)
        log.info("access %s", " ".join(parts))


def _peer(connection: HttpConnection) -> str:
    """Who asks; a Unix socket's client has no address."""
    name = connection.transport.get_extra_info("peername") if connection.transport is not None else None
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "local"
