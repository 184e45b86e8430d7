"""A deployment that loses its workers and gets them back, with tiers, capacity and levels at work together.

The rooms' own parts decide; only the world is made up: places, arrivals and time.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from holdfast.core.tiers import Tier
from holdfast.routing.capacity import Carrier, Meter, Profile, measure_capacity
from holdfast.routing.degradation import RULES, Degradation, Sampled, refusal
from holdfast.routing.tiers import TierQueue
from holdfast.spec.health import DegradationSettings, SloSettings

WORKERS, PLACES = 20, 4
ANSWER_TOKENS, PACE_S = 100, 0.02  # a stream holds its place for two seconds
FULL_PER_S = WORKERS * PLACES / (ANSWER_TOKENS * PACE_S)  # 40 requests
TICK_S = 0.1
WAITING_MAX = 100


@dataclass(eq=False)
class Request:
    tier: Tier
    came_s: float
    left_s: float = ANSWER_TOKENS * PACE_S  # of its time in a place


@dataclass(eq=False)
class Worker:
    meter: Meter = field(default_factory=Meter)
    there: bool = True
    running: list[Request] = field(default_factory=list)


class World:
    """Places, arrivals and time; a tenth of a second at once."""

    def __init__(self, offered: dict[Tier, float], seed: int) -> None:
        self.rng = random.Random(seed)
        self.offered = offered  # of full capacity
        self.now_s = 0.0
        self.workers = [Worker() for _ in range(WORKERS)]
        self.resumed: TierQueue[Request] = TierQueue(None)
        self.fresh: TierQueue[Request] = TierQueue(WAITING_MAX)
        self.degradation = Degradation(DegradationSettings())
        self.levels = [0]
        self.refused: Counter[tuple[Tier, int]] = Counter()  # by tier and level
        self.ended: Counter[Tier] = Counter()
        self.waited_max_s = dict.fromkeys(Tier, 0.0)
        self.batch_max: dict[int, int] = {}  # the largest batch that one who is not premium joined, by level

    def run(self, share: float, lasts_s: float) -> None:
        """Let so many workers be there, for so long."""
        for number, worker in enumerate(self.workers):
            worker.there = number < round(share * WORKERS)
            if not worker.there:
                for request in worker.running:
                    self.resumed.join(request, request.tier, request.came_s)
                worker.running.clear()
        for step in range(round(lasts_s / TICK_S)):
            self.now_s += TICK_S
            self.serve()
            self.arrive()
            self.place()
            if step % 5 == 0:
                self.decide()

    def serve(self) -> None:
        for worker in self.workers:
            if worker.there:
                tokens = round(len(worker.running) * TICK_S / PACE_S)
                worker.meter.add_window(len(worker.running), tokens, TICK_S, self.now_s)
            for request in worker.running:
                request.left_s -= TICK_S
                self.ended[request.tier] += request.left_s < TICK_S / 2
            worker.running = [request for request in worker.running if request.left_s >= TICK_S / 2]

    def arrive(self) -> None:
        level = self.degradation.record.level_for(has_worker=any(worker.there for worker in self.workers))
        for tier, share in self.offered.items():
            for _ in range(sum(self.rng.random() < share * FULL_PER_S * TICK_S / 20 for _ in range(20))):
                if refusal(level, tier) is not None:
                    self.refused[tier, level] += 1
                    continue
                out = self.fresh.join(request := Request(tier, self.now_s), tier, request.came_s)
                if out is not None:
                    self.refused[out.tier, level] += 1

    def place(self) -> None:
        """Streams that ran before take any place; a new one the places that the level leaves to its tier."""
        rules = RULES[self.degradation.level]
        for line in (self.resumed, self.fresh):
            for waiting in line:
                free = min((w for w in self.workers if w.there), key=lambda w: len(w.running), default=None)
                places = PLACES if line is self.resumed else rules.places(PLACES, waiting.tier)
                if free is None or len(free.running) >= places:
                    break
                line.leave(waiting.item)
                free.running.append(waiting.item)
                if line is self.fresh:
                    self.waited_max_s[waiting.tier] = max(self.waited_max_s[waiting.tier], self.now_s - waiting.since_s)
                    if waiting.tier is not Tier.PREMIUM:
                        self.note_batch(len(free.running))

    def note_batch(self, size: int) -> None:
        level = self.degradation.level
        self.batch_max[level] = max(self.batch_max.get(level, 0), size)

    def decide(self) -> None:
        carriers = [Carrier("w", 1.0, PLACES, worker.meter) for worker in self.workers if worker.there]
        slo = SloSettings(requests_per_s=FULL_PER_S)
        capacity = measure_capacity(slo, Profile(100.0, ANSWER_TOKENS), carriers, WORKERS, self.now_s)
        record = self.degradation.step(Sampled(capacity.ratio, capacity.carriers), self.now_s)
        if record is not None and record.level != self.levels[-1]:
            self.levels.append(record.level)


OFFERED = {
    "quiet": {Tier.PREMIUM: 0.1, Tier.STANDARD: 0.1, Tier.BEST_EFFORT: 0.1},
    "busy": {Tier.PREMIUM: 0.2, Tier.STANDARD: 0.3, Tier.BEST_EFFORT: 0.3},
    "flooded": {Tier.PREMIUM: 0.2, Tier.STANDARD: 0.8, Tier.BEST_EFFORT: 1.0},
}


@pytest.mark.parametrize("load", OFFERED)
def test_capacity_falls_and_returns_and_premium_sees_no_refusal_before_level_4(load: str) -> None:
    """90, 70, 45, 20, 0 and back to 100 %: the levels follow and return, whatever the load; what is left serves the
    higher tiers first; of a fifth of full capacity, premium, nobody is refused or pushed out below level 4."""
    world = World(OFFERED[load], seed=7)
    for share in (1.0, 0.9, 0.7, 0.45, 0.2, 0.0):
        world.run(share, 40.0)
    assert world.levels == [0, 1, 2, 3, 4]
    world.run(1.0, 60.0)
    assert world.levels in ([0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 1, 0])
    assert {level for tier, level in world.refused if tier is Tier.PREMIUM} == {4}
    assert {level for tier, level in world.refused if tier is Tier.BEST_EFFORT} >= {2, 3, 4}
    assert all(size <= RULES[level].places(PLACES, Tier.STANDARD) for level, size in world.batch_max.items())
    refused = world.refused.copy()
    world.run(1.0, 60.0)
    if load != "flooded":
        assert world.refused == refused, "all is as it was: nobody is refused"


def test_a_quarter_of_the_workers_serves_premium_at_level_3() -> None:
    """The least capacity of level 3 is all premium's, if it needs it: its waits stay bounded, its line short."""
    world = World(OFFERED["flooded"], seed=11)
    world.run(1.0, 20.0)
    world.run(0.25, 20.0)
    world.waited_max_s = dict.fromkeys(Tier, 0.0)
    world.run(0.25, 300.0)
    assert world.levels[-1] == 3
    assert not [key for key in world.refused if key[0] is Tier.PREMIUM]
    assert world.waited_max_s[Tier.PREMIUM] < 5.0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_a_smaller_batch_and_the_load_move_no_level(seed: int) -> None:
    """With the same workers the level stays, though load and batches come and go."""
    world = World({}, seed)
    for share, load in itertools.product((1.0, 0.7, 0.45), OFFERED):
        world.offered = OFFERED[load]
        world.run(share, 60.0)
    assert world.levels in ([0, 2, 3], [0, 1, 2, 3])


def test_running_streams_are_never_pushed_out() -> None:
    """Whoever runs comes to its end, also through the loss of its worker, whatever tier arrives meanwhile."""
    world = World({Tier.BEST_EFFORT: 1.0}, seed=3)
    world.run(1.0, 10.0)
    running = [request for worker in world.workers for request in worker.running]
    world.offered = {Tier.PREMIUM: 2.0}
    world.run(0.25, 15.0)
    assert len(running) > WORKERS * PLACES / 2
    assert all(request.left_s < TICK_S / 2 for request in running)
