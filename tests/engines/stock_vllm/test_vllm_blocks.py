"""Blocks asked for as vLLM asks for them, through any sequence of steps, aborts, preemptions and deaths."""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.rigs.engines.vllm_small_scheduler import Desk, Stream

SIZE = 2
SHARED = 6
# From moment to moment: a stream arrives, steps are planned and retired, a stream is aborted, or all are.
ACTS = "++SSSSRRRRa0"
seeds = st.integers(0, 2**32).map(Random)


class BlocksMachine(RuleBasedStateMachine):
    """After every act the index says no more than what is in the blocks, and no less than what has retired."""

    @initialize(depth=st.integers(1, 2), ahead=st.booleans(), fifo=st.booleans(), longest=st.sampled_from([2, SHARED]))
    def begin(self, depth: int, ahead: bool, fifo: bool, longest: int) -> None:
        self.desk = Desk(SHARED, SIZE, depth, ahead=ahead, fifo=fifo, text_blocks_max=longest)

    def work(self, draw: Random) -> None:
        """What goes before every rarer act. By a seed: so many choices are mixed better than if each were drawn."""
        for _ in range(draw.randint(1, 60)):
            self.act(draw.choice(ACTS), draw)
            self.desk.check()

    def act(self, act: str, draw: Random) -> None:
        desk = self.desk
        flights, present = len(desk.world.flights), desk.running + desk.waiting
        if act == "+" and len(present) < 6:
            prompt = [int(draw.random() < 0.2) for _ in range(draw.randint(1, 7))]  # many begin alike
            desk.waiting.append(Stream(prompt, len(prompt) + draw.randint(1, 5), draw.random() < 0.75))
        if act == "S" and flights < desk.depth:
            desk.schedule(draw.choice([1, 2, 3, 5, 9]))
        if act == "R" and flights:
            desk.retire()
        if act == "a" and present:
            desk.abort(draw.choice(present))
        if act == "0" and draw.random() < 0.2:
            for stream in present:
                desk.abort(stream)

    @rule(draw=seeds, aborted=st.booleans())
    def reset(self, draw: Random, aborted: bool) -> None:
        """Refused while anything is held; else nothing is found, not even what is in flight."""
        self.work(draw)
        desk = self.desk
        for stream in desk.running + desk.waiting if aborted else []:
            desk.abort(stream)
        held = any(stream.blocks for stream in desk.running)
        assert desk.vault.reset() == (not held)
        if not held:
            desk.named.clear()
            assert not any(desk.vault.match((key,)) for key in desk.world.texts)

    @rule(draw=seeds, canary=st.sampled_from([True, True, False]), back=st.integers(0, 5))
    def die(self, draw: Random, canary: bool, back: int) -> None:
        """Some streams come back with what they have shown."""
        self.work(draw)
        desk = self.desk
        present = [stream for stream in desk.running + desk.waiting if len(stream.tokens) < stream.end][:back]
        desk.running, desk.waiting = [], [Stream(s.tokens, s.end, s.reads_cache) for s in present]
        desk.world.die(canary)
        desk.wake()
        desk.check()

    @rule(draw=seeds, by=st.sampled_from(["fence", "fence", "late", "resumed"]))
    def behind_our_back(self, draw: Random, by: str) -> None:
        self.work(draw)
        world = self.desk.world
        {"fence": world.fence, "late": world.pool.fence_is_late, "resumed": world.pool.streams_resumed}[by]()
        self.desk.check()

    @rule(draw=seeds)
    def rest(self, draw: Random) -> None:
        self.work(draw)
        desk = self.desk
        for stream in desk.running + desk.waiting:
            desk.abort(stream)
        while desk.world.flights:
            desk.retire()
        desk.world.check_at_rest(desk.vault)
        desk.vault.detach()
        desk.vault.attach(desk.world.pool)

    @rule(draw=seeds)
    def gulp(self, draw: Random) -> None:
        """All the room there is said to be is there."""
        self.work(draw)
        vault = self.desk.vault
        taken = vault.take(vault.room)
        for block in taken:
            self.desk.named.pop(block.block_id, None)
        vault.give_back(taken)
        self.desk.check()


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=10, deadline=None)
