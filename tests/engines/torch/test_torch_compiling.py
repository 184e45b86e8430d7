"""Compiling is not dying: a wake that compiles says so and answers meanwhile; `exact` compiles the least it can."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
import torch
from engine_rig import BOUND_S, Vault
from torch_rig import prompt, request, rig

from holdfast.engines.paged.sequences import StepPlan
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.gpu import warm_up
from holdfast.engines.torch.launched import Launched
from holdfast.engines.torch.readiness import Readiness, Ready


async def test_a_wake_that_compiles_says_so_and_goes_on(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, what is not ready for the pool's addresses is made in the wake: whoever bounds the wake hears it before
    it begins, so that it gets a load's time; the engine answers meanwhile, and serves after it. Where all is ready
    nothing is said."""
    began, gate = threading.Event(), threading.Event()
    real = Readiness.make

    def slow(self: Readiness, address: int, size: int, private_at: int) -> Ready:
        began.set()
        assert gate.wait(BOUND_S)
        return real(self, address, size, private_at)

    async with rig(vault) as r:
        r.tenant._device = torch.device("cuda")  # as far as a wake is concerned
        await r.engine.rest()
        await r.engine.wake(2000)
        assert r.heard("loading") == []
        await r.engine.rest()
        r.tenant._readiness.ready = None
        monkeypatch.setattr(Readiness, "make", slow)
        waking = asyncio.ensure_future(r.engine.wake(3000))
        assert await asyncio.to_thread(began.wait, BOUND_S)
        (told,) = r.heard("loading")
        assert "compiled" in told
        assert r.engine.progress().budget_ms > BOUND_S * 1000
        assert not waking.done()
        gate.set()
        await waking
        await r.run({1: request(prompt(20), 5)})
        assert len(r.tokens(1)) == 5


async def test_exact_warms_up_by_one_block_and_says_what_it_costs(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every row is a call of its own, so a step of one block has them all: not every size is computed position by
    position. What a position takes is logged."""
    positions: list[int] = []
    real = Computer.launch

    def noted(self: Computer, plan: StepPlan) -> Launched:
        positions.append(plan.token_count)
        return real(self, plan)

    async with rig(vault) as r:
        ready = r.tenant._readiness.ready
        assert ready is not None
        monkeypatch.setattr(Computer, "launch", noted)
        monkeypatch.setattr(warm_up, "_pin", lambda: None)
        with caplog.at_level(logging.WARNING, "holdfast.engine"):
            warm_up.warm_up(ready.computer, 512, 16, ready.blocks.stop, lambda *_: None)
        assert positions == [16, 16]
        assert "every position is computed by itself" in caplog.text


async def test_what_is_ready_is_for_one_range_not_for_an_address(vault: Vault) -> None:
    """A larger range at the same address is another: its private blocks lie elsewhere, and what was made for the
    smaller one would write into the pool's."""
    async with rig(vault) as r:
        ready = r.tenant._readiness.ready
        assert ready is not None
        address, size, private_at = ready.where
        assert r.tenant._readiness.found(address, size, private_at) is ready
        assert r.tenant._readiness.found(address, 2 * size, private_at) is None
        assert r.tenant._readiness.found(address, size, 0) is None
        assert ready.blocks.start * r.tenant.geometry.block_bytes >= private_at > 0
