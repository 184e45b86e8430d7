"""Random worlds for the controller by their seeds: it dies before and after every write, two lead at once, nodes and
replicas come and go, agents are late and fail. Then it is quiet, and all must come to rest.

What must never be is asserted by the machines (`bench/fleet/agent.py`) and by the shelf: a vault over its bytes, a name
that is started twice, work that is cut short, a serial that no book knew, somebody told to leave who gets new work.
"""

from __future__ import annotations

import os
import random

import pytest
from msgspec import structs

from bench.fleet.agent import Machine
from bench.fleet.storms import Storm
from holdfast.fleet import hearing
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.hearing import GRACE_S
from holdfast.fleet.records import Book, Wish
from holdfast.fleet.room import HOST
from holdfast.fleet.scaling import Scaling
from keeper_rig import BOOK, NODES, WISHES, Keeper, Overtaken, Place

SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "0")) % 1_000_000
PARTS, EACH = 8, 30
STEPS = 120
QUIET_STEPS_MAX = 800  # back-offs of five minutes and an hour of time-outs are passed in leaps
KEEPERS_MAX = 2
FORGET_S = 15.0  # of worlds that are over sooner than nodes are forgotten
ELASTIC = frozenset({"m1", "m3"})  # models whose number is scaling's
SCALING = Scaling(high_s=1.0, low_s=10.0, step_up_s=5.0, step_down_s=10.0, idle_s=120.0)


class Weather:
    """One world, and what befalls it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.models = Storm(seed)  # of many sizes
        self.place = Place()
        for number in range(rng.randint(1, 4)):
            self.add_machine(f"n{number}")
        for number in range(rng.randint(1, 4)):
            self.want(self.model(f"m{number}"))
        self.deaths = 0

    def model(self, key: str) -> Model:
        return structs.replace(self.models.model(key), nodes=frozenset())

    def want(self, model: Model) -> None:
        """By a person's word alone, or as scaling says."""
        self.place.want(model, SCALING if model.key in ELASTIC else None)

    def add_machine(self, name: str) -> None:
        rng = self.rng
        totals = {f"gpu{device}": rng.choice((40, 80, 80)) for device in range(rng.choice((1, 1, 2)))}
        self.place.add(Machine(name, {**totals, HOST: rng.choice((0, 60, 150))}, keeps_memory=rng.random() < 0.3))

    def run(self) -> None:
        rng, place = self.rng, self.place
        for _ in range(STEPS):
            place.now_s += rng.choice((0.0, 0.0, 0.1, 0.5, 2.0, 5.0, 20.0))
            if rng.random() < 0.3:
                getattr(self, f"befall_{rng.choice(EVENTS)}")()
            while len(place.keepers) < 1 or (len(place.keepers) < KEEPERS_MAX and rng.random() < 0.05):
                place.keeper()
            for _ in range(rng.randint(1, 6)):
                self.lead(rng.choice(place.keepers) if place.keepers else place.keeper())
            self.traffic()
            for agent in place.agents.values():
                if rng.random() < 0.6:
                    place.work(agent, fails=lambda: rng.random() < 0.15)
        self.calm_down()

    def lead(self, keeper: Keeper) -> None:
        """One write, or step; it may die before, or after, or find another's."""
        place = self.place
        try:
            keeper.advance(place.now_s)
        except Overtaken:
            place.keepers.remove(keeper)
        else:
            if self.rng.random() < 0.06:
                place.keepers.remove(keeper)
                self.deaths += 1

    def traffic(self) -> None:
        for agent in self.place.agents.values():
            for body in agent.machine.bodies.values():
                if body.serves and self.rng.random() < 0.1:
                    body.running, body.idle_s = body.running + 1, 0.0
                elif body.running and self.rng.random() < 0.3:
                    body.running -= 1
                    body.idle_s = 0.0 if body.running else self.place.now_s

    # -- what befalls it

    def befall_crash(self) -> None:
        machine = self.rng.choice(list(self.place.agents.values())).machine
        if machine.bodies:
            machine.crash(self.rng.choice(list(machine.bodies)))

    def befall_reboot(self) -> None:
        self.rng.choice(list(self.place.agents.values())).machine.reboot()

    def befall_away(self) -> None:
        """It is not reached, or is dead."""
        machine = self.rng.choice(list(self.place.agents.values())).machine
        machine.near = False
        if self.rng.random() < 0.5:
            machine.up = False
            machine.reboot()

    def befall_back(self) -> None:
        for agent in self.place.agents.values():
            agent.machine.up = agent.machine.near = True

    def befall_store(self) -> None:
        """It forgets what was leased, and is back at once, or a while later."""
        for agent in self.place.agents.values():
            self.place.shelf.values.pop(NODES + agent.machine.name, None)
        for keeper in self.place.keepers:
            keeper.hear(self.place.now_s)
        self.place.now_s += self.rng.choice((0.0, 30.0))
        for keeper in self.place.keepers:
            keeper.controller.away(self.place.now_s)

    def befall_node(self) -> None:
        if len(self.place.agents) < 5:
            self.add_machine(f"n{len(self.place.agents)}")

    def befall_wish(self) -> None:
        self.want(self.model(f"m{self.rng.randint(0, 4)}"))

    def befall_scale(self) -> None:
        for key in self.rng.sample(sorted(self.wishes()), min(1, len(self.wishes()))):
            model = self.place.wished(key)
            self.want(structs.replace(model, wanted=self.rng.randint(0, model.replicas_max)))

    def befall_unwish(self) -> None:
        for key in self.rng.sample(sorted(self.wishes()), min(1, len(self.wishes()))):
            self.place.unwant(key)

    def befall_asked(self) -> None:
        self.place.ask_for(f"m{self.rng.randint(0, 4)}", self.rng.randint(0, 3))

    def wishes(self) -> dict[str, Model]:
        return {key: one.model for key, one in self.place.shelf.under(WISHES, Wish).items()}

    # -- then it is quiet

    def calm_down(self) -> None:
        """One leads, nothing fails: what is wanted comes to be, as far as there is room."""
        place = self.place
        self.befall_back()
        place.keepers.clear()
        keeper = place.keeper()
        for agent in place.agents.values():
            for body in agent.machine.bodies.values():
                body.running, body.idle_s = 0, place.now_s
        for _ in range(QUIET_STEPS_MAX):
            place.settle()
            if self.is_at_rest(keeper):
                break
            place.now_s = self.next_s(keeper)
        else:
            raise AssertionError(f"it does not come to rest: {keeper.controller!r}")
        for model in self.wishes().values():
            self.check(model)

    def next_s(self, keeper: Keeper) -> float:
        now_s, agents = self.place.now_s, self.place.agents.values()
        bodies = [body for agent in agents for body in agent.machine.bodies.values()]
        due = [body.due_s for body in bodies if body.due_s is not None]
        due += [body.until_s for body in bodies if body.stops]
        due += [at_s for at_s in [keeper.controller.next_deadline_s()] if at_s is not None]
        return max(now_s + 0.1, min(due, default=now_s + GRACE_S))

    def is_at_rest(self, keeper: Keeper) -> bool:
        view, now_s = keeper.controller._view, self.place.now_s
        bodies = [body for agent in self.place.agents.values() for body in agent.machine.bodies.values()]
        moving = any(not body.serves and body.due_s is not None for body in bodies)
        backing_off = any(tries.again_s > now_s for tries in view.tries.values())
        young = any(body.serves and now_s < body.since_s + 60.0 for body in bodies)
        quiet_s = max((one.quiet_since_s or now_s for one in keeper.controller._scaled.values()), default=0.0)
        return not (moving or view.flying or backing_off or young or now_s < quiet_s + SCALING.idle_s)

    def check(self, model: Model) -> None:
        """As many serve as are wanted, of the right version; if not, no node has room for one more."""
        machines = [agent.machine for agent in self.place.agents.values()]
        bodies = [body for machine in machines for body in machine.bodies.values()]
        there = [body for body in bodies if body.serves and body.action.model == model.key]
        book = self.place.shelf.read(BOOK, Book)
        told = f"{model.key}: {len(there)} of {model.hot} serve, {book}"
        assert model.key not in ELASTIC or model.floor is Level.HOT or model.wanted == 0, told
        assert len(there) <= model.hot, told
        if len(there) == model.hot and all(body.action.version == model.version for body in there):
            return
        assert book is not None, told
        assert model.key in book.unmet, told
        for machine in machines:
            on = sum(body.action.node == machine.name for body in there)
            fits = not model.per_node_max or on < model.per_node_max
            free = [total - sum(machine.leases[device].values()) for device, total in machine.totals.items() if device]
            roomy = sum(size >= model.device_bytes for size in free)
            assert not (fits and roomy >= model.devices), f"{told}, and {machine.name} has room: {free}"


EVENTS = [name.removeprefix("befall_") for name in vars(Weather) if name.startswith("befall_")]
EVENTS += ["crash", "back", "scale"]  # more often than the others


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_befalls_controllers_their_fleet_comes_to_be(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started twice, no vault is over its bytes, no work is cut short; and at rest, with what is wanted as
    far as there is room, when one controller is left. In half of them nodes are forgotten, and come back."""
    deaths = 0
    monkeypatch.setattr(hearing, "FORGET_S", FORGET_S if part % 2 else hearing.FORGET_S)
    for number in range(EACH):
        seed = SEED + part * EACH + number
        weather = Weather(seed)
        try:
            weather.run()
        except AssertionError as error:
            raise AssertionError(f"world {seed}: {error}") from error
        deaths += weather.deaths
    assert deaths > EACH
