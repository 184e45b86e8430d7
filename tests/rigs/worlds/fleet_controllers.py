"""A store, agents and controllers of a fleet, without a process: each write is one step, and anybody may die before the
next. What must never be is asserted by the machines (fleet_node.py) and by what looks at the orders here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from holdfast.fleet.actions import Action, Verb
from holdfast.fleet.desired import Cordon, Model
from holdfast.fleet.planner import FleetController, FleetWrites
from holdfast.fleet.records import DesiredModel, FleetRecord, NodeRecord, Orders, process_name
from holdfast.fleet.scaling import Scaling
from holdfast.health.records import Demand
from tests.rigs.worlds.fleet_node import Body, Machine

T = TypeVar("T")
DEPLOYMENT = "d"
RECORD, ORDERS, DESIRED, NODES, CORDONS = "record", "orders/", "desired/", "nodes/", "cordons/"


def model(key: str = "m", wanted: int = 1, **said: Any) -> Model:
    sizes: dict[str, Any] = {"device_bytes": 40, "host_bytes": 40, "replicas_max": 4, "version": "v1", "drain_s": 5.0}
    return Model(key=key, wanted=wanted, **{**sizes, **said})


def desired_model(model: Model, scaling: Scaling | None = None) -> DesiredModel:
    return DesiredModel(name=f"served-{model.key}", model=model, manifest="", scaling=scaling)


class Overtaken(Exception):
    """Another controller has written there."""


@dataclass
class Agent:
    """Carries out what stands in its node's orders, and writes down what became of it."""

    machine: Machine
    answers: dict[str, str] = field(default_factory=dict)
    number: int = 0

    def obey(self, orders: Orders, now_s: float, fails: Callable[[], bool]) -> None:
        self.answers = {one.id: self.answers[one.id] for one in orders.actions if one.id in self.answers}
        for action in orders.actions:
            if action.id not in self.answers and action.id not in orders.overdue:
                said = self.machine.carry_out(action, now_s, fails=action.verb is not Verb.STOP and fails())
                if said or action.verb is not Verb.STOP:
                    self.answers[action.id] = said if said == "failed" else ""

    def record(self) -> NodeRecord:
        node, replicas = self.machine.snapshot()
        self.number += 1
        return NodeRecord(node=node, replicas=tuple(replicas), answers=dict(self.answers), number=self.number)


class Shelf:
    """The store: bytes by key, changed from what was read."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.asked: set[str] = set()  # ids of all that ever stood in orders
        self.serials: dict[str, int] = {}

    def swap(self, key: str, value: bytes | None, expected: bytes | None) -> bool:
        if self.values.get(key) == value:
            return True
        if self.values.get(key) != expected:
            return False
        if value is None:
            del self.values[key]
        else:
            self.values[key] = value
            self._check(key, value)
        return True

    def _check(self, key: str, value: bytes) -> None:
        """Serials never go back; orders use only what the record knows, and frontends know which replicas leave."""
        if key == RECORD:
            record = msgspec.json.decode(value, type=FleetRecord)
            assert all(record.serials.get(model, 0) >= serial for model, serial in self.serials.items()), record
            self.serials = dict(record.serials)
        elif key.startswith(ORDERS):
            record = self.read(RECORD, FleetRecord) or FleetRecord()
            for action in (self.read(key, Orders) or Orders()).actions:
                if action.id not in self.asked:
                    self._check_new(action, record)

    def _check_new(self, action: Action, record: FleetRecord) -> None:
        assert action.serial <= record.serials.get(action.model, 0), action
        if action.verb is Verb.DRAIN:
            ends = process_name("", action.model, "", action.serial).rpartition("-")[2]
            assert any(f"-{action.model}-" in name and name.endswith(f"-{ends}") for name in record.idle), (
                action,
                record,
            )
        self.asked.add(action.id)

    def read(self, key: str, kind: type[T]) -> T | None:
        return msgspec.json.decode(self.values[key], type=kind) if key in self.values else None

    def under(self, prefix: str, kind: type[T]) -> dict[str, T]:
        found = [key for key in self.values if key.startswith(prefix)]
        return {key.removeprefix(prefix): msgspec.json.decode(self.values[key], type=kind) for key in found}


class Keeper:
    """A controller and what it has read: the shell, one write at a time."""

    def __init__(self, shelf: Shelf, by: str, now_s: float) -> None:
        self.shelf, self.controller = shelf, FleetController(DEPLOYMENT, by)
        self.held = {key: value for key, value in shelf.values.items() if key == RECORD or key.startswith(ORDERS)}
        self.fed = {key: value for key, value in shelf.values.items() if key not in self.held}
        self.left: list[tuple[str, bytes | None]] | None = None  # that are still to be written
        self.controller.begin(
            shelf.read(RECORD, FleetRecord) or FleetRecord(),
            shelf.under(ORDERS, Orders),
            shelf.under(DESIRED, DesiredModel),
            shelf.under(NODES, NodeRecord),
            now_s,
            cordons=shelf.under(CORDONS, Cordon),
        )

    def read_changes(self, now_s: float) -> None:
        """Whatever others wrote since."""
        values = self.shelf.values
        for key in [*values, *(key for key in self.fed if key not in values)]:
            if key == RECORD or key.startswith(ORDERS) or values.get(key) == self.fed.get(key):
                continue
            if key in values:
                self.fed[key] = values[key]
            else:
                del self.fed[key]
            if key.startswith(DESIRED):
                self.controller.set_desired(key.removeprefix(DESIRED), self.shelf.read(key, DesiredModel))
            elif key.startswith(CORDONS):
                self.controller.set_cordon(key.removeprefix(CORDONS), self.shelf.read(key, Cordon))
            else:
                self.controller.on_node_record(key.removeprefix(NODES), self.shelf.read(key, NodeRecord), now_s)

    def advance(self, now_s: float) -> bool:
        """A step, one write of it, or the word that all is written; whether there was anything to do."""
        if self.left is None:
            self.read_changes(now_s)
            writes = self.controller.step(now_s)
            if not writes:
                return False
            self.left = list(as_bytes(writes))
            return True
        if self.left:
            self._write(*self.left.pop(0))
        else:
            self.read_changes(now_s)  # of what follows from that before it knows that all is written
            self.left = None
            self.controller.written(now_s)
        return True

    def _write(self, key: str, value: bytes | None) -> None:
        is_desired = key.startswith(DESIRED)
        swapped = self.shelf.swap(key, value, self.fed.get(key) if is_desired else self.held.get(key))
        if not is_desired:
            if not swapped:
                raise Overtaken(key)
            self.held.pop(key, None)
            if value is not None:
                self.held[key] = value


def as_bytes(writes: FleetWrites) -> Iterator[tuple[str, bytes | None]]:
    if writes.record is not None:
        yield RECORD, msgspec.json.encode(writes.record)
    for name, one in writes.orders.items():
        yield ORDERS + name, None if one is None else msgspec.json.encode(one)
    yield from ((DESIRED + key, msgspec.json.encode(one)) for key, one in writes.desired.items())


@dataclass
class ControllersWorld:
    """All of it, with its time."""

    shelf: Shelf = field(default_factory=Shelf)
    agents: dict[str, Agent] = field(default_factory=dict)
    keepers: list[Keeper] = field(default_factory=list)
    now_s: float = 1000.0
    made: int = 0

    def add(self, machine: Machine) -> Agent:
        self.agents[machine.name] = agent = Agent(machine)
        self.tell(agent)
        return agent

    def want(self, model: Model, scaling: Scaling | None = None) -> None:
        before = self.shelf.read(DESIRED + model.key, DesiredModel)
        model = structs.replace(model, generation=before.model.generation + 1 if before is not None else 1)
        self.shelf.values[DESIRED + model.key] = msgspec.json.encode(desired_model(model, scaling))

    def unwant(self, key: str) -> None:
        self.shelf.values.pop(DESIRED + key, None)

    def cordon(self, node: str, cordon: Cordon | None) -> None:
        self.shelf.values.pop(CORDONS + node, None)
        if cordon is not None:
            self.shelf.values[CORDONS + node] = msgspec.json.encode(cordon)

    @property
    def cordons(self) -> dict[str, Cordon]:
        return self.shelf.under(CORDONS, Cordon)

    def is_drained(self, node: str) -> bool:
        return node in self.cordons and self.cordons[node].drain

    @property
    def machines(self) -> dict[str, Machine]:
        return {name: agent.machine for name, agent in self.agents.items()}

    @property
    def models(self) -> dict[str, Model]:
        """Return the desired models."""
        return {key: one.model for key, one in self.shelf.under(DESIRED, DesiredModel).items()}

    def keeper(self) -> Keeper:
        """One more begins."""
        self.made += 1
        self.keepers.append(Keeper(self.shelf, f"k{self.made}", self.now_s))
        return self.keepers[-1]

    def ask_for(self, key: str, waiting: int) -> None:
        for keeper in self.keepers:
            keeper.controller.on_frontend_report(
                "f", {f"served-{key}": Demand(waiting, self.now_s)} if waiting else None
            )

    def tell(self, agent: Agent) -> None:
        """It writes its record, if it is reached."""
        machine = agent.machine
        if machine.up and machine.near:
            self.shelf.values[NODES + machine.name] = msgspec.json.encode(agent.record())
        else:
            self.shelf.values.pop(NODES + machine.name, None)

    def work(self, agent: Agent, fails: Callable[[], bool] = lambda: False) -> None:
        """It does what is due, and what stands in its orders."""
        machine = agent.machine
        if machine.up:
            orders = self.shelf.read(ORDERS + machine.name, Orders) or Orders()
            for name in machine.tick(self.now_s):
                stopped = [one.id for one in orders.actions if one.verb is Verb.STOP and one.name == name]
                agent.answers.update(dict.fromkeys(stopped, ""))
            if machine.near:
                agent.obey(orders, self.now_s, fails)
        self.tell(agent)

    def settle(self) -> None:
        """Let each do what there is to do, until there is nothing at this moment; none dies."""
        for _ in range(200):
            busy = [keeper for keeper in self.keepers if keeper.advance(self.now_s)]
            for agent in self.agents.values():
                self.work(agent)
            if not busy and not any(keeper.advance(self.now_s) for keeper in self.keepers):
                return
        raise AssertionError(f"it does not settle: {self.keepers}")

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.settle()
            self.now_s += 1.0
        self.settle()

    def bodies(self) -> Iterator[tuple[str, Body]]:
        for machine in self.machines.values():
            if machine.up:
                yield from machine.bodies.items()

    def hot(self, key: str) -> int:
        return sum(body.serves and body.action.model == key for _, body in self.bodies())
