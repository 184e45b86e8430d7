"""`holdfast get events`: show the events of a fleet, read from the store; control sends the same to Redis
(`--redis`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.deployments.book import StoreOption, answered
from holdfast.cli.fleet.observed import PREFIXES, DeploymentOption, fleet_at, where
from holdfast.cli.terminal import Terminal, write_out
from holdfast.discovery.keys import ORDERS, REPORTS
from holdfast.fleet.events import Fact, FactChange, FactReader, StoreOutages, changes, keep_leased
from holdfast.settings import Environment
from holdfast.spec.settings import about

LOOK_S = 5.0  # between two looks, where the store tells of nothing: whether anybody reads it yet
ALL = (*PREFIXES, ORDERS, REPORTS)


class Events(CommandOptions, frozen=True):
    """`holdfast get events`."""

    follow: Annotated[bool, about("Keep showing new events until Ctrl-C.", flag="--follow", short="-f")] = False
    json: Json = False
    deployment: DeploymentOption = ""
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        return answered(self._run(where(self.store, env), env))

    async def _run(self, url: str, env: Environment) -> int:
        terminal, outages, number, before = Terminal(), StoreOutages(), 0, dict[str, Fact]()
        async with fleet_at(url, self.deployment, env, ALL) as fleet:
            reader = FactReader(fleet.deployment)
            while terminal.is_shown:
                now = reader.read(fleet.book.values)
                if left_s := outages.left_s(fleet.book.outages, time.monotonic()):
                    now = keep_leased(before, now)
                for change in changes(before, now, fleet.deployment, time.time()):
                    if change.event is not None:
                        number += 1
                        write_out(self._line(change, number))
                before = now
                if not self.follow:
                    return 0
                await fleet.book.news(min(left_s or LOOK_S, LOOK_S))
        raise BrokenPipeError

    def _line(self, change: FactChange, number: int) -> str:
        event = change.event
        assert event is not None, "asked for one"
        if self.json:
            return msgspec.json.encode({"id": change.id(number), **msgspec.to_builtins(event)}).decode() + "\n"
        at = time.strftime("%H:%M:%S", time.localtime(event.timestamp))
        whose = " ".join(filter(None, (event.model_key, event.replica_id)))
        return f"{at}  {event.event_type:<12}  {whose}  {_told(event.data)}\n"


def _told(data: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in data.items() if value not in ("", None))
