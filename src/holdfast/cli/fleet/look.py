"""`holdfast get models` and `holdfast get nodes`: show a fleet's desired and observed state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.deployments.book import StoreOption, answered
from holdfast.cli.fleet.observed import DeploymentOption, FleetStore, ObservedFleet, fleet_at, where
from holdfast.cli.fleet.waiting import trouble_of
from holdfast.cli.fleet.words import ModelShown, NodeShown, model_shown, nodes_shown, show_models, show_nodes
from holdfast.cli.requests import RequestList, ask_all
from holdfast.cli.screen import Screen
from holdfast.cli.watching import Watch, show_pages
from holdfast.settings import Environment
from holdfast.spec.settings import about

LOOK_S = 1.0  # between two pages, where nothing happens: ages grow


class Models(CommandOptions, frozen=True):
    """`holdfast get models`. Requests come from the frontends of this machine, which the table alone does not need."""

    key: Annotated[str, about("Show only this model (default: all).", positional=True, flag="KEY")] = ""
    output: Annotated[
        str,
        about(
            "Output format; wide also shows each replica's requests.",
            flag="--output",
            short="-o",
            choices=("table", "wide", "json"),
        ),
    ] = "table"
    json: Annotated[bool, about("Same as -o json.")] = False
    watch: Watch = False
    deployment: DeploymentOption = ""
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        return answered(self._run(where(self.store, env), env))

    async def _run(self, url: str, env: Environment) -> int:
        as_json = self.json or self.output == "json"
        state_dir = env.state_dir if as_json or self.output == "wide" else None
        async with fleet_at(url, self.deployment, env) as fleet:
            if self.key:
                fleet.observed.check(self.key)
            notes: list[str] = []

            async def look() -> list[ModelShown]:
                requests = await ask_all(Path(state_dir)) if state_dir is not None else None
                notes[:] = requests.notes if requests is not None else []
                return self._models(fleet.observed, requests)

            async def look_json() -> ModelShown | list[ModelShown]:
                models = await look()
                return models[0] if self.key else models

            def show(screen: Screen, found: list[ModelShown]) -> None:
                self._show(screen, fleet.observed, found, notes)

            async def news() -> None:
                await fleet.book.news(LOOK_S)

            if as_json:
                return await show_pages(look_json, lambda *_: None, news, as_json=True, watch=self.watch)
            return await show_pages(look, show, news, as_json=False, watch=self.watch)

    def _models(self, observed: ObservedFleet, requests: RequestList | None) -> list[ModelShown]:
        rows = requests.rows if requests is not None and requests.frontends else None  # else no frontend runs here
        return [model_shown(observed, key, rows) for key in ([self.key] if self.key else observed.keys)]

    def _show(self, screen: Screen, observed: ObservedFleet, found: list[ModelShown], notes: list[str]) -> None:
        if not found:
            screen.line("this fleet has no models; `holdfast deploy KEY --model …` adds one")
            return
        show_models(screen, found, time.time(), wide=self.output == "wide")
        for note in filter(None, (*notes, trouble_of(observed))):
            screen.line(f"\n{note}", style="yellow")


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

            async def look() -> list[NodeShown]:
                return nodes_shown(fleet.observed)

            async def news() -> None:
                await fleet.book.news(LOOK_S)

            def show(screen: Screen, found: list[NodeShown]) -> None:
                self._show(screen, fleet, found)

            return await show_pages(look, show, news, as_json=self.json, watch=self.watch)

    def _show(self, screen: Screen, fleet: FleetStore, found: list[NodeShown]) -> None:
        if found:
            show_nodes(screen, found, time.time())
        if trouble := trouble_of(fleet.observed):
            screen.line(trouble, style="yellow")
