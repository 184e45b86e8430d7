"""Steps ahead and steps alone: what a GPU's pace needs, shown on a CPU, where both are the same code."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from engine_rig import Vault
from torch_rig import Rig, prompt, request, rig

from holdfast.core.requests import GenerateRequest
from holdfast.engines.paged.sequences import PENDING, StepPlan
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.launched import Launched


async def one_ahead(r: Rig) -> None:
    """The engine rests, and wakes as one that launches a step before the last one's tokens are known."""
    await r.engine.rest()
    ready = r.tenant._readiness.ready
    assert ready is not None
    ready.computer.ahead = 1
    await r.engine.wake(2000)


WANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.9, "presence_penalty": 0.6, "repetition_penalty": 1.2},
    {"top_logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9},
    {"min_tokens": 6, "ignore_eos": False},
]


def asked(first: int) -> dict[int, GenerateRequest]:
    lengths = (5, 40, 16, 130, 33, 64)
    return {
        first + place: request(prompt(length, place), 30 + place, **wants)
        for place, (length, wants) in enumerate(zip(lengths, WANTS, strict=True))
    }


async def test_a_step_ahead_changes_no_token(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned before its tokens are known, a step draws what it would have drawn, whatever its streams want."""
    pending = 0
    real = Computer.launch

    def counting(self: Computer, plan: StepPlan) -> Launched:
        nonlocal pending
        pending += sum(segment.tokens == [PENDING] for segment in plan.segments)
        return real(self, plan)

    monkeypatch.setattr(Computer, "launch", counting)
    async with rig(vault) as r:
        await r.run(asked(1))
        assert pending == 0
        await one_ahead(r)
        await r.run(asked(11))
        assert pending > 100
        assert [r.tokens(number) for number in range(11, 17)] == [r.tokens(number) for number in range(1, 7)]
        logprobs = [[output.logprobs for output in r.of(number)] for number in (4, 14)]
        assert logprobs[0] == logprobs[1]


async def test_a_stream_cancelled_a_step_ahead_says_no_more(vault: Vault) -> None:
    """Nothing comes after a cancel, the others go on, and every block comes back."""
    async with rig(vault) as r:
        await one_ahead(r)
        r.submit({number: request(prompt(30, number), 60) for number in range(1, 5)})
        await r.until(lambda: len(r.tokens(2)) >= 10)
        r.engine.cancel(2)
        said = len(r.tokens(2))
        await r.until(lambda: r.ended(1, 3, 4))
        assert len(r.tokens(2)) == said
        assert [len(r.tokens(number)) for number in (1, 3, 4)] == [60, 60, 60]
        assert r.blocks.used == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("filled", [False, True])
async def test_a_fast_engines_canary_is_computed_alone(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, ahead: bool, filled: bool
) -> None:
    """Its steps are never mixed with others', with which they take turns; so its answer is the known one beside any
    load, though rounding depends on who runs in a batch. Where the last check left its prompt's KV, there is no step
    for the prompt. The others miss nothing."""
    steps: list[set[int]] = []
    real = Computer.launch

    def noted(self: Computer, plan: StepPlan) -> Launched:
        steps.append({segment.stream for segment in plan.segments})
        return real(self, plan)

    async with rig(vault, exact=False) as r:
        if ahead:
            await one_ahead(r)
        if filled:
            assert await r.engine.check() == ""
        monkeypatch.setattr(Computer, "launch", noted)
        r.submit({number: request(prompt(50, number), 40) for number in range(1, 6)})
        r.engine.submit(0, r.tenant.canary.request)
        await r.until(lambda: r.ended(0, 1, 2, 3, 4, 5))
        assert tuple(r.tokens(0)) == r.tenant.canary.tokens
        alone = [place for place, streams in enumerate(steps) if 0 in streams]
        assert len(alone) == len(r.tenant.canary.tokens) + (not filled)
        assert all(steps[place] == {0} for place in alone)
        assert all(later - place > 1 for place, later in pairwise(alone))
        assert [len(r.tokens(number)) for number in range(1, 6)] == [40] * 5


async def test_an_exact_engines_canary_rides_with_the_others(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row does not depend on its batch, the canary costs no step of its own."""
    steps: list[set[int]] = []
    real = Computer.launch

    def noted(self: Computer, plan: StepPlan) -> Launched:
        steps.append({segment.stream for segment in plan.segments})
        return real(self, plan)

    async with rig(vault) as r:
        monkeypatch.setattr(Computer, "launch", noted)
        r.submit({number: request(prompt(50, number), 40) for number in range(1, 3)})
        r.engine.submit(0, r.tenant.canary.request)
        await r.until(lambda: r.ended(0, 1, 2))
        assert tuple(r.tokens(0)) == r.tenant.canary.tokens
        assert any(streams > {0} for streams in steps)
