"""Child processes that say JSON objects, one a line on stdout, and take orders, one a line on stdin.

Always true: every wait for one has a bound; what a kill cut off in the middle of its line was never said; `drain`
returns everything that was said before it was called.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Self

END_S = 60.0  # for a process to be over; tearing down many GiB of mappings takes the kernel a while


class ChildFailed(Exception):
    """A child reported an error, or ended; the text has its last line of log."""


class Child:
    """A child process, `python ARGUMENTS…`, with stderr in `log` if given. A context manager that ends it."""

    def __init__(self, *arguments: str, log: Path | None = None, folder: Path | None = None) -> None:
        errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if log is not None else None
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=folder
        )
        if errors is not None:
            os.close(errors)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._orders, self._pipe = self.process.stdin, self.process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        self._log = log
        self._partial = b""
        self._said: deque[Any] = deque()
        self.over = False  # its stdout has ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the child's stdin, which ends it; kill it if it does not end."""
        try:
            self._orders.close()
            self.process.wait(END_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
        self.reap()

    # -- what it says

    def _read(self) -> None:
        while not self._pipe.closed and (piece := self._pipe.read(1 << 16)) is not None:
            if not piece:
                self.over = True
                return
            self._partial += piece
            *lines, self._partial = self._partial.split(b"\n")
            self._said += map(json.loads, lines)

    def drain(self) -> list[Any]:
        """Return all lines that were not read yet."""
        self._read()
        said, self._said = list(self._said), deque()
        return said

    def next(self, bound_s: float) -> Any:
        """Return its next line; ChildFailed after `bound_s`."""
        deadline_s = time.monotonic() + bound_s
        while True:
            self._read()
            if self._said:
                return self._said.popleft()
            if self.over:
                raise ChildFailed(self.last_words())
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise ChildFailed(f"nothing was said for {bound_s:g} s")
            select.select([self._pipe], [], [], left_s)

    def until(self, event: str, bound_s: float) -> dict[str, Any]:
        """Return the next line with this `event`; ChildFailed if an `error` comes first."""
        deadline_s = time.monotonic() + bound_s
        while True:
            try:
                said: dict[str, Any] = self.next(max(0.0, deadline_s - time.monotonic()))
            except ChildFailed as failed:
                raise ChildFailed(f"no {event!r} within {bound_s:g} s: {failed}") from None
            if said["event"] == "error":
                raise ChildFailed(f"it failed before {event!r}: {said['error']}")
            if said["event"] == event:
                return said

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log is not None else []
        return lines[-1] if lines else "it ended without a word"

    # -- what is done to it

    def tell(self, order: str) -> None:
        try:
            self._orders.write(order.encode() + b"\n")
            self._orders.flush()
        except BrokenPipeError:
            raise ChildFailed(f"it had ended before {order!r}") from None

    def ask(self, order: str, bound_s: float) -> Any:
        self.tell(order)
        return self.next(bound_s)

    def kill(self) -> float:
        """Send SIGKILL; return when that was."""
        killed_s = time.monotonic()
        self.process.kill()
        return killed_s

    def reap(self) -> None:
        """Kill it if it still runs, and wait for its end; lines that were not read are kept."""
        self.process.kill()
        self.process.wait(END_S)
        self._read()
        self._pipe.close()
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
