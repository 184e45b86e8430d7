"""The bench's load over real books and a pool just large enough, its owner killed again and again: nobody's block goes.

No model and no sockets: a step is planned and retired, the index lies in plain memory. Steps are the clock: the GPU
fence comes some steps after a takeover, and streams come back over some steps, in any order.
"""

from __future__ import annotations

import random

import pytest

from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.engines.paged.blocks import PoolBlocks
from holdfast.engines.paged.scheduler import Scheduler, SchedulerSettings
from holdfast.kv import adopt
from holdfast.kv.geometry import Geometry
from holdfast.kv.index import Index, index_bytes
from holdfast.kv.pool import Pool
from tests.rigs.engines.mixed_load import FULL_SHARE, EngineLoad

SIZE = 16
KILLS = 25
SETTINGS = SchedulerSettings(50_000, frozenset(), 4096, concurrency=32, step_tokens_max=128)


class World:
    """Clients that ask again as soon as they have their answer; owners that die."""

    def __init__(
        self, load: EngineLoad, *, same: bool, fence_steps: int, back_steps: int, full_share: float = FULL_SHARE
    ) -> None:
        self.rng = random.Random(load.seed)
        self.load = load
        self.same, self.fence_steps, self.back_steps = same, fence_steps, back_steps
        geometry = Geometry("w", "float32", SIZE, 1, 1, 1, load.pool_blocks(full_share))
        self.index = Index(bytearray(index_bytes(geometry)), geometry)
        self.index.format(10)
        self.number = self.asked = self.at = self.fence_at = 0
        self.texts: dict[int, list[int]] = {}  # what each client has
        self.clients: dict[int, int] = {}  # by stream
        self.back_at: dict[int, int] = {}  # client → step
        self.preemptions = 0
        self._own(Pool(self.index, 10))
        for client in range(self.load.streams):
            self._ask(client)

    def _own(self, pool: Pool) -> None:
        self.pool, self.blocks = pool, PoolBlocks(pool)
        self.scheduler = Scheduler(SETTINGS, self.blocks)

    def _ask(self, client: int) -> None:
        self.asked += 1
        ids = self.load.ids(client, self.load.prompt_tokens(client))
        self.texts[client] = ids if self.same else [self.asked, *ids[1:]]
        self._submit(client)

    def _submit(self, client: int) -> None:
        self.number += 1
        self.clients[self.number] = client
        prompt_len = self.load.prompt_tokens(client)
        sampling = Sampling(self.load.tokens, 1)
        self.scheduler.submit(self.number, GenerateRequest("r", list(self.texts[client]), prompt_len, sampling))

    def kill(self) -> None:
        self.pool.canary_passed()
        self.preemptions += self.scheduler.preemptions
        epoch = self.pool.epoch + 1
        self._own(Pool(self.index, epoch, adoption=adopt.adopt(self.index, epoch)))
        self.clients = {}
        order = list(self.texts)
        self.rng.shuffle(order)
        self.back_at = {client: self.at + 1 + self.rng.randrange(self.back_steps + 1) for client in order}
        self.fence_at = self.at + self.fence_steps

    def step(self) -> None:
        self.at += 1
        for client in [client for client, at in self.back_at.items() if at == self.at]:
            self._submit(client)
        if self.at == self.fence_at:
            self.pool.gpu_fence_passed()
        plan = self.scheduler.plan()
        if plan is None:
            return
        drawn = {each.stream: _next(self.clients[each.stream], each.owner.tokens) for each in plan.drawing}
        for output in self.scheduler.retire(plan, drawn):
            client = self.clients[output.stream]
            self.texts[client] += output.tokens
            if output.finish is not None:
                self._ask(client)


def _next(client: int, text: list[int]) -> int:
    return (client * 7919 + len(text) * 31 + text[-1]) % 5000


@pytest.mark.parametrize(("fence_steps", "back_steps"), [(1, 0), (4, 3), (20, 10), (2, 40)])
@pytest.mark.parametrize(("same", "tokens"), [(True, 150), (False, 150), (False, 30)])
def test_a_stream_that_comes_back_finds_all_its_blocks(
    same: bool, tokens: int, fence_steps: int, back_steps: int
) -> None:
    """A pool 95% full with every stream at its end, asked for the same texts or ever new ones, killed in mid-prompt
    too: no block of a stream that comes back was evicted by those before it, or is missing, and nobody is preempted."""
    world = World(EngineLoad(tokens=tokens), same=same, fence_steps=fence_steps, back_steps=back_steps)
    for _ in range(300):
        world.step()
    resumed = 0
    for _ in range(KILLS):
        world.kill()
        for _ in range(world.rng.randrange(50, 150)):
            world.step()
        told = world.blocks.resumes
        assert told.resumed_evicted_total == told.resumed_missing_total == 0, told
        assert told.recomputed_tokens_max == told.recomputed_tokens_resident_max <= SIZE
        resumed += told.resumed_resident_total
    assert resumed > KILLS * world.load.streams / 2, "they came back without any of their answers"
    assert world.preemptions == 0


def test_who_has_shown_nothing_yields_to_who_comes_back() -> None:
    """A stream in mid-answer goes ahead of waiting ones that have shown nothing; these take no awaited block while
    others run, and alone they do."""
    world = World(EngineLoad(streams=2), same=False, fence_steps=1, back_steps=0, full_share=1.0)
    for _ in range(30):
        world.step()
    for alone in (False, True):
        world.kill()
        world.back_at = {}
        world.pool.gpu_fence_passed()
        assert (world.pool.free_count, world.pool.awaited_count) == (16, 8)
        if alone:
            world.scheduler.submit(200, fresh(320))
            assert [each.stream for each in world.scheduler.plan().segments] == [200]  # type: ignore[union-attr]
            assert world.pool.awaited_count < 8
            continue
        world.scheduler.submit(100, fresh(160))
        world.scheduler.submit(101, fresh(100))
        world._submit(0)
        assert [stream.number for stream in world.scheduler.waiting] == [world.number, 100, 101]
        world.scheduler.plan()
        assert list(world.scheduler.running) == [world.number, 100]
        assert world.pool.awaited_count == 4, "the other's, whose reader is not back yet"


def fresh(length: int) -> GenerateRequest:
    return GenerateRequest("r", [length + at % 7 for at in range(length)], length, Sampling(8, 1))


def test_a_late_fence_stops_nobody() -> None:
    """A fence that does not come: who finds no room but awaited blocks waits until it is called late, and then streams
    come to their ends without it."""
    world = World(EngineLoad(tokens=30), same=False, fence_steps=-1, back_steps=0)
    for _ in range(100):
        world.step()
    while [stream.missing > 500 for stream in world.scheduler.running.values()].count(True) != 1:
        world.step()
    world.kill()  # a long prompt was half computed: many blocks were open
    quarantined = world.pool.quarantined_count
    assert quarantined > 50
    for _ in range(100):
        world.step()
    assert (world.blocks.resumes.resumed_evicted_total, len(world.scheduler.waiting) > 0) == (0, True)
    before = world.asked
    world.pool.fence_is_late()
    for _ in range(200):
        world.step()
    assert world.asked > before + world.load.streams
    assert world.pool.quarantined_count == quarantined
