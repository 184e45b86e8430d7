"""What does not fit is refused by name, all of it at once, before anything has changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch_story import Bag, answer, client, fresh, inside, loaded, nn, on_meta, torch, vault

from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.errors import VaultRefused
from holdfast.memory.torch.glue import ModuleMismatch, materialise, publish, specs_of, stage

pytestmark = pytest.mark.processes


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    with vault(tmp_path) as path:
        yield path


async def refused(path: str, kept: nn.Module, module: nn.Module, **options: Any) -> set[str]:
    """The lines a reader gets who binds `module` where `kept` is published."""
    async with client(path, "rw") as writer:
        await publish(writer, kept, "test")
        async with client(path, "ro") as reader:
            with pytest.raises(ModuleMismatch) as failure:
                materialise(reader, module, **options)
            assert all(line in str(failure.value) for line in failure.value.problems)
            tensors = [*module.parameters(), *module.buffers()]
            assert not any(inside(reader, tensor) for tensor in tensors if not tensor.is_meta)
    return set(failure.value.problems)


async def test_every_misfit_is_named(path: str) -> None:
    """Names on one side only, shapes and dtypes, in one error; the module is as it was."""
    kept = Bag({"a": torch.zeros(2), "shape": torch.zeros(2, 3), "kind": torch.zeros(2), "secret": torch.zeros(1)})
    module = Bag({"b": torch.zeros(2), "shape": torch.zeros(3, 2), "kind": torch.zeros(2).half()})
    module.register_buffer("secret", torch.zeros(1), persistent=False)
    assert await refused(path, kept, module) == {
        "b is in the module and not in the vault",
        "a is in the vault and not in the module here",
        "secret is in the vault and private here",
        "shape has the shape (3, 2) here and (2, 3) in the vault",
        "kind is float16 here and float32 in the vault",
    }


async def test_a_tie_that_the_vault_does_not_know_is_refused(path: str) -> None:
    """One tensor cannot be bound to two places: one of the two values would be lost."""
    with torch.device("meta"):
        tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        tied[1].weight = tied[0].weight
    apart = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    assert await refused(path, apart, tied) == {"0.weight and 1.weight are one tensor here and two in the vault"}


async def test_private_values_are_never_made_up(path: str) -> None:
    """A private buffer on the meta device needs a recipe, and the recipe's result must fit."""
    model = loaded()
    async with client(path, "rw") as writer:
        await publish(writer, model, "test")
        async with client(path, "ro") as reader:
            shell = on_meta()
            with pytest.raises(ModuleMismatch, match="frequencies is private and on the meta device"):
                materialise(reader, shell)
            with pytest.raises(ModuleMismatch, match=r"frequencies was made as torch.float64 \(48,\)"):
                materialise(reader, shell, fresh=lambda name, like: fresh(name, like).double())
            assert shell.mix.weight.is_meta
            await reader.unmap()
            with pytest.raises(ModuleMismatch, match="no weights are mapped"):
                materialise(reader, shell, fresh=fresh)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_not_plain_bytes_is_named() -> None:
    """Sparse, lazy, conjugated and torch-quantised tensors, all in one error."""
    bag = Bag({"sparse": torch.eye(3).to_sparse(), "conjugated": torch.randn(2, dtype=torch.complex64).conj()})
    bag.quantised = nn.Parameter(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), requires_grad=False)
    bag.lazy = nn.LazyLinear(3)
    with pytest.raises(ModuleMismatch) as failure:
        specs_of(bag)
    assert [line.split()[0] for line in failure.value.problems] == [
        "quantised", "sparse", "conjugated", "lazy.weight", "lazy.bias",
    ]  # fmt: skip


def test_what_cannot_be_parted_or_found_is_named() -> None:
    """A private name that shares memory with a kept one, a private name of nothing, and a module of nothing."""
    model = loaded()
    with pytest.raises(ModuleMismatch, match=r"head.weight is private and shares memory with embed.weight, which"):
        specs_of(model, frozenset({"head.weight"}))
    with pytest.raises(ModuleMismatch, match=r"head.wait is named as private and not in the module"):
        specs_of(model, frozenset({"head.wait"}))
    with pytest.raises(ModuleMismatch, match="nothing to keep"):
        specs_of(nn.ReLU())
    assert len(specs_of(model, frozenset({"head.weight", "embed.weight"}))) == 5


async def test_a_publish_that_fails_leaves_the_module_alone(path: str) -> None:
    """Without values, without the lock: the module still has its own, writable memory and its grads."""
    model = loaded()
    before = answer(model)
    async with client(path, "rw") as writer:
        with pytest.raises(ModuleMismatch, match=r"embed.weight is on the meta device"):
            await publish(writer, on_meta(), "test")
        with pytest.raises(ModuleMismatch, match="frequencies is private and on the meta device"):
            await stage(writer, on_meta(), "test")
        assert writer.mapped is None
        stranger = MemoryClient(path, open_device("host-0"), 1)
        await stranger.connect()
        with pytest.raises(VaultRefused):
            await publish(stranger, model, "test")
        await stranger.close()
        assert model.mix.weight.requires_grad
        with torch.no_grad():
            model.mix.weight.mul_(1)
        assert answer(model) == before
