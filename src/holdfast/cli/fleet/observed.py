"""Reads one fleet from the store: its desired and observed state, and what is missing.

Always true: replicas are counted from nodes' reports, never from desired state.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from holdfast.cli.deployments.book import ANSWER_S, FOUND_S, Book, opened, store_of
from holdfast.core.errors import UserError
from holdfast.discovery.keys import CONTROLS, CORDONS, FLEETS, MODELS, NODES, ORDERS
from holdfast.fleet import desired_changes, records
from holdfast.fleet.desired import Cordon, Level
from holdfast.fleet.observed import Replica, ReplicaPhase
from holdfast.fleet.records import DesiredModel, NodeRecord, Orders, read_all
from holdfast.health.records import ControlRecord
from holdfast.settings import Environment
from holdfast.spec.arguments import meant
from holdfast.spec.settings import about
from holdfast.store.contract import StoreUnavailable
from holdfast.supervise.records import read_records

PREFIXES = (MODELS, NODES, FLEETS, CONTROLS, CORDONS)
START = "holdfast up --backend local"
# What makes a node of a fleet, by its backend.
JOIN = {
    "": f"`{START}` makes this machine one",
    "ray": "`ray start --address HOST:PORT` on a machine adds one; `holdfast status` shows whether the cluster answers",
}
NEAR = 0.5

Key = Annotated[
    str,
    about("Model name in the fleet, as shown by `holdfast get models`.", positional=True, required=True, flag="KEY"),
]
DeploymentOption = Annotated[
    str, about("Fleet name (default: $DYN_NAMESPACE if there is such a fleet, else the only one).", flag="--deployment")
]


@dataclass(frozen=True, slots=True)
class ObservedFleet:
    """One fleet at one moment."""

    deployment: str
    desired: Mapping[str, DesiredModel]
    nodes: Mapping[str, NodeRecord]
    record: records.FleetRecord
    is_led: bool  # a control says that it decides
    backend: str = ""  # "ray", where the fleet that runs on this machine is on Ray
    cordons: Mapping[str, Cordon] = field(default_factory=dict)  # by node, whether it is there or not
    orders: Mapping[str, Orders] = field(default_factory=dict)  # by node, if the command reads them

    @classmethod
    def of(cls, deployment: str, values: Mapping[str, bytes], backend: str = "") -> ObservedFleet:
        found = read_all(records.FleetRecord, FLEETS, values)
        return cls(
            deployment,
            read_all(DesiredModel, f"{MODELS}{deployment}/", values),
            read_all(NodeRecord, f"{NODES}{deployment}/", values),
            found.get(deployment, records.FleetRecord()),
            any(_leads(value) for key, value in values.items() if key.startswith(f"{CONTROLS}{deployment}/")),
            backend,
            read_all(Cordon, f"{CORDONS}{deployment}/", values),
            read_all(Orders, f"{ORDERS}{deployment}/", values),
        )

    def replicas(self, key: str = "") -> list[Replica]:
        """Return those of one model or of all, in the order they were made, without those of lost nodes."""
        nodes = (node for name, node in self.nodes.items() if name not in self.record.lost)
        found = [one for node in nodes for one in node.replicas if key in ("", one.model)]
        return sorted(found, key=lambda one: (one.model, one.serial))

    def ready(self, key: str, level: Level) -> list[Replica]:
        """Return those of one model that are at a level; of HOT ones those that serve."""
        there = [one for one in self.replicas(key) if one.level is level and one.phase is ReplicaPhase.READY]
        return [one for one in there if one.serves or level is not Level.HOT]

    @property
    def keys(self) -> list[str]:
        """Return the models that are desired or have replicas."""
        return sorted({*self.desired, *(one.model for one in self.replicas())})

    def check(self, key: str) -> None:
        """Raise UserError if there is no such model."""
        if key not in self.keys:
            known = _there(self.keys) if self.keys else "`holdfast deploy` asks for one"
            raise UserError(f"there is no model {key!r}; {meant(key, self.keys, known, NEAR)}")


def _there(names: Sequence[str]) -> str:
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"


def _leads(value: bytes) -> bool:
    try:
        return msgspec.json.decode(value, type=ControlRecord).leads
    except (msgspec.DecodeError, ValueError):
        return False


class FleetStore:
    """One fleet's keys in the store: reads them and changes desired models."""

    def __init__(self, book: Book, deployment: str, backend: str = "") -> None:
        self.book, self.deployment, self._backend = book, deployment, backend

    @property
    def observed(self) -> ObservedFleet:
        return ObservedFleet.of(self.deployment, self.book.values, self._backend)

    async def ask(self, key: str, change: desired_changes.DesiredChange) -> DesiredModel | None:
        """Change a model's desired state and return it. UserError, if the store does not confirm it."""
        try:
            return await desired_changes.update_desired(self.book.store, self.deployment, key, change)
        except StoreUnavailable as error:  # no answer is no refusal
            unsure = f"whether {key} was changed is not known, and `holdfast get models {key}` shows it"
            raise UserError(f"{unsure}: {error}") from error

    async def known(self, key: str, desired: DesiredModel | None) -> None:
        """Return when the written desired state is read back."""
        try:
            async with asyncio.timeout(ANSWER_S):
                while not self._heard(key, desired):
                    await self.book.news(ANSWER_S)
        except TimeoutError:
            raise UserError(f"{self.book.store!r}: no answer within {ANSWER_S:g} s") from None

    def _heard(self, key: str, desired: DesiredModel | None) -> bool:
        found = self.observed.desired.get(key)
        if desired is None or found is None:
            return desired is found
        return found.model.generation >= desired.model.generation


def where(store: str, env: Environment) -> str:
    """Return the address of a command's store."""
    return store_of(store, Path(env.state_dir), START)


@contextlib.asynccontextmanager
async def fleet_at(
    url: str, deployment: str, env: Environment, prefixes: Sequence[str] = PREFIXES
) -> AsyncIterator[FleetStore]:
    """Yield a command's fleet. UserError, if there is none, or there are several and none was named."""
    async with opened(url, prefixes) as book:
        await book.whole()
        known = await _fleets(book)
        if not known:
            raise UserError(f"the store {url} knows of no fleet: start one with `{START}`")
        is_on_ray = any(record.role == "ray" for record in read_records(Path(env.state_dir)))
        fleet = FleetStore(book, _which(known, deployment, env.deployment), "ray" if is_on_ray else "")
        # A store that was restarted has desired models at once, and nodes when they have reported.
        await _within(FOUND_S, book, lambda: bool(fleet.observed.nodes))
        yield fleet


async def _fleets(book: Book) -> set[str]:
    """Return the names of all fleets; wait a moment for one that has just started."""

    def known() -> set[str]:
        return {key.split("/")[2] for key in book.values if key.startswith((MODELS, NODES, FLEETS))}

    await _within(FOUND_S, book, lambda: bool(known()))
    return known()


async def _within(bound_s: float, book: Book, is_so: Callable[[], bool]) -> None:
    """Return when the condition holds, or the time is over."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + bound_s
    while not is_so() and loop.time() < until_s:
        await book.news(until_s - loop.time())


def _which(known: set[str], given: str, usual: str) -> str:
    name = given or (usual if usual in known else "")
    if not name and len(known) == 1:
        (name,) = known
    names = sorted(known)
    if not name:
        raise UserError(f"which fleet? There are {', '.join(names)}; say it with --deployment")
    if name not in known:
        raise UserError(f"there is no fleet {name!r}; {meant(name, names, _there(names), NEAR)} (`{START}` starts one)")
    return name
