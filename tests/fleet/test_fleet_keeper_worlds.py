"""Random worlds for the controller by their seeds: it dies before and after every write, two lead at once, nodes and
replicas come and go, agents are late and fail. Then it is quiet, and all must come to rest.

What must never be is asserted by the machines (`tests/rigs/worlds/fleet_node.py`) and by the shelf: a vault over its
bytes, a name that is started twice, work that is cut short, a serial that no record knew, a replica told to leave that
gets new work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
from msgspec import structs

from holdfast.fleet import planner
from holdfast.fleet.desired import Cordon, Level, Model
from holdfast.fleet.planner import GRACE_S
from holdfast.fleet.records import FleetRecord
from holdfast.fleet.scaling import Scaling
from holdfast.fleet.view import FleetView
from tests.rigs.worlds.fleet_controllers import NODES, RECORD, ControllersWorld, Keeper, Overtaken
from tests.rigs.worlds.fleet_storms import Storm

SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "0")) % 1_000_000
EACH = 30
# One of an even and one of an odd number: nodes are forgotten in the odd ones only.
PARTS = [0, 1, *(pytest.param(part, marks=pytest.mark.long) for part in range(2, 8))]
STEPS = 120
QUIET_STEPS_MAX = 800  # back-offs of five minutes and an hour of time-outs are passed in leaps
KEEPERS_MAX = 2
FORGET_S = 15.0  # of worlds that are over sooner than nodes are forgotten
ELASTIC = frozenset({"m1", "m3"})  # models whose number is scaling's
SCALING = Scaling(high_s=1.0, low_s=10.0, step_up_s=5.0, step_down_s=10.0, idle_s=120.0)


class Weather(Storm):
    """A world with controllers that write to its store, and what befalls it."""

    world: ControllersWorld
    machines_max, models_max, devices = 4, 4, (1, 1, 2)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.deaths = 0

    def begun(self) -> ControllersWorld:
        return ControllersWorld()

    def model(self, key: str) -> Model:
        return structs.replace(super().model(key), nodes=frozenset())

    def want(self, model: Model) -> None:
        """By a person's word alone, or as scaling says."""
        self.world.want(model, SCALING if model.key in ELASTIC else None)

    def play(self) -> None:
        rng, place = self.rng, self.world
        for _ in range(STEPS):
            place.now_s += rng.choice((0.0, 0.0, 0.1, 0.5, 2.0, 5.0, 20.0))
            if rng.random() < 0.3:
                getattr(self, f"befall_{rng.choice(self.events)}")()
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
        try:
            keeper.advance(self.world.now_s)
        except Overtaken:
            self.world.keepers.remove(keeper)
        else:
            if self.rng.random() < 0.06:
                self.world.keepers.remove(keeper)
                self.deaths += 1

    # -- what befalls it, beside what befalls any

    def befall_away(self) -> None:
        self.cut_off()

    def befall_store(self) -> None:
        """It forgets what was leased, and is back at once, or a while later."""
        for name in self.world.machines:
            self.world.shelf.values.pop(NODES + name, None)
        for keeper in self.world.keepers:
            keeper.read_changes(self.world.now_s)
        self.world.now_s += self.rng.choice((0.0, 30.0))
        for keeper in self.world.keepers:
            keeper.controller.on_store_back(self.world.now_s)

    def befall_cordon(self) -> None:
        """A node is cordoned or drained, or used again; it may be one that is not there."""
        name = self.rng.choice([*self.world.machines, "n9"])
        used = name in self.world.cordons or self.rng.random() < 0.3
        self.world.cordon(name, None if used else Cordon(drain=self.rng.random() < 0.8))

    # -- then it is quiet

    def calm_down(self) -> None:
        """One leads, nothing fails: what is wanted comes to be, as far as there is room."""
        place = self.world
        self.befall_back()
        place.keepers.clear()
        keeper = place.keeper()
        self.end_requests()
        for _ in range(QUIET_STEPS_MAX):
            place.settle()
            if self.is_at_rest():
                break
            place.now_s = self.next_s(keeper)
        else:
            raise AssertionError(f"it does not come to rest: {keeper.controller!r}")
        for model in place.models.values():
            self.check(model)

    def next_s(self, keeper: Keeper) -> float:
        now_s, bodies = self.world.now_s, [body for _, body in self.world.bodies()]
        due = [body.due_s for body in bodies if body.due_s is not None]
        due += [body.until_s for body in bodies if body.stops]
        due += [at_s for at_s in [keeper.controller.next_deadline_s()] if at_s is not None]
        return max(now_s + 0.1, min(due, default=now_s + GRACE_S))

    @property
    def view(self) -> FleetView:
        return self.world.keepers[-1].controller._view

    @property
    def unmet(self) -> Mapping[str, str]:
        return (self.world.shelf.read(RECORD, FleetRecord) or FleetRecord()).unmet

    def is_at_rest(self) -> bool:
        now_s, scaled = self.world.now_s, self.world.keepers[-1].controller._scaled
        quiet_s = max((one.quiet_since_s or now_s for one in scaled.values()), default=0.0)
        return super().is_at_rest() and now_s >= quiet_s + SCALING.idle_s

    def check(self, model: Model) -> None:
        assert model.key not in ELASTIC or model.floor is Level.HOT or model.wanted == 0, model
        super().check(model)


Weather.events = ["crash", "reboot", "away", "back", "store", "new_node", "deploy", "scale", "remove", "cordon"]
Weather.events += ["crash", "back", "scale"]  # more often than the others


@pytest.mark.parametrize("part", PARTS)
def test_whatever_befalls_controllers_their_fleet_comes_to_be(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started twice, no vault is over its bytes, no work is cut short; and at rest, with what is wanted as
    far as there is room, when one controller is left. In half of them nodes are forgotten, and come back."""
    deaths = 0
    monkeypatch.setattr(planner, "FORGET_S", FORGET_S if part % 2 else planner.FORGET_S)
    for number in range(EACH):
        seed = SEED + part * EACH + number
        weather = Weather(seed)
        try:
            weather.play()
        except AssertionError as error:
            raise AssertionError(f"world {seed}: {error}") from error
        deaths += weather.deaths
    assert deaths > EACH
