"""Requests that a client has sent ahead of their answers, and what all its unanswered bodies hold. Pure.

Always true: requests are answered in the order in which they came; how many bytes are held is told with every change,
but for bodies so small that ordinary requests are read at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from holdfast.wire.http.request import HttpRequest, RefusedRequest, RequestReader
from holdfast.wire.http.response import RETRY_SOON

# Requests a client may send ahead of their answers; browsers use 1, and memory must have a bound.
PIPELINE_MAX = 16
# Bodies up to this size, together, are not counted against the budget of all connections.
UNCOUNTED_BYTES_MAX = 64 * 1024


class Ahead:
    """One connection's. `buffered` is told how many bytes more, or less, are held than was told before."""

    def __init__(self, reader: RequestReader, bytes_max: int, buffered: Callable[[int], None]) -> None:
        self._reader = reader
        self._bytes_max = bytes_max
        self._buffered = buffered
        self._waiting: deque[HttpRequest] = deque()
        self.buffered_bytes = 0  # of bodies that are not answered yet, as it was last told

    def __len__(self) -> int:
        return len(self._waiting)

    def append(self, request: HttpRequest) -> None:
        """Keep a request until its turn; RefusedRequest: there are too many."""
        ahead_bytes = len(request.body) + sum(len(waiting.body) for waiting in self._waiting)
        if len(self._waiting) >= PIPELINE_MAX or ahead_bytes > self._bytes_max:
            limit = f"{PIPELINE_MAX} requests or {self._bytes_max} bytes sent ahead on one connection"
            raise RefusedRequest(429, f"more than {limit}", request, RETRY_SOON)
        self._waiting.append(request)

    def pop(self) -> HttpRequest:
        """Return the one whose turn it is."""
        request = self._waiting.popleft()
        self.count()
        return request

    def drop(self) -> None:
        """Free all bodies: no more of them is answered."""
        self._waiting.clear()
        self._reader.drop_body()
        self.count()

    def count(self) -> None:
        """Tell how much more or less is held than was told last."""
        held = self._reader.body_bytes
        if self._waiting:
            held += sum(len(request.body) for request in self._waiting)
        held = held if held > UNCOUNTED_BYTES_MAX else 0
        if held != self.buffered_bytes:
            more, self.buffered_bytes = held - self.buffered_bytes, held
            self._buffered(more)
