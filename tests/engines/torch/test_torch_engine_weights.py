"""Weights are in the vault once: the first engine writes, others map and verify; damage is found and mended.

The proof of flipped bits with a real model is `make prove-bit-flips`; here it is a tiny one, in this process.
"""

from __future__ import annotations

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from holdfast.engines.host.flips import WeightFaults
from holdfast.engines.sim.faults import Fault
from holdfast.engines.torch.files.resolve import tiny
from holdfast.engines.torch.model.weights import SUMS, TorchWeights
from holdfast.health.expectations import BANDS, CanaryAnswer, answer_of, difference, flaw_of
from holdfast.memory.client.weights import MappedWeights
from tests.rigs.engines.any_engine import Vault
from tests.rigs.engines.torch_engine import Rig, prompt, request, rig

CPU = torch.device("cpu")


async def test_a_second_engine_maps_what_the_first_wrote(vault: Vault) -> None:
    """One engine loads, with progress from nothing to all; the next maps the same bytes and loads nothing."""
    async with rig(vault) as first:
        work, done, total = first.progress[-1]
        assert (work, first.progress[0]) == ("load", ("load", 0, total))
        assert done == total == first.hosted.weights.size_bytes - first.hosted.weights.specs[-1].size_bytes
        second = Rig(vault, engine_id=1)
        await second.load()
        assert second.progress == []
        assert await second.engine.check() == ""
        for name, tensor in first.hosted.weights.tensors.items():
            other = second.hosted.weights.tensors[name]
            assert torch.equal(tensor, other)
            assert tensor.data_ptr() != other.data_ptr()
        await second.engine.stop()
    assert vault.commits() == 1


async def test_damaged_weights_are_found_and_loaded_anew(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bit that changed between the sums and the commit is found by the next engine, which names the parameter, loads
    everything anew beside it, and has it right."""
    real = TorchWeights.fill

    def fill_and_flip(self: TorchWeights, addresses: dict[str, int]) -> None:
        real(self, addresses)
        tensor = self._views(addresses)["layer.2.down"]
        tensor.view(torch.int32).view(-1)[77] ^= 1

    monkeypatch.setattr(TorchWeights, "fill", fill_and_flip)
    async with rig(vault):
        monkeypatch.undo()
        second = Rig(vault, engine_id=1)
        with caplog.at_level(logging.WARNING):
            await second.load()
        assert "layer.2.down is not what was written" in caplog.text
        assert vault.commits() == 2
        assert second.progress
        assert await second.engine.check() == ""
        expected = tiny().read("model.layers.2.mlp.down_proj.weight")
        assert torch.equal(second.hosted.weights.tensors["layer.2.down"], expected)
        await second.engine.stop()


class Memory:
    """Weights in plain memory, as `verify` sees mapped ones."""

    def __init__(self) -> None:
        self.weights = TorchWeights(tiny(), torch.float32, CPU, lambda *_: None)
        self.buffers = {spec.name: torch.zeros(spec.size_bytes, dtype=torch.uint8) for spec in self.weights.specs}
        addresses = {name: buffer.data_ptr() for name, buffer in self.buffers.items()}
        self.weights.fill(addresses)
        layout: Any = SimpleNamespace(identity=self.weights.identity)
        self.mapped = cast(MappedWeights, SimpleNamespace(layout=layout, addresses=lambda: addresses))


def test_every_flipped_bit_is_found() -> None:
    """One bit in any parameter, first or last byte, or in a sum of one, is found and the parameter named."""
    memory = Memory()
    weights, names = memory.weights, [spec.name for spec in memory.weights.specs]
    assert weights.verify(memory.mapped) == ""
    for name in names[:-1]:
        for at in (0, -1):
            memory.buffers[name][at] ^= 4
            assert weights.verify(memory.mapped) == f"{name} is not what was written"
            memory.buffers[name][at] ^= 4
    memory.buffers[SUMS][8 * 3] ^= 1
    assert weights.verify(memory.mapped) == f"{names[3]} is not what was written"


def test_other_weights_are_not_taken_for_these() -> None:
    """Weights of another seed have another identity, and are refused by it before a byte is compared."""
    memory = Memory()
    other = TorchWeights(tiny(seed=5), torch.float32, CPU, lambda *_: None)
    assert other.identity != memory.weights.identity
    assert memory.weights.identity in other.verify(memory.mapped)


SEEDS = range(1, 25)
TOP = 5


async def answered(r: Rig, number: int) -> CanaryAnswer:
    await r.run({number: request(prompt(12), 8, top_logprobs=TOP, temperature=0.0)})
    outputs = r.of(number)
    return answer_of(r.tokens(number), [each for output in outputs for each in output.logprobs or []])


async def test_flipped_bits_are_found_by_answers_or_change_none_and_are_undone(vault: Vault) -> None:
    """By seed 1 to 8 bits: the same ones each time. Whatever changes a token is outside the band of what is expected;
    what changes neither tokens nor logprobs is not, and some do that. Mended, the answer is the very same again. The
    stored sums find all of them, whatever they do to answers; a fresh load, under a larger number, has none."""
    async with rig(vault) as r:
        faults, right = WeightFaults(r.engine.memory), await answered(r, 1)
        found: Counter[str] = Counter()
        for seed in SEEDS:
            faults.inject(Fault("flip_bits", seed))
            flipped = faults.faults.flipped
            assert 1 <= len(flipped) <= 8
            answer = await answered(r, 100 + seed)
            wrong = flaw_of(answer) or difference(right, answer, BANDS["float32"])
            assert wrong or answer.tokens == right.tokens
            found["caught" if wrong else "silent" if answer == right else "within the band"] += 1
            faults.inject(Fault("clear"))
            assert faults.faults.flipped == ()
            assert await answered(r, 200 + seed) == right
            faults.inject(Fault("flip_bits", seed))
            assert faults.faults.flipped == flipped
            assert await r.engine.verify(), flipped
            faults.inject(Fault("clear"))
        assert found["caught"], found
        assert found["caught"] < len(SEEDS), found
        assert await r.engine.verify() == ""
        faults.inject(Fault("flip_bits", SEEDS[0]))
        load = r.engine.progress().load
        await r.engine.become_standby(believed=False)
        await r.engine.renew()
        await r.engine.wake(2000)
        assert r.engine.progress().load > load
        assert await answered(r, 300) == right
        faults.inject(Fault("clear"))  # of a mapping that is no more: nothing to undo
        assert await answered(r, 301) == right
