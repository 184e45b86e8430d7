"""`holdfast get models` and `holdfast get nodes`: show a fleet's desired and observed state."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.deployments.book import StoreOption, answered
from holdfast.cli.fleet.observed import DeploymentOption, FleetStore, ObservedFleet, fleet_at, where
from holdfast.cli.fleet.waiting import trouble_of
from holdfast.cli.fleet.words import NodeShown, model_shown, node_shown, show_models, show_nodes
from holdfast.cli.screen import Screen
from holdfast.cli.status import show_json
from holdfast.cli.terminal import Terminal, write_out
from holdfast.settings import Environment, Looks
from holdfast.spec.settings import about

LOOK_S = 1.0  # between two pages, where nothing happens: ages grow
CLEARED = "\x1b[H\x1b[2J"

Watch = Annotated[bool, about("Show again after every change, until Ctrl-C.", flag="--watch", short="-w")]
Show = Callable[[Screen, ObservedFleet], None]


class Models(CommandOptions, frozen=True):
    """`holdfast get models`."""

    key: Annotated[str, about("Show only this model (default: all).", positional=True, flag="KEY")] = ""
    json: Json = False
    watch: Watch = False
    deployment: DeploymentOption = ""
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        return answered(self._run(where(self.store, env), env))

    async def _run(self, url: str, env: Environment) -> int:
        async with fleet_at(url, self.deployment, env) as fleet:
            if self.key:
                fleet.observed.check(self.key)
            return await _shown(fleet, self._object, self._show, as_json=self.json, watch=self.watch)

    def _object(self, observed: ObservedFleet) -> Any:
        if self.key:
            return model_shown(observed, self.key)
        return [model_shown(observed, key) for key in observed.keys]

    def _show(self, screen: Screen, observed: ObservedFleet) -> None:
        keys = [self.key] if self.key else observed.keys
        if not keys:
            screen.line("this fleet has no models; `holdfast deploy KEY --model …` adds one")
            return
        show_models(screen, [model_shown(observed, key) for key in keys], time.time())
        if trouble := trouble_of(observed):
            screen.line(f"\n{trouble}", style="yellow")


class Nodes(CommandOptions, frozen=True):
    """`holdfast get nodes`."""

    json: Json = False
    watch: Watch = False
    deployment: DeploymentOption = ""
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        return answered(self._run(where(self.store, env), env))

    async def _run(self, url: str, env: Environment) -> int:
        async with fleet_at(url, self.deployment, env) as fleet:
            return await _shown(fleet, self._object, self._show, as_json=self.json, watch=self.watch)

    def _object(self, observed: ObservedFleet) -> Any:
        return _nodes(observed)

    def _show(self, screen: Screen, observed: ObservedFleet) -> None:
        if observed.nodes:
            show_nodes(screen, _nodes(observed), time.time())
        if trouble := trouble_of(observed):
            screen.line(trouble, style="yellow")


def _nodes(observed: ObservedFleet) -> list[NodeShown]:
    return [node_shown(one, lost=name in observed.record.lost) for name, one in sorted(observed.nodes.items())]


async def _shown(
    fleet: FleetStore, made: Callable[[ObservedFleet], Any], show: Show, *, as_json: bool, watch: bool
) -> int:
    """Show one page or, with `watch`, one for every change: on a terminal in place of the last, as JSON a line each."""
    if not watch:
        if as_json:
            return show_json(made(fleet.observed))
        show(Screen(), fleet.observed)
        return 0
    terminal, last = Terminal(), ""
    moves = terminal.can_move and not as_json
    while terminal.is_shown:
        found = msgspec.json.encode(made(fleet.observed)).decode()
        text = f"{found}\n" if as_json else _page(terminal, show, fleet.observed)
        if last != (last := text if moves else found):  # only where one page replaces another, ages are worth one
            write_out(CLEARED + text if moves else text)
        await fleet.book.news(LOOK_S)
    raise BrokenPipeError


def _page(terminal: Terminal, show: Show, observed: ObservedFleet) -> str:
    page = io.StringIO()
    show(Screen(Terminal(page, terminal.width, Looks(terminal.colour, dumb=False))), observed)
    return page.getvalue()
