"""Numbers that are not finite are a device error: none of their tokens is said or blocks published; the engine ends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from holdfast.engines.torch.launched import NotFiniteError, row_sums
from holdfast.kv.geometry import block_keys
from tests.rigs.engines.any_engine import BOUND_S, Vault
from tests.rigs.engines.torch_engine import Rig, doomed, prompt, request
from tests.rigs.engines.torch_graphs import by_graphs

WHY = "not finite"
WANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8},
    "truncated": {"temperature": 0.8, "top_p": 0.9},
    "penalised, with logprobs": {"presence_penalty": 0.5, "top_logprobs": 2},
}


def break_kv(r: Rig, stream: int) -> None:
    """One number of a stream's first block, as a flipped bit of its exponent leaves it."""
    r.ready.computer.kv[r.scheduler.running[stream].blocks[0], 1, 1, 3, 0, 0] = math.inf


@pytest.mark.parametrize(
    ("wants", "graphs"),
    [("greedy", False), ("greedy", True), ("drawn", True), ("truncated", False), ("penalised, with logprobs", True)],
)
async def test_tokens_of_broken_numbers_are_never_said(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, wants: str, graphs: bool
) -> None:
    """Whatever a stream asks for, and however its steps are launched: all that it said is what the unbroken says."""
    async with doomed(vault, WHY) as r:
        if graphs:
            await by_graphs(r, monkeypatch)
        await r.run({1: request(prompt(40, 1), 60, **WANTS[wants])})
        r.submit({number: request(prompt(40, 1), 3000, **WANTS[wants]) for number in (2, 3)})
        await r.until(lambda: len(r.tokens(3)) >= 8)
        r.hosted._stepper.run(lambda: break_kv(r, 3)).result(BOUND_S)
        await until_fatal(r)
        for number in (2, 3):
            assert len(r.tokens(number)) < 3000
            assert r.tokens(number)[:60] == r.tokens(1)[: len(r.tokens(number))]


async def until_fatal(r: Rig) -> None:
    await r.until(lambda: bool(r.heard("fatal")))


@pytest.mark.parametrize("graphs", [False, True])
async def test_a_chunk_that_draws_nothing_is_not_published_broken(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Nobody finds the KV of a prompt's broken part under its key: an adopter would end of it, too."""
    async with doomed(vault, WHY, concurrency=4, step_tokens_max=32) as r:
        if graphs:
            await by_graphs(r, monkeypatch)
        computer = r.ready.computer
        broken = replace(computer.model, embed=torch.full_like(computer.model.embed, math.nan))
        computer.model = broken
        if computer.graphs is not None:
            computer.graphs._model = broken
        r.submit({1: request(prompt(150, 1), 10)})
        await until_fatal(r)
        keys = block_keys(r.blocks._root, prompt(150, 1)[:144], r.blocks.block_tokens)
        assert r.blocks.pool.match(keys) == 0
        assert not r.batches


async def test_a_canary_of_broken_numbers_ends_the_engine(vault: Vault) -> None:
    """It is not taken for an answer, not even for the first one, which would be the known one from then on."""
    async with doomed(vault, WHY) as r:
        model = r.ready.computer.model
        r.ready.computer.model = replace(model, norm=torch.full_like(model.norm, math.nan))
        with pytest.raises(NotFiniteError):
            await r.engine.check()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_of_a_row_is_enough(value: float) -> None:
    """A row's sum tells of it, and of no other row."""
    rows = torch.randn(4, 128_256)
    rows[2, 77_777] = value
    assert row_sums(rows).isfinite().tolist() == [True, True, False, True]
    assert row_sums(rows.to(torch.bfloat16)).isfinite().tolist() == [True, True, False, True]
