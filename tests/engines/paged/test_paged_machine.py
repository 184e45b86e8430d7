"""The scheduler through any sequence of requests, cancels, steps ahead, deaths and fences, against a real pool."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.core.errors import HoldfastError
from holdfast.core.requests import GenerateRequest, Output
from tests.rigs.engines.paged_scheduler import SIZE, World, request, unbroken

BLOCKS = 7
LENGTH_MAX = BLOCKS * SIZE
PLACES = 3


class SchedulerMachine(RuleBasedStateMachine):
    """The model: what each stream must say, and how much of it was said."""

    @initialize(lookahead=st.integers(0, 2), budget=st.integers(4, 9), holds=st.booleans())
    def begin(self, lookahead: int, budget: int, holds: bool) -> None:
        given = {"concurrency": PLACES, "queue": PLACES, "step_tokens_max": budget}
        self.world = World(BLOCKS, lookahead, holds=holds, **given)
        self.asked: dict[int, GenerateRequest] = {}
        self.said: dict[int, list[int]] = {}
        self.cancelled: set[int] = set()
        self.ended: set[int] = set()
        self.numbers = iter(range(10**6))

    # Few prompts, so that prefixes meet: two streams may compute one block side by side.
    @rule(
        kind=st.integers(0, 2), length=st.integers(1, LENGTH_MAX), more=st.integers(0, 20), stop=st.integers(0, 49),
        min_tokens=st.integers(0, 3), ignore_eos=st.booleans(),
    )  # fmt: skip
    def submit(self, kind: int, length: int, more: int, stop: int, min_tokens: int, ignore_eos: bool) -> None:
        number = next(self.numbers)
        given = {"stops": [stop], "min_tokens": min_tokens, "ignore_eos": ignore_eos}
        asked = request([kind + at // 6 for at in range(length)], more, **given)
        self.send(number, asked)

    def send(self, number: int, asked: GenerateRequest) -> None:
        scheduler = self.world.scheduler
        full = len(scheduler.waiting) + len(scheduler.running) + len(scheduler.early) >= 2 * PLACES
        if full or asked.prompt_len >= LENGTH_MAX:
            with pytest.raises(HoldfastError, match="can never fit" if asked.prompt_len >= LENGTH_MAX else "wait here"):
                scheduler.submit(number, asked)
            return
        scheduler.submit(number, asked)
        self.asked[number], self.said[number] = asked, []

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.asked)))
        self.world.scheduler.cancel(number)
        if number not in self.ended:
            self.cancelled.add(number)

    @rule()
    def plan(self) -> None:
        if self.world.scheduler.in_flight <= self.world.settings.lookahead:
            self.world.plan()

    @precondition(lambda self: self.world.queue)
    @rule()
    def retire(self) -> None:
        self.take(self.world.retire())

    @rule()
    def let_go(self) -> None:
        self.world.let_go()

    @rule()
    def admit(self) -> None:
        self.world.scheduler.admit()

    @rule()
    def early(self) -> None:
        self.take(self.world.scheduler.take_early())

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            number = output.stream
            assert number not in self.ended, "something follows a last output"
            assert number not in self.cancelled, "something is said of a cancelled stream"
            self.said[number] += output.tokens
            expected = unbroken(self.asked[number], LENGTH_MAX)
            assert self.said[number] == expected[: len(self.said[number])]
            assert (output.finish is not None) == (self.said[number] == expected)
            if output.finish is not None:
                self.ended.add(number)

    @rule(fence=st.booleans())
    def die(self, fence: bool) -> None:
        """Every stream that lives is sent again with what was said; early ones too."""
        self.world.die_and_adopt(fence)
        alive = [number for number in self.asked if number not in self.ended | self.cancelled]
        old, self.asked, said = self.asked, {}, self.said
        self.said, self.ended, self.cancelled = {}, set(), set()
        for number in alive:
            before = old[number]
            resumed = GenerateRequest(
                "r", before.tokens + said[number], before.prompt_len, before.sampling, before.stop_token_ids
            )
            self.send(next(self.numbers), resumed)

    @rule()
    def fence(self) -> None:
        self.world.pool.gpu_fence_passed()

    @rule()
    def drain(self) -> None:
        """Whatever happened, everyone who was taken comes to an end, once."""
        self.world.pool.gpu_fence_passed()
        self.take(self.world.drain())
        assert self.ended | self.cancelled == set(self.asked)
        assert self.world.blocks.used == 0

    @invariant()
    def books(self) -> None:
        if hasattr(self, "world"):
            self.world.check_books()


SchedulerMachine.TestCase.settings = settings(max_examples=125, stateful_step_count=40, deadline=None)


class TestScheduler(SchedulerMachine.TestCase):
    """Accounting is exact, every stream says what it must and ends once, keys are the chain over the tokens."""
