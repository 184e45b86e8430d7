"""How long a step may take is said of that very step, from its own plan, before it begins."""

from __future__ import annotations

import asyncio
import threading

import pytest
from engine_rig import BOUND_S, Vault
from torch_rig import prompt, request, rig

from holdfast.engines.paged.sequences import Segment, StepPlan, Stream
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.launched import Launched
from holdfast.engines.torch.step_budget import LEAST_MS, MARGIN, STEP_MS_MAX, StepBudget, has_chunk


def plan(*counts: int) -> StepPlan:
    stream = Stream(1, request([1]), 100, frozenset())
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
    real = Computer.launch

    def noted(self: Computer, plan: StepPlan) -> Launched:
        seen.append((plan, r.engine.progress().budget_ms))
        return real(self, plan)

    async with rig(vault, concurrency=4, step_tokens_max=32) as r:
        ready = r.tenant._readiness.ready
        assert ready is not None
        await r.engine.rest()
        ready.computer.ahead = ahead
        await r.engine.wake(2000)
        monkeypatch.setattr(Computer, "launch", noted)
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
        slowest_ms = max(took_ms for _, took_ms in r.tenant._stepper._budget._seen)
        assert all(LEAST_MS <= budget_ms <= max(LEAST_MS, MARGIN * slowest_ms * 2) for budget_ms in again)


async def test_streams_that_wait_for_an_errand_are_not_stuck(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """While something else has the step thread (a canary, kernels that compile) its time is granted, and until the next
    step is over, what it took."""
    held: list[float] = []
    real = Computer.launch

    def noted(self: Computer, plan: StepPlan) -> Launched:
        held.append(r.engine.progress().budget_ms)
        return real(self, plan)

    async with rig(vault) as r:
        began, gate = threading.Event(), threading.Event()

        def errand() -> None:
            began.set()
            gate.wait(BOUND_S)

        running = r.tenant._stepper.run(errand)
        assert await asyncio.to_thread(began.wait, BOUND_S)
        monkeypatch.setattr(Computer, "launch", noted)
        r.submit({1: request(prompt(5, 1), 3)})
        progress = r.engine.progress()
        assert progress.running + progress.waiting == 1
        assert progress.budget_ms >= STEP_MS_MAX
        gate.set()
        await asyncio.wrap_future(running)
        await r.until(lambda: r.ended(1))
        assert held[0] > LEAST_MS
        assert held[1:] == [0.0, 0.0]
