"""`holdfast get`: which deployments there are, and how they are."""

from __future__ import annotations

import time
from typing import Annotated

from holdfast.cli.arguments import CommandOptions
from holdfast.cli.deployments.book import WITH_FLEETS, Seen, StoreOption, answered, opened, store_of
from holdfast.cli.deployments.names import KINDS
from holdfast.cli.deployments.words import TITLES, Format, as_object, name_of, row, written
from holdfast.cli.screen import Screen
from holdfast.cli.terminal import write_out
from holdfast.settings import Environment
from holdfast.spec.settings import about


class Get(CommandOptions, frozen=True):
    """`holdfast get`."""

    name: Annotated[
        str, about("Show only this deployment (default: all).", positional=True, flag="NAME", kinds=KINDS)
    ] = ""
    output: Format = None
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        found = answered(self._look(store_of(self.store, env.state_dir)))
        if self.output == "name":
            write_out("".join(f"{name_of(one.name)}\n" for one in found))
        elif self.output:
            write_out(written([as_object(one) for one in found], self.output, is_list=not self.name))
        else:
            _show(found)
        return 0

    async def _look(self, url: str) -> list[Seen]:
        """UserError, where only a fleet is."""
        async with opened(url, WITH_FLEETS) as book:
            await book.heard()
            if self.name:
                return [book.one(self.name)]
            if not book.names and book.fleets:
                book.one(min(book.fleets))
            return [seen for name in book.names if (seen := book.seen(name)) is not None]


def _show(found: list[Seen]) -> None:
    screen = Screen()
    if not found:
        screen.line("there are no deployments; `holdfast up -f FILE` starts one")
        return
    screen.terminal.table(TITLES, [row(one, time.time()) for one in found], right=("revision", "ready"))
    for one in found:
        if one.unheard:
            screen.line(f"  {one.unheard}", style="yellow")
        elif one.report is not None and not one.report.is_done:
            screen.line(f"  {one.name}: {one.report.headline}")
