"""Whoever keeps a rollout going is killed at every step that it writes down, at every point of it: the next goes on,
does nothing twice, and comes to the same end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from holdfast.rollout import machine as m
from tests.rigs.worlds.rollout import Driver, World, part, revision

SECONDS = 70


class Scenario:
    """A world, and revisions that are asked for at given times."""

    def __init__(self, world: Callable[[], World], *wishes: tuple[int, m.Revision]) -> None:
        self.world, self.wishes = world, dict(wishes)

    def play(self, killed_at: int = -1, writes: bool = True, carries: int = 0) -> Play:
        return Play(self, killed_at, writes, carries)


class Play:
    """One run of a scenario. `changing`: the steps that were written down, and how many deeds each had."""

    def __init__(self, scenario: Scenario, killed_at: int, writes: bool, carries: int) -> None:
        self.driver, self.changing = Driver(scenario.world()), dict[int, int]()
        self.undone = Counter[int]()
        for second in range(SECONDS):
            self.driver.desired = scenario.wishes.get(second, self.driver.desired)
            self.driver.now_s = float(second)
            for name in list(self.driver.world.bodies):
                self.driver.world.notch(name)
            before = self.driver.state
            if second == killed_at:
                self.driver.step(writes=writes, carries=carries)
                self.driver = self.driver.next_life()
            acts = self.driver.step()
            if self.driver.state != before:
                self.changing[second] = len(acts)
            self.undone[self.driver.state.undone] += self.driver.state.undone != before.undone

    @property
    def end(self) -> tuple[object, ...]:
        memory, world = self.driver.state, self.driver.world
        there = Counter((body.service, body.set_id, body.counts) for body in world.bodies.values())
        return memory.phase, memory.target.number, memory.undone, there, world.names, self.undone


def bad(fate: str) -> Callable[[], World]:
    return lambda: World(fates={"b": fate})


FIRST = revision(1, worker=part("a*2"), frontend=part("f*1"))
SCENARIOS = {
    "a new version": Scenario(World, (0, FIRST), (10, revision(2, worker=part("b*2"), frontend=part("g*1")))),
    "more surge": Scenario(World, (0, FIRST), (10, revision(2, worker=part("b*3", surge=2), frontend=part("f*1")))),
    "a bad canary": Scenario(bad("canary"), (0, FIRST), (10, revision(2, worker=part("b*2"), frontend=part("f*1")))),
    "errors": Scenario(bad("errors"), (0, FIRST), (10, revision(2, worker=part("b*2"), frontend=part("f*1")))),
    "superseded": Scenario(
        World,
        (0, FIRST),
        (10, revision(2, worker=part("b*2"), frontend=part("f*1"))),
        (22, revision(3, worker=part("c*1"), frontend=part("f*2"))),
    ),
    "no room": Scenario(
        lambda: World(places={"worker": 2}), (0, FIRST), (10, revision(2, worker=part("b*2"), frontend=part("f*1")))
    ),
    "beside": Scenario(
        lambda: World(places={"worker": 2}, roomy={"worker"}),
        (0, FIRST),
        (10, revision(2, worker=part("b*2"), frontend=part("f*1"))),
    ),
    "beside and bad": Scenario(
        lambda: World(places={"worker": 1}, roomy={"worker"}, fates={"b": "canary"}),
        (0, revision(1, worker=part("a*1"))),
        (10, revision(2, worker=part("b*1"))),
    ),
    "pairs": Scenario(
        World,
        (0, revision(1, prefill=part("p*1", peers=("decode",)), decode=part("d*2", peers=("prefill",)))),
        (10, revision(2, prefill=part("q*1", peers=("decode",)), decode=part("e*2", peers=("prefill",)))),
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_every_step(name: str) -> None:
    """Before it wrote, after it wrote, and after each of its deeds: the same end, the same replicas, each once."""
    scenario = SCENARIOS[name]
    whole = scenario.play()
    assert whole.driver.state.phase is m.RolloutPhase.STEADY
    assert len(whole.changing) >= 8, "a rollout has many steps"
    for second, deeds in whole.changing.items():
        assert scenario.play(second, writes=False).end == whole.end, f"at {second} s, before it wrote"
        for done in range(deeds + 1):
            assert scenario.play(second, carries=done).end == whole.end, f"at {second} s, after {done} deeds"
