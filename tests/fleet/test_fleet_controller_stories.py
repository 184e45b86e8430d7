"""The controller as stories, read as text: what it writes before what, what it believes, and what it leaves alone.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the new outcomes, then read the diff.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.fleet.actions import Tries
from holdfast.fleet.desired import Cordon, Level
from holdfast.fleet.records import FleetRecord, Orders
from holdfast.fleet.room import HOST
from holdfast.fleet.scaling import Scaling
from tests.rigs.transcripts import must_go_as_written, stories
from tests.rigs.worlds.fleet_controllers import NODES, ORDERS, RECORD, ControllersWorld, Keeper, Overtaken, model
from tests.rigs.worlds.fleet_node import Machine

WRITES_MAX = 50


def short(name: str) -> str:
    return name.removeprefix("ModelActor:")


class Story:
    """A store, nodes and controllers: each write is a step, and each command is one thing that happens to them."""

    def __init__(self) -> None:
        self.place = ControllersWorld()
        self.lines: list[str] = []

    def play(self, command: str) -> list[str]:
        self.lines = []
        word, *rest = command.split()
        getattr(self, f"do_{word}")(*rest)
        self.hear()
        return self.lines

    def say(self, text: str) -> None:
        self.lines.append(f"  {self.place.now_s - 1000.0:7.1f}  {text}")

    def hear(self) -> None:
        """Tell what controllers told people."""
        for keeper in self.place.keepers:
            for one in keeper.controller.take_events():
                self.say(f"{one.what}: {one.text.replace('ModelActor:', '')}")

    # -- what there is

    def do_begin(self) -> None:
        self.place = ControllersWorld()

    def do_node(self, name: str, *words: str) -> None:
        said = dict(word.split("=") for word in words)
        self.place.add(Machine(name, {"gpu0": 80, HOST: int(said.get("host", "100"))}))

    def do_want(self, key: str, *words: str) -> None:
        said = dict(word.split("=") for word in words)
        idle_s = said.pop("idle_s", None)
        fields: dict[str, object] = {name: int(value) for name, value in said.items() if value.isdecimal()}
        fields |= {"floor": Level[said["floor"]]} if "floor" in said else {}
        fields |= {"nodes": frozenset(said["nodes"].split(","))} if "nodes" in said else {}
        fields |= {"dedicated": True} if "dedicated" in said else {}
        self.place.want(model(key, **fields), Scaling(idle_s=float(idle_s)) if idle_s else None)

    def do_unwant(self, key: str) -> None:
        self.place.unwant(key)

    def do_drain(self, node: str) -> None:
        self.place.cordon(node, Cordon(by="ops@desk"))

    def do_cordon(self, node: str) -> None:
        self.place.cordon(node, Cordon(drain=False))

    def do_uncordon(self, node: str) -> None:
        self.place.cordon(node, None)

    def do_unread(self, key: str) -> None:
        """The desired model is in the store, and cannot be read."""
        self.place.keepers[-1].controller.desired_unreadable(key)

    def do_removed(self, key: str) -> None:
        self.place.keepers[-1].controller.set_desired(key, None)

    def do_ask(self, key: str, count: str) -> None:
        self.place.ask_for(key, int(count))

    def do_disk(self, node: str, key: str) -> None:
        """The model's files are on that node."""
        self.place.agents[node].machine.on_disk.add(key)
        self.place.tell(self.place.agents[node])

    def do_ahead(self, subject: str, seconds: str) -> None:
        """A failure stands in the record by a clock that was ahead."""
        tries = {subject: Tries(1, self.place.now_s + float(seconds))}
        self.place.shelf.values[RECORD] = msgspec.json.encode(FleetRecord(tries=tries))

    def do_store(self, *words: str) -> None:
        """`forgets nodes`: their records were leased. `forgets all but nodes`: it is another store."""
        shelf, forgets = self.place.shelf, words[-1] == "nodes" and "all" not in words
        shelf.values = {key: value for key, value in shelf.values.items() if key.startswith(NODES) is not forgets}
        shelf.serials = shelf.serials if forgets else {}

    # -- what happens

    def do_controller(self) -> None:
        self.place.keeper()

    def do_controllers(self, *words: str) -> None:
        self.hear()
        self.place.keepers[:] = self.place.keepers[-1:] if "last" in words else []

    def do_write(self, what: str, *words: str) -> None:
        """`3`: so many steps or writes. `all`: until nothing is to be written. `until WORD`: until that stands."""
        keeper = self.place.keepers[0 if "first" in words else -1]
        for _ in range(int(what) if what.isdecimal() else WRITES_MAX):
            if not self._write(keeper) or (what == "until" and self._stands(words[0])):
                return

    def _write(self, keeper: Keeper) -> bool:
        before = dict(self.place.shelf.values)
        try:
            busy = keeper.advance(self.place.now_s)
        except Overtaken as error:
            self.say(f"overtaken at {error}")
            return False
        for key, value in self.place.shelf.values.items():
            if key.startswith((RECORD, ORDERS)) and before.get(key) != value:
                self.say(f"wrote {self._written(key)}")
        return busy

    def _written(self, key: str) -> str:
        if key == RECORD:
            return f"{key}: {self._record()}"
        found = self.place.shelf.read(key, Orders) or Orders()
        return f"{key} by {found.by}: {self._orders(found)}"

    def _stands(self, word: str) -> bool:
        shelf = self.place.shelf
        if word == "serial":
            return bool((shelf.read(RECORD, FleetRecord) or FleetRecord()).serials)
        orders = shelf.under(ORDERS, Orders)
        return any(one.verb == word or node == word for node, found in orders.items() for one in found.actions)

    def do_work(self, node: str, fails: str = "") -> None:
        self.place.work(self.place.agents[node], fails=lambda: bool(fails))

    def do_fail(self, seconds: str) -> None:
        """For so long no agent can start anything."""
        for _ in range(int(seconds)):
            for agent in self.place.agents.values():
                self.do_write("all")
                self.place.work(agent, fails=lambda: True)
            self.do_write("all")
            self.place.now_s += 1.0

    def do_pass(self, seconds: str) -> None:
        self.place.now_s += float(seconds)

    def do_settle(self) -> None:
        self.place.settle()

    def do_wait(self, seconds: str, *words: str) -> None:
        """`by the last`: of the controllers only that one goes on."""
        keepers = self.place.keepers
        self.place.keepers = keepers[-1:] if "last" in words else keepers
        self.place.run(float(seconds))
        self.hear()
        self.place.keepers = keepers

    def do_crash(self, node: str, name: str, *why: str) -> None:
        """It ends; with a reason its node also answers the order that placed it."""
        agent = self.place.agents[node]
        agent.machine.crash(f"ModelActor:{name}")
        if why:
            agent.answers[f"place/ModelActor:{name}/0.1"] = " ".join(why)
            self.place.tell(agent)

    def do_away(self, node: str) -> None:
        self.place.agents[node].machine.near = False

    def do_back(self, node: str) -> None:
        self.place.agents[node].machine.near = True

    # -- what came of it

    def do_status(self) -> None:
        for node, agent in self.place.agents.items():
            bodies = agent.machine.bodies.items()
            there = [f"{short(name)} {one.level.word} {one.phase}" for name, one in bodies]
            found = self.place.shelf.read(ORDERS + node, Orders)
            self.say(f"{node}: {', '.join(there) or 'empty'}; asked: {'-' if found is None else self._orders(found)}")
        for key, desired in self.place.models.items():
            self.say(f"{key}: {self.place.hot(key)} of {desired.wanted} serve, generation {desired.generation}")
        self.say(f"record: {self._record()}")
        for keeper in self.place.keepers:
            due_s = keeper.controller.next_deadline_s()
            self.say(f"due: {'-' if due_s is None else f'{due_s - 1000.0:g}'}")

    def _orders(self, found: Orders) -> str:
        late = {one.id: " (overdue)" for one in found.actions if one.id in found.overdue}
        return ", ".join(f"{one.verb} {short(one.name)}{late.get(one.id, '')}" for one in found.actions) or "none"

    def _record(self) -> str:
        found = self.place.shelf.read(RECORD, FleetRecord) or FleetRecord()
        tries = {subject: one.failed for subject, one in found.tries.items()}
        parts: Mapping[str, object] = {"by": found.by, "serials": found.serials, "tries": tries, "idle": found.idle}
        parts = {**parts, "unmet": found.unmet, "hopeless": found.hopeless, "lost": found.lost, "whys": found.whys}
        parts = {**parts, "cordoned": found.cordoned}
        return ", ".join(f"{name} {value}" for name, value in parts.items() if value) or "empty"


@stories("controller", least=5)
def test_a_controller_does_as_written(path: Path) -> None:
    """Each story comes out as its transcript says."""
    must_go_as_written(path, Story)
