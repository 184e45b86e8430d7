"""`holdfast get requests` lists the requests that wait in the frontends of one state directory: what each waits for,
and its place in the queue. `holdfast delete request` ends one.

Always true: without `--kill` the command only reads; a frontend that does not answer is named; control characters in a
client's text do not reach the terminal.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.checks import readable
from holdfast.cli.deployments.book import StoreOption, answered, opened, store_of
from holdfast.cli.screen import Screen, tilde
from holdfast.cli.status import show_json
from holdfast.cli.terminal import Cell, write_out
from holdfast.core.address import parse_address
from holdfast.core.errors import UserError
from holdfast.settings import Environment
from holdfast.spec.arguments import UsageError
from holdfast.spec.settings import about
from holdfast.store.contract import StoreUnavailable
from holdfast.streams.kills import NAME, KillRequest
from holdfast.streams.kills import ask as ask_to_end
from holdfast.supervise.records import Record, read_records
from holdfast.supervise.status import ANSWER_S
from holdfast.supervise.status_client import get_facts
from holdfast.wire.net import SocketNetwork

PATH = "/v1/requests"
TITLES = ("id", "model", "state", "place", "waited", "tier", "frontend")
RIGHT = ("place", "waited")
WAITS = ("QUEUED", "PROVISIONING", "HELD")
COLOURS = {**dict.fromkeys(WAITS, "yellow"), "RUNNING": "green", "DISPATCHED": "green"}


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as its frontend reports it."""

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
    data: list[RequestRow]
    has_more: bool = False


class RequestList(msgspec.Struct, frozen=True):
    """The answers of all frontends."""

    rows: list[RequestRow]
    notes: list[str]  # about frontends with incomplete answers


class EndedRequests(msgspec.Struct, frozen=True):
    """The result of ending requests."""

    name: str
    ended: list[str]  # ids
    over: str  # how the latest request of that name ended, if none is running
    silent: list[str]  # frontends that did not answer

    @property
    def summary(self) -> str:
        if not self.ended:
            return f"request {self.name} is over already: {self.over}" if self.over else ""
        which = "" if self.ended == [self.name] else f": {', '.join(self.ended)}"
        return f"{'request' if len(self.ended) == 1 else 'requests'} {self.name} ended{which}"

    @property
    def trouble(self) -> str:
        """Return what went wrong, or ""."""
        if self.silent:
            unsure = "" if self.ended or self.over else f"whether {self.name} was ended is not known: "
            return f"{unsure}{', '.join(self.silent)} did not answer, and may have one of that name; ask again"
        if not self.ended and not self.over:
            return f"no frontend has a request {self.name!r}; `holdfast get requests --all` shows which are under way"
        return ""


class RequestsCommand(CommandOptions, frozen=True):
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
                shown = "`holdfast get requests --all` shows ids"
                raise UsageError(f"{self.kill!r} is not a request id or name; {shown}")
            url = store_of(self.store, Path(env.state_dir), "holdfast up")
            return answered(self._kill(url, self.kill, Path(env.state_dir)))
        if self.store:
            raise UsageError("--store only works with --kill; leave it out to list requests of this state directory")
        state_dir = readable(env.state_dir)
        found = asyncio.run(ask_all(state_dir))
        rows = [row for row in found.rows if self.all or row.state in WAITS]
        if self.json:
            return show_json(RequestList(rows, found.notes))
        show(Screen(), state_dir, rows, found.notes)
        return 0

    async def _kill(self, url: str, name: str, state_dir: Path) -> int:
        kill, token = KillRequest(name=name, at_unix_s=time.time()), f"{random.Random().getrandbits(64):016x}"
        async with opened(url, ()) as book:
            try:
                found = await ask_to_end(book.store, kill, token)
            except StoreUnavailable as error:
                unsure = f"whether {name} was ended is not known, and `holdfast get requests --all` shows it"
                raise UserError(f"{unsure}: {error}") from error
        silent = found.silent
        if not silent and not found.ended and not self.store:  # a frozen frontend soon disappears from the store
            silent = [one.name for one, page in await _pages(state_dir) if page is None and one.alive]
        killed = EndedRequests(name, found.ended, found.over, [] if name in found.ended else silent)
        if self.json:
            show_json(killed)
        elif summary := killed.summary:
            write_out(f"{summary}\n")
        if trouble := killed.trouble:
            raise UserError(trouble)
        return 0


class EndRequestCommand(CommandOptions, frozen=True):
    id: Annotated[
        str, about("Id of the request, or the name that clients gave it.", positional=True, required=True, flag="ID")
    ] = ""
    json: Json = False
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        return RequestsCommand(json=self.json, kill=self.id, store=self.store).run(env)


async def ask_all(state_dir: Path) -> RequestList:
    named = await _pages(state_dir)
    rows = [msgspec.structs.replace(row, frontend=record.name) for record, page in named if page for row in page.data]
    away = "did not answer: it is gone, busy, or requires an API key"
    notes = [f"{record.name} {away}" for record, page in named if page is None]
    notes += [f"{record.name} has more requests than are listed" for record, page in named if page and page.has_more]
    return RequestList(sorted(rows, key=_order), notes)


async def _pages(state_dir: Path) -> list[tuple[Record, _Page | None]]:
    frontends = [record for record in read_records(state_dir) if record.role == "frontend" and record.status]
    return list(zip(frontends, await asyncio.gather(*map(_ask_one, frontends)), strict=True))


async def _ask_one(record: Record) -> _Page | None:
    """Return a frontend's answer, or None if there is none."""
    found = await get_facts(parse_address(record.status), SocketNetwork(), ANSWER_S, PATH)
    try:
        return msgspec.convert(found, _Page) if found is not None else None
    except msgspec.ValidationError:
        return None


def _order(row: RequestRow) -> tuple[Any, ...]:
    """Return the sort key: by model, waiting requests first, each queue in its order."""
    return row.model, row.state not in WAITS, row.frontend, row.place or 0, row.created


def show(screen: Screen, state_dir: Path, rows: Sequence[RequestRow], notes: Sequence[str]) -> None:
    if rows:
        screen.terminal.table(TITLES, [_cells(row) for row in rows], right=RIGHT)
        for model, why in sorted({(row.model, row.why) for row in rows if row.why}):
            screen.line(f"  {_plain(model)}: {_plain(why)}", style="yellow")
    else:
        screen.line(f"no request waits in {tilde(state_dir)}")
    for note in notes:
        screen.line(note, style="yellow")


def _cells(row: RequestRow) -> list[Cell]:
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
