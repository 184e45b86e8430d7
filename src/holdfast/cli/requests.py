"""`holdfast get requests` lists the requests in the frontends of one state directory: state, place in the queue,
worker, tokens. `holdfast delete request` ends one. `holdfast queue`, the earlier command, lists those that wait and
ends one with `--kill`.

Always true: listing only reads; a frontend that does not answer in time is named, and the others are shown; control
characters in a client's text do not reach the terminal.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.checks import readable
from holdfast.cli.deployments.book import StoreOption, answered, opened, store_of
from holdfast.cli.deployments.words import age
from holdfast.cli.screen import Screen, tilde
from holdfast.cli.status import show_json
from holdfast.cli.terminal import Cell, Terminal, write_out
from holdfast.cli.watching import Watch, show_pages
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
LOOK_S = 1.0  # between two pages of `--watch`
TITLES = ("id", "model", "tier", "state", "place", "age", "worker", "tokens")
MORE_TITLES = ("waited", "started", "resumed", "stream", "request id", "frontend")  # of `-o wide`
QUEUE_TITLES = ("id", "model", "state", "place", "waited", "tier", "frontend")
RIGHT = ("place", "waited", "age", "tokens", "resumed")
FORMATS = ("table", "wide", "json", "name")
WAITS = ("QUEUED", "PROVISIONING", "HELD")
COLOURS = {**dict.fromkeys((*WAITS, "RESUMING"), "yellow"), "RUNNING": "green", "DISPATCHED": "green"}


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
    started: float | None = None
    worker: str = ""
    replica: str = ""
    tokens: int | None = None  # None, and so are fields below: an older frontend did not say
    resumed: int | None = None
    resuming: bool = False
    frontend: str = ""


class _Page(msgspec.Struct, frozen=True):
    data: list[RequestRow]
    has_more: bool = False


class RequestList(msgspec.Struct, frozen=True):
    """The answers of all frontends."""

    rows: list[RequestRow]
    notes: list[str]  # about frontends with incomplete answers
    frontends: int = 0  # that were asked


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
            return f"no frontend has a request {self.name!r}; `holdfast get requests` shows which are under way"
        return ""


class RequestsCommand(CommandOptions, frozen=True):
    output: Annotated[str, about("Output format.", flag="--output", short="-o", choices=FORMATS)] = "table"
    json: Annotated[bool, about("Same as -o json.")] = False
    model: Annotated[str, about("Show only requests for this model (default: all).")] = ""
    waiting: Annotated[bool, about("Show only requests that wait.")] = False
    watch: Watch = False

    def run(self, env: Environment) -> int:
        state_dir = readable(env.state_dir)
        as_json = self.json or self.output == "json"
        return asyncio.run(
            show_pages(
                lambda: self._look(state_dir),
                lambda screen, found: self._show(screen, state_dir, found),
                lambda: asyncio.sleep(LOOK_S),
                as_json=as_json,
                watch=self.watch,
            )
        )

    async def _look(self, state_dir: Path) -> RequestList:
        found = await ask_all(state_dir)
        return RequestList([row for row in found.rows if self._wants(row)], found.notes, found.frontends)

    def _wants(self, row: RequestRow) -> bool:
        return self.model in ("", row.model) and (row.state in WAITS or not self.waiting)

    def _show(self, screen: Screen, state_dir: Path, found: RequestList) -> None:
        if self.output == "name":
            for row in found.rows:
                screen.line(f"request/{_plain(row.id)}")
            for note in found.notes:
                Terminal(sys.stderr).line(note)
            return
        titles = (*TITLES, *MORE_TITLES) if self.output == "wide" else TITLES
        none = f"no request {'waits' if self.waiting else 'is under way'} in {tilde(state_dir)}"
        show(screen, found.rows, found.notes, titles, none)


class QueueCommand(CommandOptions, frozen=True):
    """`holdfast queue`, the earlier name of `get requests --waiting` and `delete request`."""

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
        now = "get requests" if self.kill is None else "delete request ID"
        Terminal(sys.stderr).line(f"`holdfast queue` is an old name: use `holdfast {now}`")
        if self.kill is not None:
            return EndRequestCommand(id=self.kill, json=self.json, store=self.store).run(env)
        if self.store:
            raise UsageError("--store only works with --kill; leave it out to list requests of this state directory")
        state_dir = readable(env.state_dir)
        found = asyncio.run(ask_all(state_dir))
        rows = [row for row in found.rows if self.all or row.state in WAITS]
        if self.json:
            return show_json(RequestList(rows, found.notes))
        show(Screen(), rows, found.notes, QUEUE_TITLES, f"no request waits in {tilde(state_dir)}")
        return 0


class EndRequestCommand(CommandOptions, frozen=True):
    id: Annotated[
        str, about("Id of the request, or the name that clients gave it.", positional=True, required=True, flag="ID")
    ] = ""
    json: Json = False
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        if not NAME.fullmatch(self.id):
            raise UsageError(f"{self.id!r} is not a request id or name; `holdfast get requests` shows ids")
        url = store_of(self.store, Path(env.state_dir), "holdfast up")
        return answered(self._end(url, self.id, Path(env.state_dir)))

    async def _end(self, url: str, name: str, state_dir: Path) -> int:
        kill, token = KillRequest(name=name, at_unix_s=time.time()), f"{random.Random().getrandbits(64):016x}"
        async with opened(url, ()) as book:
            try:
                found = await ask_to_end(book.store, kill, token)
            except StoreUnavailable as error:
                unsure = f"whether {name} was ended is not known, and `holdfast get requests` shows it"
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


async def ask_all(state_dir: Path) -> RequestList:
    named = await _pages(state_dir)
    rows = [msgspec.structs.replace(row, frontend=record.name) for record, page in named if page for row in page.data]
    away = "did not answer: it is gone, busy, or requires an API key"
    notes = [f"{record.name} {away}" for record, page in named if page is None]
    notes += [f"{record.name} has more requests than are listed" for record, page in named if page and page.has_more]
    return RequestList(sorted(rows, key=_order), notes, len(named))


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


def show(screen: Screen, rows: Sequence[RequestRow], notes: Sequence[str], titles: Sequence[str], none: str) -> None:
    """Show these columns of the requests, or the line `none`, then why models have no worker, then the notes."""
    if rows:
        now_s = time.time()
        cells = [_cells(row, now_s) for row in rows]
        screen.terminal.table(titles, [[each[title] for title in titles] for each in cells], right=RIGHT)
        for model, why in sorted({(row.model, row.why) for row in rows if row.why}):
            screen.line(f"  {_plain(model)}: {_plain(why)}", style="yellow")
    else:
        screen.line(none)
    for note in notes:
        screen.line(note, style="yellow")


def _cells(row: RequestRow, now_s: float) -> dict[str, Cell]:
    state = "RESUMING" if row.resuming else row.state
    return {
        "id": (_plain(row.id), ""),
        "model": (_plain(row.model), ""),
        "tier": (_plain(row.tier), ""),
        "state": (_plain(state), COLOURS.get(state, "")),
        "place": (_known(row.place), ""),
        "waited": (f"{row.waited_s:.1f} s" if row.waited_s is not None else "–", ""),
        "age": (age(now_s - row.created) if row.created else "–", ""),
        "worker": (_plain(row.worker) or "–", ""),
        "tokens": (_known(row.tokens), ""),
        "started": (time.strftime("%H:%M:%S", time.localtime(row.started)) if row.started else "–", ""),
        "resumed": (_known(row.resumed), "yellow" if row.resumed else ""),
        "stream": ("yes" if row.stream else "no", ""),
        "request id": (_plain(row.request_id), ""),
        "frontend": (row.frontend, ""),
    }


def _known(number: int | None) -> str:
    return "–" if number is None else str(number)


def _plain(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text)
