"""Weights are in the vault once: the first engine writes, others map and verify; damage is found and mended."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from engine_rig import Vault
from torch_rig import Rig, prompt, request, rig

from holdfast.engines.torch.files.tiny import tiny
from holdfast.engines.torch.model.weights import SUMS, TorchWeights
from holdfast.memory.client.mapped import Mapped

CPU = torch.device("cpu")


async def test_a_second_engine_maps_what_the_first_wrote(vault: Vault) -> None:
    """One engine loads, with progress from nothing to all; the next maps the same bytes, loads nothing, and says the
    same."""
    async with rig(vault) as first:
        work, done, total = first.progress[-1]
        assert (work, first.progress[0]) == ("load", ("load", 0, total))
        assert done == total == first.tenant.weights.size_bytes - first.tenant.weights.specs[-1].size_bytes
        await first.run({1: request(prompt(30), 20)})
        right = first.tokens(1)
        second = Rig(vault, engine_id=1)
        await second.load()
        assert second.progress == []
        assert await second.engine.check() == ""
        for name, tensor in first.tenant.weights.tensors.items():
            other = second.tenant.weights.tensors[name]
            assert torch.equal(tensor, other)
            assert tensor.data_ptr() != other.data_ptr()
        await second.engine.stop()
    async with rig(vault, epoch=1001, engine_id=1) as r:
        await r.run({1: request(prompt(30), 20)})
        assert r.tokens(1) == right
        assert r.progress == []
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
        assert torch.equal(second.tenant.weights.tensors["layer.2.down"], expected)
        await second.engine.stop()


class Memory:
    """Weights in plain memory, as `verify` sees mapped ones."""

    def __init__(self) -> None:
        self.weights = TorchWeights(tiny(), torch.float32, CPU, lambda *_: None)
        self.buffers = {spec.name: torch.zeros(spec.size_bytes, dtype=torch.uint8) for spec in self.weights.specs}
        addresses = {name: buffer.data_ptr() for name, buffer in self.buffers.items()}
        self.weights.fill(addresses)
        layout: Any = SimpleNamespace(identity=self.weights.identity)
        self.mapped = cast(Mapped, SimpleNamespace(layout=layout, addresses=lambda: addresses))


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
