"""A bar on standard error while many bytes move; where nobody watches a line for each piece of work, or nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from holdfast.cli.terminal import Terminal
from holdfast.roles.progress import Lines

BAR_CELLS = 30
BAR_S = 0.1  # between two looks of a bar


@contextlib.contextmanager
def loading(text: str) -> Iterator[Callable[[int, int], None]]:
    """Call what you get with bytes done and bytes in all."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with works() as tell:
        yield lambda done, total: tell(text, done, total)


@contextlib.contextmanager
def works() -> Iterator[Callable[[str, int, int | None], None]]:
    """Call what you get with what is done now, bytes done and bytes in all, None for not known."""
    terminal = Terminal(sys.stderr)
    if not terminal.can_move:
        yield Lines(Terminal().line)
        return
    bar = Bar(terminal)
    try:
        yield bar
    finally:
        terminal.move("")


class Bar:
    """Progress as a line that changes: a bar, bytes, and how fast they come."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._work, self._began_s, self._shown_s = "", 0.0, 0.0

    def __call__(self, work: str, done: int, total: int | None) -> None:
        now_s = time.monotonic()
        if work != self._work:
            self._work, self._began_s, self._shown_s = work, now_s, 0.0
        if now_s - self._shown_s < BAR_S and done != total:
            return
        self._shown_s = now_s
        part = round(BAR_CELLS * done / total) if total else 0
        bar = f"[{'#' * part}{' ' * (BAR_CELLS - part)}] " if total else ""
        size = f"{done / 2**20:.1f}/{total / 2**20:.1f}" if total else f"{done / 2**20:.1f}"
        speed = f", {done / 2**20 / (now_s - self._began_s):.1f} MiB/s" if now_s > self._began_s else ""
        self._terminal.move(f"{work} {bar}{size} MiB{speed}")
