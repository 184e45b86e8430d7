"""Fleets as stories, read as text: what is wanted, what befalls it, and what is done about it.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the outcomes anew, then read the diff.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from holdfast.fleet.actions import Action, Verb
from holdfast.fleet.desired import Cordon, Level, Model
from holdfast.fleet.observed import Health
from holdfast.fleet.room import HOST
from tests.rigs.transcripts import must_go_as_written, stories
from tests.rigs.worlds.fleet import World
from tests.rigs.worlds.fleet_node import Machine


def short(name: str) -> str:
    return name.removeprefix("ModelActor:")


def line_of(action: Action) -> str:
    on = "+".join(action.devices)
    match action.verb:
        case Verb.PLACE if action.level is Level.WARM:
            said = f"in the memory of {action.node}"
        case Verb.PLACE | Verb.PROMOTE:
            said = f"on {action.node} {on}"
        case Verb.DRAIN:
            said = f"until {action.until_s - 1000.0:.0f}: {action.why}"
        case _:
            said = f": {action.why}"
    attempt = f" (attempt {action.attempt})" if action.attempt > 1 else ""
    return f"{action.verb} {short(action.name)} {said}{attempt}".replace(" : ", ": ")


class Story:
    """A world in which a pass is made every second, and requests that wait are served as soon as a replica is."""

    def __init__(self) -> None:
        self.world = World()
        self.lines: list[str] = []
        self.lost: set[str] = set()  # verbs whose next message is
        self.failing: set[str] = set()  # models that cannot be started
        self.told: dict[str, str] = {}

    def play(self, command: str) -> list[str]:
        self.lines = []
        word, *rest = command.split()
        getattr(self, f"do_{word}")(*rest)
        return self.lines

    def say(self, text: str) -> None:
        self.lines.append(f"  {self.world.now_s - 1000.0:6.0f}  {text}")

    # -- what happens

    def do_node(self, name: str, *words: str) -> None:
        """gpus=2x80 host=100 disk=a"""
        said = dict(word.split("=") for word in words)
        count, size = map(int, said.get("gpus", "1x80").split("x"))
        totals = {f"gpu{number}": size for number in range(count)} | {HOST: int(said.get("host", "0"))}
        machine = Machine(name, totals, set(filter(None, said.get("disk", "").split(","))))
        machine.keeps_memory = "keeps" in said
        self.world.machines[name] = machine

    def do_model(self, key: str, *words: str) -> None:
        said = dict(word.split("=") for word in words)
        numbers = {name: int(said.pop(name)) for name in list(said) if said[name].isdecimal() and name != "version"}
        size = numbers.pop("bytes", 40)
        kinds = {"floor": Level[said.pop("floor", "COLD")], "dedicated": bool(said.pop("dedicated", ""))}
        nodes = frozenset(filter(None, said.pop("nodes", "").split(",")))
        sizes = {"device_bytes": size, "host_bytes": size, "replicas_max": 8}
        self.world.want(Model(key=key, nodes=nodes, **{**sizes, **numbers}, **kinds, **said))

    def do_want(self, key: str, count: str) -> None:
        self.world.want(structs.replace(self.world.models[key], wanted=int(count)))

    def do_version(self, key: str, version: str) -> None:
        self.world.want(structs.replace(self.world.models[key], version=version))

    def do_unwant(self, key: str) -> None:
        self.world.unwant(key)

    def do_ask(self, key: str, count: str = "1") -> None:
        self.world.ask_for(key, int(count))

    def do_answer(self, key: str) -> None:
        """All its requests end."""
        for machine in self.world.machines.values():
            for body in machine.bodies.values():
                if body.action.model == key and body.running:
                    body.running, body.idle_s, machine.changed = 0, self.world.now_s, True

    def do_crash(self, name: str) -> None:
        for machine in self.world.machines.values():
            if f"ModelActor:{name}" in machine.bodies:
                machine.crash(f"ModelActor:{name}")

    def do_ail(self, name: str, health: str) -> None:
        """A replica is up and does not serve, or does again: `sound`."""
        for machine in self.world.machines.values():
            if (body := machine.bodies.get(f"ModelActor:{name}")) is not None:
                body.become(Health(health), self.world.now_s)
                machine.changed = True

    def do_lose(self, node: str) -> None:
        self.world.machines[node].near = False
        self.world.planner.view.mark_lost(node)

    def do_back(self, node: str) -> None:
        self.world.machines[node].near = self.world.machines[node].changed = True

    def do_drain(self, node: str) -> None:
        """An operator drains a node; `cordon` lets its replicas stay."""
        self.world.cordon(node, Cordon())

    def do_cordon(self, node: str) -> None:
        self.world.cordon(node, Cordon(drain=False))

    def do_uncordon(self, node: str) -> None:
        self.world.cordon(node, None)

    def do_drop(self, verb: str) -> None:
        """The next message of that kind is lost."""
        self.lost.add(verb)

    def do_break(self, key: str) -> None:
        self.failing.add(key)

    def do_mend(self, key: str) -> None:
        self.failing.discard(key)

    def do_restart(self) -> None:
        self.world.restart()

    def do_status(self) -> None:
        for node, machine in self.world.machines.items():
            there = [
                f"{short(name)} {body.level.word} {body.phase}"
                + (f" {body.running} running" if body.running else "")
                + ("" if body.is_sound else f" {body.health}")
                for name, body in machine.bodies.items()
            ]
            self.say(f"{node}: {', '.join(there) or 'nobody'}")
        for key, why in self.world.last.unmet.items():
            self.say(f"{key}: {why}")

    def do_wait(self, seconds: str) -> None:
        for _ in range(int(seconds)):
            self.world.now_s += 1.0
            self.second()

    def second(self) -> None:
        world = self.world
        world.tick()
        self.serve()
        world.look_at_all()
        for action in world.plan(compared=True):
            self.say(line_of(action))
            world.ask(action)
            if action.verb in self.lost:
                self.lost.discard(action.verb)
                continue
            world.send(action, fails=action.verb is Verb.PLACE and action.model in self.failing)
        world.look_at_all()

    def serve(self) -> None:
        for machine in self.world.machines.values():
            for body in machine.bodies.values():
                demand = self.world.waiting.get(body.action.model)
                if body.serves and body.is_sound and demand is not None:
                    body.running, body.idle_s, machine.changed = body.running + demand.waiting, 0.0, True
                    self.world.ask_for(body.action.model, 0)


@stories("fleet", least=10)
def test_a_fleet_goes_as_written(path: Path) -> None:
    """Each story comes out as its transcript says; and from scratch each pass plans the same."""
    must_go_as_written(path, Story)
