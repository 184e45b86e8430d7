"""Shows a page once, or with `--watch` again after every change: on a terminal in place of the last, as JSON a line
each.

Always true: a command that watches ends when its reader has left.
"""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import msgspec

from holdfast.cli.screen import Screen
from holdfast.cli.status import show_json
from holdfast.cli.terminal import Terminal, write_out
from holdfast.settings import Looks
from holdfast.spec.settings import about

CLEARED = "\x1b[H\x1b[2J"
Watch = Annotated[bool, about("Show again after every change, until Ctrl-C.", flag="--watch", short="-w")]
Found = TypeVar("Found")


async def show_pages(
    look: Callable[[], Awaitable[Found]],
    show: Callable[[Screen, Found], None],
    news: Callable[[], Awaitable[object]],
    *,
    as_json: bool,
    watch: bool,
) -> int:
    """Show what `look` finds, by `show` or as JSON; with `watch`, again whenever `news` returns and it has changed."""
    if not watch:
        found = await look()
        if as_json:
            return show_json(found)
        show(Screen(), found)
        return 0
    terminal, last = Terminal(), ""
    moves = terminal.can_move and not as_json
    while terminal.is_shown:
        found = await look()
        line = msgspec.json.encode(found).decode()
        text = f"{line}\n" if as_json else _page(terminal, show, found)
        if last != (last := text if moves else line):  # only where one page replaces another, ages are worth one
            write_out(CLEARED + text if moves else text)
        await news()
    raise BrokenPipeError


def _page(terminal: Terminal, show: Callable[[Screen, Found], None], found: Found) -> str:
    page = io.StringIO()
    show(Screen(Terminal(page, terminal.width, Looks(terminal.colour, dumb=False))), found)
    return page.getvalue()
