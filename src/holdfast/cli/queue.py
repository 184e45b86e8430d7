"""`holdfast queue`: which requests wait in the frontends of one state directory, for what, and in which place; and how
one of them is ended.

Always true: without `--kill` it only looks; a frontend that does not tell is named, and what a client wrote moves no
cursor.
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
from holdfast.spec.settings import about
from holdfast.store.contract import StoreUnavailable
from holdfast.streams.kills import Kill
from holdfast.streams.kills import ask as ask_to_end
from holdfast.supervise.asking import ask
from holdfast.supervise.records import Record, read_records
from holdfast.supervise.status import ANSWER_S
from holdfast.wire.net import SocketNetwork

PATH = "/v1/requests"
TITLES = ("id", "model", "state", "place", "waited", "tier", "frontend")
RIGHT = ("place", "waited")
WAITS = ("QUEUED", "PROVISIONING")
COLOURS = {"QUEUED": "yellow", "PROVISIONING": "yellow", "RUNNING": "green", "DISPATCHED": "green"}


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


class Queue(Asked, frozen=True):
    """`holdfast queue`."""

    json: Json = False
    all: Annotated[bool, about("Also requests that are on a worker.")] = False
    kill: Annotated[str, about("End this one, by its id, waiting or on a worker: its client is told so.")] = ""
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        if self.kill:
            return answered(_kill(store_of(self.store, Path(env.state_dir), "holdfast up"), self.kill))
        state_dir = readable(env.state_dir)
        told = asyncio.run(ask_all(state_dir))
        rows = [row for row in told.rows if self.all or row.state in WAITS]
        if self.json:
            return show_json(Told(rows, told.notes))
        show(Screen(), state_dir, rows, told.notes)
        return 0


async def _kill(url: str, name: str) -> int:
    kill, token = Kill(name=name, at_unix_s=time.time()), f"{random.Random().getrandbits(64):016x}"
    async with opened(url, ()) as book:
        try:
            done = await ask_to_end(book.store, kill, token)
        except StoreUnavailable as error:
            unsure = f"whether {name} was ended is not known, and `holdfast queue --all` shows it"
            raise UserError(f"{unsure}: {error}") from error
    if not done:
        raise UserError(f"no frontend has a request {name!r}; `holdfast queue --all` shows those that are under way")
    write_out(f"request {name} ended\n")
    return 0


async def ask_all(state_dir: Path) -> Told:
    """All frontends at once."""
    frontends = [record for record in read_records(state_dir) if record.role == "frontend" and record.status]
    pages = await asyncio.gather(*(_ask_one(record) for record in frontends))
    named = list(zip(frontends, pages, strict=True))
    rows = [msgspec.structs.replace(row, frontend=record.name) for record, page in named if page for row in page.data]
    notes = [f"{record.name} does not tell: it is gone, busy, or wants a key" for record, page in named if page is None]
    notes += [f"{record.name} has more than it shows" for record, page in named if page and page.has_more]
    return Told(sorted(rows, key=_order), notes)


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
