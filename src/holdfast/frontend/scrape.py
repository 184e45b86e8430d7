"""One scrape shows every frontend of a port: whichever is asked asks the others, and says whose each number is.

Always true: a frontend that does not answer in time is not waited for, and is shown as down; a scrape by a client that
leaves is given up.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from holdfast.core.tasks import Tasks
from holdfast.wire import metrics
from holdfast.wire.http import HttpConnection
from holdfast.wire.metrics_text import merged

log = logging.getLogger("holdfast.frontend")

LABEL = "frontend"
_UP = "holdfast_frontend_up"

# The pages of the others that share this port, by name; None for one that did not answer. Bounded by who gives it.
Others = Callable[[], Awaitable[Mapping[str, bytes | None]]]


async def nobody() -> Mapping[str, bytes | None]:
    """The port is not shared."""
    return {}


class Scrape:
    """Answers `/metrics` for all. Implements `wire.http.Responder` while it asks."""

    def __init__(self, connection: HttpConnection, name: str, own: bytes, others: Others, tasks: Tasks) -> None:
        self._connection: HttpConnection | None = connection
        connection.responder = self
        self._task = tasks.spawn(self._run(name, own, others), "scrape")

    async def _run(self, name: str, own: bytes, others: Others) -> None:
        """The root of its task."""
        try:
            found = await others()
        except Exception:
            log.exception("bug while asking the other frontends")
            found = {}
        if self._connection is not None:
            self._connection.respond(200, page({name: own, **found}), metrics.CONTENT_TYPE)

    def client_gone(self) -> None:
        self._connection = None
        self._task.cancel()

    def client_writable(self) -> None:
        """Nothing waits for it: the answer is one piece."""

    def cut_off(self, why: str) -> None:
        connection, self._connection = self._connection, None
        self._task.cancel()
        if connection is not None:
            connection.respond(503, why.encode(), b"text/plain; charset=utf-8")


def page(pages: Mapping[str, bytes | None]) -> bytes:
    """All that answered, and who did."""
    told = {name: text for name, text in pages.items() if text is not None}
    up = "".join(f'{_UP}{{{LABEL}="{name}"}} {int(name in told)}\n' for name in pages)
    head = f"# HELP {_UP} whether the frontend of this port answered this scrape\n# TYPE {_UP} gauge\n"
    return merged(told, LABEL) + (head + up).encode()
