"""A bar on standard error while many bytes move; where nobody watches a line for each piece of work, or nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

SHARES = 4  # lines per piece of work where nobody watches: it moves, and does not fill


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
    if not sys.stderr.isatty():
        yield Lines(lambda line: print(line, flush=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task("", total=None)
    shown = ""

    def tell(work: str, done: int, total: int | None) -> None:
        nonlocal shown
        if work != shown:
            shown = work
            progress.reset(task)
        progress.update(task, description=work, completed=done, total=total)
        progress.start()  # where there is nothing to tell there is no bar; a second time it does nothing

    try:
        yield tell
    finally:
        progress.stop()


class Lines:
    """Progress as lines, a few per piece of work."""

    def __init__(self, write: Callable[[str], None], shares: int = SHARES, unknown: str = " …") -> None:
        self._write, self._shares, self._unknown = write, shares, unknown
        self._last = ("", -1)

    def __call__(self, work: str, done: int, total: int | None) -> None:
        share = done * self._shares // total if total else 0
        if (work, share) != self._last:
            self._last = (work, share)
            self._write(f"{work}: {done / 2**20:.0f} of {total / 2**20:.0f} MiB" if total else f"{work}{self._unknown}")
