"""Steps ahead, steps alone and their budgets: what a GPU's pace needs, shown on a CPU, where all is the same code."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise

import pytest

from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.engines.paged.sequences import PENDING, PagedStream, Segment, StepPlan
from holdfast.engines.paged.step_budget import (
    COMPILE_MS,
    COMPILE_STEPS,
    LEAST_MS,
    MARGIN,
    STEP_MS_MAX,
    StepBudget,
    has_chunk,
)
from tests.rigs.engines.any_engine import BOUND_S, Vault
from tests.rigs.engines.torch_engine import WANTS, on_launch, prompt, request, rig


def asked(first: int) -> dict[int, GenerateRequest]:
    lengths = (5, 40, 16, 130, 33, 70, 64)
    return {
        first + place: request(prompt(length, place), 30 + place, **wants)
        for place, (length, wants) in enumerate(zip(lengths, WANTS, strict=True))
    }


async def test_a_step_ahead_changes_no_token(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned before its tokens are known, a step draws what it would have drawn, whatever its streams want."""
    plans: list[StepPlan] = []
    on_launch(monkeypatch, plans.append)

    def pending() -> int:
        return sum(segment.tokens == [PENDING] for plan in plans for segment in plan.segments)

    async with rig(vault) as r:
        await r.run(asked(1))
        assert pending() == 0
        await r.wake_again(ahead=1)
        await r.run(asked(11))
        assert pending() > 100
        assert [r.tokens(number) for number in range(11, 18)] == [r.tokens(number) for number in range(1, 8)]
        logprobs = [[output.logprobs for output in r.of(number)] for number in (4, 14)]
        assert logprobs[0] == logprobs[1]


def streams_of(plans: list[StepPlan]) -> list[set[int]]:
    return [{segment.stream for segment in plan.segments} for plan in plans]


@pytest.mark.parametrize(("ahead", "filled"), [(False, True), (True, False)])
async def test_a_fast_engines_canary_is_computed_alone(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, ahead: bool, filled: bool
) -> None:
    """Its steps are never mixed with others', with which they take turns; so its answer is the known one beside any
    load, though rounding depends on who runs in a batch. Where the last check left its prompt's KV, there is no step
    for the prompt. The others miss nothing."""
    plans: list[StepPlan] = []
    async with rig(vault, exact=False) as r:
        if ahead:
            await r.wake_again(ahead=1)
        if not filled:
            r.hosted._readiness._filled = None  # as where it was made in the wake, and never checked
        on_launch(monkeypatch, plans.append)
        r.submit({number: request(prompt(50, number), 40) for number in range(1, 6)})
        r.engine.submit(0, r.hosted.canary.request)
        await r.until(lambda: r.ended(0, 1, 2, 3, 4, 5))
        assert tuple(r.tokens(0)) == r.hosted.canary.tokens
        steps = streams_of(plans)
        alone = [place for place, streams in enumerate(steps) if 0 in streams]
        assert len(alone) == len(r.hosted.canary.tokens) + (not filled)
        assert all(steps[place] == {0} for place in alone)
        assert all(later - place > 1 for place, later in pairwise(alone))
        assert [len(r.tokens(number)) for number in range(1, 6)] == [40] * 5


async def test_an_exact_engines_canary_rides_with_the_others(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row does not depend on its batch, the canary costs no step of its own."""
    plans: list[StepPlan] = []
    async with rig(vault) as r:
        on_launch(monkeypatch, plans.append)
        r.submit({number: request(prompt(50, number), 40) for number in range(1, 3)})
        r.engine.submit(0, r.hosted.canary.request)
        await r.until(lambda: r.ended(0, 1, 2))
        assert tuple(r.tokens(0)) == r.hosted.canary.tokens
        assert any(streams > {0} for streams in streams_of(plans))


# -- how long a step may take: said of that very step, from its own plan, before it begins


def plan(*counts: int) -> StepPlan:
    stream = PagedStream(1, request([1]), 100, frozenset())
    return StepPlan(1, [Segment(stream, [0] * count, 0, [], True) for count in counts])


def test_a_decode_is_the_judges_own_to_bound() -> None:
    """Without a piece of a prompt nothing is declared, whatever was seen."""
    budget = StepBudget()
    budget.took(plan(512), 4000.0)
    assert budget.of(plan(1, 1, 1)) == 0.0


def test_a_chunks_budget_follows_its_positions_and_what_was_seen() -> None:
    """All there may be before any was seen; then a margin over what such steps took, more for more positions."""
    budget = StepBudget()
    assert budget.of(plan(1, 30)) == STEP_MS_MAX
    budget.took(plan(100), 100.0)
    assert budget.of(plan(100)) == MARGIN * 100
    assert budget.of(plan(16)) == MARGIN * 100
    assert budget.of(plan(100, 100)) == MARGIN * 200
    budget.took(plan(100), 10_000.0)
    assert budget.of(plan(100)) == STEP_MS_MAX
    for _ in range(40):
        budget.took(plan(100), 5.0)
    assert budget.of(plan(100)) == LEAST_MS, "a hang in it is noticed as soon as one in a decode"


def test_a_way_of_drawing_that_is_new_may_compile_its_kernels() -> None:
    """For the steps after its first request alone, and once: a hang in a later one is noticed soon."""
    budget, plain = StepBudget(), Sampling(max_tokens=5, seed=1, temperature=0.0)
    for sampling in (plain, Sampling(max_tokens=5, seed=1, temperature=0.7, top_p=0.9)):
        budget.note_request(sampling)
        assert budget.of(plan(1)) == COMPILE_MS
        for _ in range(COMPILE_STEPS):
            budget.took(plan(1), 5.0)
        budget.note_request(sampling)
        assert budget.of(plan(1)) == 0.0


def test_what_an_errand_took_is_granted_to_the_step_after_it() -> None:
    """Streams have waited that long for a step; the step after that one owes nothing."""
    budget = StepBudget()
    assert budget.errand_took(5000.0) == 5000.0 + LEAST_MS
    assert budget.of(plan(1)) == 5000.0 + LEAST_MS
    budget.took(plan(1), 1.0)
    assert budget.of(plan(1)) == 0.0


@pytest.mark.parametrize("ahead", [0, 1])
async def test_every_chunk_is_declared_while_it_runs(vault: Vault, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """Of a prompt in pieces each piece has its budget, the last one too; a decode has none, unless a piece is still on
    its way; and once a first piece was seen, the next ones no longer have all the time there is."""
    seen: list[tuple[StepPlan, float]] = []
    async with rig(vault, concurrency=4, step_tokens_max=32) as r:
        await r.wake_again(ahead=ahead)
        on_launch(monkeypatch, lambda plan: seen.append((plan, r.engine.progress().budget_ms)))
        await r.run({1: request(prompt(90, 1), 20)})
        chunks = [budget_ms for plan, budget_ms in seen if has_chunk(plan)]
        assert len(chunks) == 3
        assert all(budget_ms >= LEAST_MS for budget_ms in chunks), chunks
        assert chunks[0] >= STEP_MS_MAX
        decodes = [budget_ms for plan, budget_ms in seen if not has_chunk(plan)]
        assert (decodes[0] > 0) == (ahead > 0), "with a step ahead the last piece is still on its way"
        assert set(decodes[ahead:]) == {0.0}
        seen.clear()
        await r.run({2: request(prompt(90, 2), 4)})
        again = [budget_ms for plan, budget_ms in seen if has_chunk(plan)]
        slowest_ms = max(took_ms for _, took_ms in r.hosted._stepper._budget._seen)
        assert all(LEAST_MS <= budget_ms <= max(LEAST_MS, MARGIN * slowest_ms * 2) for budget_ms in again)


async def test_streams_that_wait_for_an_errand_are_not_stuck(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """While something else has the step thread (a canary, kernels that compile) its time is granted, and until the next
    step is over, what it took."""
    held: list[float] = []
    async with rig(vault) as r:
        began, gate = threading.Event(), threading.Event()

        def errand() -> None:
            began.set()
            gate.wait(BOUND_S)

        running = r.hosted._stepper.run(errand)
        assert await asyncio.to_thread(began.wait, BOUND_S)
        on_launch(monkeypatch, lambda plan: held.append(r.engine.progress().budget_ms))
        r.submit({1: request(prompt(5, 1), 3)})
        progress = r.engine.progress()
        assert progress.running + progress.waiting == 1
        assert progress.budget_ms >= STEP_MS_MAX
        gate.set()
        await asyncio.wrap_future(running)
        await r.until(lambda: r.ended(1))
        assert held[0] > LEAST_MS
        assert held[1:] == [0.0, 0.0]
