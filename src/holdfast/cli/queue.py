"""`holdfast queue`: which requests wait in the frontends of one state directory, for what, and in which place; and how
one of them is ended.

Always true: without `--kill` it only looks; a frontend that does not tell is named, and nothing is said for it; what a
client wrote moves no cursor.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from holdfast.cli.arguments import Asked, Json
from holdfast.cli.checks import readable
from holdfast.cli.deployments.book import StoreOption, answered, opened, store_of
from holdfast.cli.ps import show_json
from holdfast.cli.screen import Screen, tilde
from holdfast.cli.terminal import Cell, write_out
from holdfast.core.address import parse_address
from holdfast.core.errors import UserError
from holdfast.settings import Environment
from holdfast.spec.arguments import UsageError
from holdfast.spec.settings import about
from holdfast.store.contract import StoreUnavailable
from holdfast.streams.kills import NAME, Kill
from holdfast.streams.kills import ask as ask_to_end
from holdfast.supervise.asking import ask
from holdfast.supervise.records import Record, read_records
from holdfast.supervise.status import ANSWER_S
from holdfast.wire.net import SocketNetwork

PATH = "/v1/requests"
TITLES = ("id", "model", "state", "place", "waited", "tier", "frontend")
RIGHT = ("place", "waited")
WAITS = ("QUEUED", "PROVISIONING", "HELD")
COLOURS = {**dict.fromkeys(WAITS, "yellow"), "RUNNING": "green", "DISPATCHED": "green"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as its frontend tells it."""

    id: str
    model: str
    state: str
    place: int | None = None
    waited_s: float | None = None
    why: str = ""
    tier: str = ""
    request_id: str = ""
    stream: bool = False
    created: float = 0.0
    frontend: str = ""


class _Page(msgspec.Struct, frozen=True):
    data: list[Row]
    has_more: bool = False


class Told(msgspec.Struct, frozen=True):
    """What all frontends said."""

    rows: list[Row]
    notes: list[str]  # of those that did not say all


class Killed(msgspec.Struct, frozen=True):
    """What became of requests that were to end."""

    name: str
    ended: list[str]  # ids
    over: str  # none was under way, and the latest of that name ended so
    silent: list[str]  # frontends that did not answer

    @property
    def told(self) -> str:
        if not self.ended:
            return f"request {self.name} is over already: {self.over}" if self.over else ""
        which = "" if self.ended == [self.name] else f": {', '.join(self.ended)}"
        return f"{'request' if len(self.ended) == 1 else 'requests'} {self.name} ended{which}"

    @property
    def trouble(self) -> str:
        """What a person has to know that was not told; "": nothing."""
        if self.silent:
            unsure = "" if self.ended or self.over else f"whether {self.name} was ended is not known: "
            return f"{unsure}{', '.join(self.silent)} did not answer, and may have one of that name; ask again"
        if not self.ended and not self.over:
            return f"no frontend has a request {self.name!r}; `holdfast queue --all` shows those that are under way"
        return ""


class Queue(Asked, frozen=True):
    """`holdfast queue`."""

    json: Json = False
    all: Annotated[bool, about("Also show requests that are on a worker.")] = False
    kill: Annotated[
        str | None,
        about(
            "Cancel the queued or running request with this id, or all that clients gave this name; clients get "
            "an error."
        ),
    ] = None
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        if self.kill is not None:
            if not NAME.fullmatch(self.kill):
                raise UsageError(f"--kill {self.kill!r} is not a request id or name; `holdfast queue --all` shows ids")
            url = store_of(self.store, Path(env.state_dir), "holdfast up")
            return answered(self._kill(url, self.kill, Path(env.state_dir)))
        if self.store:
            raise UsageError("--store only works with --kill; leave it out to list requests of this state directory")
        state_dir = readable(env.state_dir)
        told = asyncio.run(ask_all(state_dir))
        rows = [row for row in told.rows if self.all or row.state in WAITS]
        if self.json:
            return show_json(Told(rows, told.notes))
        show(Screen(), state_dir, rows, told.notes)
        return 0

    async def _kill(self, url: str, name: str, state_dir: Path) -> int:
        kill, token = Kill(name=name, at_unix_s=time.time()), f"{random.Random().getrandbits(64):016x}"
        async with opened(url, ()) as book:
            try:
                found = await ask_to_end(book.store, kill, token)
            except StoreUnavailable as error:
                unsure = f"whether {name} was ended is not known, and `holdfast queue --all` shows it"
                raise UserError(f"{unsure}: {error}") from error
        silent = found.silent
        if not silent and not found.ended and not self.store:  # the store forgets one that is stopped after a moment
            silent = [one.name for one, page in await _pages(state_dir) if page is None and one.alive]
        killed = Killed(name, found.ended, found.over, [] if name in found.ended else silent)
        if self.json:
            show_json(killed)
        elif told := killed.told:
            write_out(f"{told}\n")
        if trouble := killed.trouble:
            raise UserError(trouble)
        return 0


async def ask_all(state_dir: Path) -> Told:
    """All frontends at once."""
    named = await _pages(state_dir)
    rows = [msgspec.structs.replace(row, frontend=record.name) for record, page in named if page for row in page.data]
    away = "did not answer: it is gone, busy, or requires an API key"
    notes = [f"{record.name} {away}" for record, page in named if page is None]
    notes += [f"{record.name} has more requests than are listed" for record, page in named if page and page.has_more]
    return Told(sorted(rows, key=_order), notes)


async def _pages(state_dir: Path) -> list[tuple[Record, _Page | None]]:
    frontends = [record for record in read_records(state_dir) if record.role == "frontend" and record.status]
    return list(zip(frontends, await asyncio.gather(*map(_ask_one, frontends)), strict=True))


async def _ask_one(record: Record) -> _Page | None:
    return read_page(await ask(parse_address(record.status), SocketNetwork(), ANSWER_S, PATH))


def read_page(found: dict[str, Any] | None) -> _Page | None:
    """What a frontend said; None: nothing of that."""
    try:
        return msgspec.convert(found, _Page) if found is not None else None
    except msgspec.ValidationError:
        return None


def _order(row: Row) -> tuple[Any, ...]:
    """By model, those who wait first, and each line in its order."""
    return row.model, row.state not in WAITS, row.frontend, row.place or 0, row.created


def show(screen: Screen, state_dir: Path, rows: Sequence[Row], notes: Sequence[str]) -> None:
    if rows:
        screen.terminal.table(TITLES, [_cells(row) for row in rows], right=RIGHT)
        for model, why in sorted({(row.model, row.why) for row in rows if row.why}):
            screen.line(f"  {_plain(model)}: {_plain(why)}", style="yellow")
    else:
        screen.line(f"no request waits in {tilde(state_dir)}")
    for note in notes:
        screen.line(note, style="yellow")


def _cells(row: Row) -> list[Cell]:
    return [
        (_plain(row.id), ""),
        (_plain(row.model), ""),
        (_plain(row.state), COLOURS.get(row.state, "")),
        (str(row.place) if row.place is not None else "–", ""),
        (f"{row.waited_s:.1f} s" if row.waited_s is not None else "–", ""),
        (_plain(row.tier), ""),
        (row.frontend, ""),
    ]


def _plain(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text)
