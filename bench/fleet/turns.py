"""Three models on memory for one and a half of them, asked at random for an hour of the world's time: they take turns.

A late request waits for the others' turns to end. With hysteresis a turn has its length; with hardly any a model
is evicted for whichever is asked next: waits are shorter as long as copies are quick, and there are many more of them.
"""

from __future__ import annotations

import random
from collections import deque

from bench.prove import Row
from holdfast.fleet.desired import HYSTERESIS, Hysteresis, Model
from holdfast.fleet.room import HOST
from holdfast.health.records import Demand
from tests.rigs.worlds.fleet import World
from tests.rigs.worlds.fleet_node import Machine

SECONDS = 3_600
EVERY_S = 5.0  # between two requests for a model, in the mean
ANSWER_S = 2.0
HARDLY_ANY = Hysteresis(resident_s=2.0, cooldown_s=2.0)


class Hour:
    def __init__(self, hysteresis: Hysteresis, seed: int) -> None:
        self.rng, self.world = random.Random(seed), World(hysteresis=hysteresis)
        self.world.machines["n"] = Machine("n", {"gpu0": 75, HOST: 150})
        self.lines: dict[str, deque[float]] = {key: deque() for key in "abc"}
        for key in self.lines:
            self.world.want(Model(key=key, wanted=1, device_bytes=50, host_bytes=50, drain_s=5.0))
        self.running: list[tuple[float, str]] = []  # until when, on whom
        self.waited: list[float] = []
        self.asked = 0

    def run(self) -> None:
        for second in range(SECONDS + 600):  # the last requests are answered, too
            self.world.now_s += 1.0
            for key, line in self.lines.items():
                if second < SECONDS and self.rng.random() < 1 / EVERY_S:
                    line.append(self.world.now_s)
                    self.asked += 1
                self.world.planner.view.set_demand(key, Demand(len(line), line[0]) if line else None)
            self.serve()
            self.world.tick()
            self.world.look_at_all()
            for action in self.world.plan():
                self.world.ask(action)
                self.world.send(action)
            self.world.look_at_all()

    def serve(self) -> None:
        world = self.world
        over = [one for one in self.running if one[0] <= world.now_s]
        self.running = [one for one in self.running if one[0] > world.now_s]
        for machine in world.machines.values():
            for name, body in machine.bodies.items():
                before = body.running
                body.running -= sum(one[1] == name for one in over)
                line = self.lines[body.action.model]
                while body.serves and line:
                    self.waited.append(world.now_s - line.popleft())
                    self.running.append((world.now_s + ANSWER_S, name))
                    body.running += 1
                if body.running != before:
                    machine.changed = True
                    body.idle_s = 0.0 if body.running else world.now_s

    def row(self) -> Row:
        waited = sorted(self.waited)
        return {
            "requests": self.asked,
            "answered": len(self.waited),
            "swaps": self.world.counts["evictions"],
            "wait_p50_s": round(waited[len(waited) // 2], 1),
            "wait_p99_s": round(waited[len(waited) * 99 // 100], 1),
        }


def run() -> Row:
    hour, without = Hour(HYSTERESIS, 1), Hour(HARDLY_ANY, 1)
    hour.run()
    without.run()
    row = hour.row()
    swaps_max = SECONDS / HYSTERESIS.resident_s
    return {
        **row,
        "with_hardly_any_hysteresis": without.row(),
        "bound": f"all are answered, with no more than one swap in {HYSTERESIS.resident_s:g} s",
        "met": row["answered"] == row["requests"] and row["swaps"] <= swaps_max,
    }
