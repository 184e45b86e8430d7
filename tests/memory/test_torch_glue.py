"""A torch module in the vault and out of it again: bits, strides, ties and privacy are kept, nothing is copied, and
what does not fit is refused by name."""

from __future__ import annotations

import copy
import gc
import signal
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast.memory.client.calls import VaultRefused
from holdfast.memory.torch.glue import ModuleMismatch, materialise, publish, specs_of, stage
from holdfast.memory.torch.tensors import storage_at
from tests.rigs.memory.torch_agent import Engine
from tests.rigs.memory.torch_modules import (
    Bag,
    Language,
    answer,
    bytes_in,
    fresh,
    granted,
    inside,
    loaded,
    nn,
    on_meta,
    shared,
    torch,
)
from tests.rigs.memory.vaults import Rig

pytestmark = pytest.mark.processes
WIDTH = 2048  # weights of 17 MiB
WEIGHTS_KIB = 4 * (96 * WIDTH + WIDTH * WIDTH) // 1024


def on_meta_like(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).to("meta")


async def test_a_module_comes_out_as_it_went_in(rig: Rig) -> None:
    """Writer and reader compute the same bits as before, from the vault's memory alone."""
    model, twin = loaded(), on_meta()
    before = answer(model)
    parameters = dict(model.named_parameters())
    async with shared(rig, model) as (writer, reader):
        materialise(reader, twin, fresh=fresh)
        assert answer(model) == answer(twin) == before
        for one, module in ((writer, model), (reader, twin)):
            kept = [*module.parameters(), module.scale]
            assert all(inside(one, tensor) and not tensor.requires_grad for tensor in kept)
            assert module.head.weight is module.embed.weight
            assert module.mix.weight.stride() == (1, 48)
            assert not inside(one, module.frequencies)
            assert "frequencies" not in module.state_dict()
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


def every_kind() -> Bag:
    torch.manual_seed(1)
    wide = torch.randn(6, 10)
    floats = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64")
    kinds: dict[str, Any] = {f"a_{name}": torch.randn(5, 7).to(getattr(torch, name)) for name in floats}
    for name in ("int8", "uint8", "int16", "int32", "int64", "uint16", "bool"):
        kinds[f"a_{name}"] = torch.randint(0, 2 if name == "bool" else 100, (3, 11)).to(getattr(torch, name))
    kinds["nan_payload"] = torch.tensor([0x7FC00001, 0x7FA5A5A5], dtype=torch.int32).view(torch.float32)
    kinds |= {"scalar": torch.tensor(3.5), "flag": torch.tensor(True), "count": torch.tensor(2**40)}
    kinds |= {"nothing": torch.empty(0), "no_rows": torch.empty(0, 4, dtype=torch.int8)}
    kinds |= {
        "transposed": wide.t(),
        "every_other": torch.randn(6, 10)[::2, 1::3],
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    }
    kinds |= {"expanded": torch.randn(1, 8).expand(5, 8), "windows": torch.arange(10).unfold(0, 4, 1)}
    return Bag(kinds, {"packed": torch.randint(0, 9, (4, 4), dtype=torch.int8), "weight": torch.randn(4, 4).bfloat16()})


async def test_every_dtype_shape_and_stride_is_kept(rig: Rig) -> None:
    """Bytes, dtype, shape and strides are the writer's: fp8 and bool, scalars, no elements, gaps and overlaps too."""
    bag = every_kind()
    before = {name: (bytes_in(tensor), tensor.stride()) for name, tensor in bag.state_dict().items()}
    shell = on_meta_like(bag)
    async with shared(rig, bag) as (writer, reader):
        materialise(reader, shell)
        for one, module in ((writer, bag), (reader, shell)):
            after = {name: (bytes_in(tensor), tensor.stride()) for name, tensor in module.state_dict().items()}
            assert after == before
            assert all(inside(one, tensor) for tensor in module.state_dict().values() if tensor.numel())


async def test_what_shares_memory_shares_it_everywhere(rig: Rig) -> None:
    """Views of one storage keep their distances, equal ones become one object, and no byte is kept twice."""
    fused = torch.arange(3000, dtype=torch.float32).view(30, 100)
    row = torch.arange(64, dtype=torch.uint8)
    bag = Bag({"raw": row[1:], "words": row[8:40].view(torch.int64), "copy": fused[20:]})
    bag.query, bag.key = nn.Parameter(fused[:10]), nn.Parameter(fused[10:20])
    bag.fused, bag.again = nn.Parameter(fused), nn.Parameter(fused)
    shell = on_meta_like(bag)
    async with shared(rig, bag) as (_, reader):
        materialise(reader, shell)
        for module in (bag, shell):
            assert module.again is module.fused
            assert module.copy is not module.fused  # a view, and a buffer besides
            base = module.fused.data_ptr()
            assert [t.data_ptr() - base for t in (module.query, module.key, module.copy)] == [0, 4000, 8000]
            assert module.words.data_ptr() - module.raw.data_ptr() == 7
            assert torch.equal(module.fused, fused)
            assert torch.equal(module.words, row[8:40].view(torch.int64))
            assert module.fused.untyped_storage().nbytes() == 12_000
        assert reader.mapped.layout.tensors[-1].offset < 12_000 + 63 + 2 * 512


async def test_a_parameter_and_a_buffer_in_one_place_stay_what_they_are(rig: Rig) -> None:
    """They share memory, not the object: a module would lose one of the two names."""
    values = torch.randn(9)
    bag = Bag({"buffer": values}, {"parameter": values})
    shell = on_meta_like(bag)
    async with shared(rig, bag) as (_, reader):
        materialise(reader, shell)
        assert (list(shell._parameters), list(shell._buffers)) == (["parameter"], ["buffer"])
        assert shell.parameter.data_ptr() == shell.buffer.data_ptr()


async def test_a_module_that_is_there_twice_is_kept_once(rig: Rig) -> None:
    """A shared submodule has two names for each tensor and one place in the vault."""
    block = nn.Linear(8, 8)
    model = nn.Sequential(block, nn.ReLU(), block)
    assert [spec.name for spec in specs_of(model)] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    with torch.device("meta"):
        apart = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    async with shared(rig, model) as (_, reader):
        materialise(reader, apart)
        assert apart[0].weight is apart[2].weight
        assert torch.equal(apart(torch.ones(8)), model(torch.ones(8)))


async def test_modules_that_keep_lists_of_their_weights_follow(rig: Rig) -> None:
    """A recurrent module computes from the vault's memory, not from a list of what was there before."""
    torch.manual_seed(2)
    model, data = nn.LSTM(4, 4, num_layers=2), torch.randn(3, 1, 4)
    expected = model(data)[0].detach()
    with torch.device("meta"):
        shell = nn.LSTM(4, 4, num_layers=2)
    async with shared(rig, model) as (_, reader):
        materialise(reader, shell)
        assert torch.equal(shell(data)[0], expected)
        assert torch.equal(model(data)[0], expected)


async def test_a_real_module_keeps_its_objects_and_gives_its_memory_back(rig: Rig) -> None:
    """Who holds a parameter of a module that is materialised sees the vault's values in the same object."""
    model, other = loaded(), Language()
    held = other.mix.weight
    held.note = "a loader's"
    old = weakref.ref(held.untyped_storage())
    async with shared(rig, model) as (_, reader):
        materialise(reader, other)
        assert other.mix.weight is held
        assert torch.equal(held, model.mix.weight)
        gc.collect()
        assert old() is None
        shell = on_meta()
        shell.mix.weight.note = "a loader's"
        materialise(reader, shell, fresh=fresh)
        assert shell.mix.weight.note == "a loader's"


async def test_tensors_are_valid_again_after_unmap_and_remap(rig: Rig) -> None:
    """The same objects, the same addresses, the same bits."""
    model, shell = loaded(), on_meta()
    async with shared(rig, model) as (_, reader):
        materialise(reader, shell, fresh=fresh)
        before, addresses = answer(shell), [tensor.data_ptr() for tensor in shell.parameters()]
        for _ in range(3):
            await reader.unmap()
            assert await reader.remap() == "ro"
            assert answer(shell) == before == answer(model)
        assert [tensor.data_ptr() for tensor in shell.parameters()] == addresses


async def test_a_meta_module_is_loaded_straight_into_the_vault(rig: Rig) -> None:
    """`stage`: what is loaded before the commit is what others read; nothing of it was ever elsewhere."""
    model, source, shell = on_meta(), loaded(), on_meta()
    async with granted(rig, "rw") as writer:
        await stage(writer, model, "staged", fresh=fresh)
        assert model.head.weight is model.embed.weight
        assert inside(writer, model.mix.weight)
        model.load_state_dict(source.state_dict())
        await writer.commit()
        async with granted(rig, "ro") as reader:
            materialise(reader, shell, fresh=fresh)
            assert answer(shell) == answer(model)
            assert all(torch.equal(tensor, shell.state_dict()[name]) for name, tensor in source.state_dict().items())


async def test_private_tensors_never_reach_the_vault(rig: Rig) -> None:
    """Named ones and those that are not persistent stay writable and one's own, at both ends."""
    model, other = loaded(), Language()
    other.scale.fill_(0.25)
    steps: list[tuple[int, int]] = []
    private = frozenset({"scale", "norm.weight"})
    options = {"private": private, "on_progress": lambda done, total: steps.append((done, total))}
    async with shared(rig, model, **options) as (writer, reader):
        materialise(reader, other, private=private)
        names = {place.name for place in reader.mapped.layout.tensors}
        assert names == {"embed.weight", "mix.weight", "mix.bias", "norm.bias", "head.weight"}
        for one, module in ((writer, model), (reader, other)):
            assert not inside(one, module.scale)
            assert module.norm.weight.requires_grad
            module.scale.add_(1)
        assert (model.scale.item(), other.scale.item()) == (1.5, 1.25)
    assert steps[-1][0] == steps[-1][1] == 4 * (96 * 48 + 48 * 48 + 48 + 48)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


async def test_a_copy_of_a_published_module_is_ones_own(rig: Rig, tmp_path: Path) -> None:
    """It can be written, outlives the mapping, and a saved file holds each tensor's bytes and no slab."""
    model = loaded()
    async with granted(rig, "rw") as writer:
        await publish(writer, model, "test")
        before, own = answer(model), copy.deepcopy(model)
        torch.save(model.state_dict(), tmp_path / "saved.pt")
    own.mix.weight.mul_(1)
    assert answer(own) == before
    assert (tmp_path / "saved.pt").stat().st_size < 100_000


def test_a_storage_holds_its_owner_and_lets_it_go() -> None:
    """The owner of the memory lives as long as the last tensor over it."""

    class Owner:
        pass

    owner, own = Owner(), torch.arange(100, dtype=torch.uint8)
    gone = weakref.ref(owner)
    view = torch.empty(0, dtype=torch.uint8).set_(storage_at(own.data_ptr(), 100, own.device, owner))
    part = view[10:20]
    del owner, view
    gc.collect()
    assert gone() is not None
    assert part.tolist() == list(range(10, 20))
    del part
    gc.collect()
    assert gone() is None


# -- what does not fit is refused by name, all of it at once, before anything has changed


async def refused(rig: Rig, kept: nn.Module, module: nn.Module, **options: Any) -> set[str]:
    """The lines a reader gets who binds `module` where `kept` is published."""
    async with shared(rig, kept) as (_, reader):
        with pytest.raises(ModuleMismatch) as failure:
            materialise(reader, module, **options)
        assert all(line in str(failure.value) for line in failure.value.problems)
        tensors = [*module.parameters(), *module.buffers()]
        assert not any(inside(reader, tensor) for tensor in tensors if not tensor.is_meta)
    return set(failure.value.problems)


async def test_every_misfit_is_named(rig: Rig) -> None:
    """Names on one side only, shapes and dtypes, in one error; the module is as it was."""
    kept = Bag({"a": torch.zeros(2), "shape": torch.zeros(2, 3), "kind": torch.zeros(2), "secret": torch.zeros(1)})
    module = Bag({"b": torch.zeros(2), "shape": torch.zeros(3, 2), "kind": torch.zeros(2).half()})
    module.register_buffer("secret", torch.zeros(1), persistent=False)
    assert await refused(rig, kept, module) == {
        "b is in the module and not in the vault",
        "a is in the vault and not in the module here",
        "secret is in the vault and private here",
        "shape has the shape (3, 2) here and (2, 3) in the vault",
        "kind is float16 here and float32 in the vault",
    }


async def test_a_tie_that_the_vault_does_not_know_is_refused(rig: Rig) -> None:
    """One tensor cannot be bound to two places: one of the two values would be lost."""
    with torch.device("meta"):
        tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        tied[1].weight = tied[0].weight
    apart = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    assert await refused(rig, apart, tied) == {"0.weight and 1.weight are one tensor here and two in the vault"}


async def test_private_values_are_never_made_up(rig: Rig) -> None:
    """A private buffer on the meta device needs a recipe, and the recipe's result must fit."""
    shell = on_meta()
    async with shared(rig, loaded()) as (_, reader):
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


async def test_a_publish_that_fails_leaves_the_module_alone(rig: Rig) -> None:
    """Without values, without the lock: the module still has its own, writable memory and its grads."""
    model = loaded()
    before = answer(model)
    async with granted(rig, "rw") as writer:
        with pytest.raises(ModuleMismatch, match=r"embed.weight is on the meta device"):
            await publish(writer, on_meta(), "test")
        with pytest.raises(ModuleMismatch, match="frequencies is private and on the meta device"):
            await stage(writer, on_meta(), "test")
        assert writer.mapped is None
        async with rig.client(1) as stranger:
            with pytest.raises(VaultRefused):
                await publish(stranger, model, "test")
        assert model.mix.weight.requires_grad
        with torch.no_grad():
            model.mix.weight.mul_(1)
        assert answer(model) == before


# -- engines as real processes: one physical copy, the same bits, and memory that no one can spoil


@pytest.mark.long
def test_engines_share_one_copy_that_none_of_them_can_write(rig: Rig) -> None:
    """Bits are equal in all, PSS shows one copy, sleep and wake change nothing, and a write kills only who writes."""
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(rig.path(), WIDTH)) for _ in range(3)]
        _share_one_copy(engines)


def _share_one_copy(engines: list[Engine]) -> None:
    writer, first, second = engines
    expected = writer.do("publish")
    assert [engine.do("materialise") for engine in (first, second)] == ["done"] * 2
    assert [engine.do("answer") for engine in engines] == [expected] * 3

    sizes = [engine.do("size") for engine in engines]
    assert all(size["Rss"] >= WEIGHTS_KIB for size in sizes)
    assert sum(size["Pss"] for size in sizes) <= WEIGHTS_KIB + 4096  # one copy, up to a granule of rounding

    assert (first.do("sleep"), first.do("size")["Rss"], first.do("wake")) == ("done", 0, "ro")
    assert first.do("answer") == expected

    assert (writer.do("write"), writer.fate()) == (None, -signal.SIGSEGV)
    assert (first.do("write"), first.fate()) == (None, -signal.SIGSEGV)
    assert (second.do("answer"), second.do("sleep"), second.do("wake")) == (expected, "done", "ro")
    assert second.do("answer") == expected
