"""A torch module in the vault and out of it again: bits, strides, ties and privacy are kept, and nothing is copied."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch_story import Bag, Language, answer, bytes_in, client, fresh, inside, loaded, nn, on_meta, torch, vault

from holdfast.memory.torch.glue import materialise, publish, specs_of, stage
from holdfast.memory.torch.tensors import storage_at

pytestmark = pytest.mark.processes


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    with vault(tmp_path) as path:
        yield path


def on_meta_like(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).to("meta")


async def test_a_module_comes_out_as_it_went_in(path: str) -> None:
    """Writer and reader compute the same bits as before, from the vault's memory alone."""
    model, twin = loaded(), on_meta()
    before = answer(model)
    parameters = dict(model.named_parameters())
    async with client(path, "rw") as writer, client_after(path, writer, model) as reader:
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


class client_after:
    """A reader that comes when a module is published; the vault's answer is the same for all."""

    def __init__(self, path: str, writer: Any, module: nn.Module, **options: Any) -> None:
        self.publishing = publish(writer, module, "test", **options)
        self.reader = client(path, "ro")

    async def __aenter__(self) -> Any:
        await self.publishing
        return await self.reader.__aenter__()

    async def __aexit__(self, *why: Any) -> None:
        await self.reader.__aexit__(*why)


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


async def test_every_dtype_shape_and_stride_is_kept(path: str) -> None:
    """Bytes, dtype, shape and strides are the writer's: fp8 and bool, scalars, no elements, gaps and overlaps too."""
    bag = every_kind()
    before = {name: (bytes_in(tensor), tensor.stride()) for name, tensor in bag.state_dict().items()}
    shell = on_meta_like(bag)
    async with client(path, "rw") as writer, client_after(path, writer, bag) as reader:
        materialise(reader, shell)
        for one, module in ((writer, bag), (reader, shell)):
            after = {name: (bytes_in(tensor), tensor.stride()) for name, tensor in module.state_dict().items()}
            assert after == before
            assert all(inside(one, tensor) for tensor in module.state_dict().values() if tensor.numel())


async def test_what_shares_memory_shares_it_everywhere(path: str) -> None:
    """Views of one storage keep their distances, equal ones become one object, and no byte is kept twice."""
    fused = torch.arange(3000, dtype=torch.float32).view(30, 100)
    row = torch.arange(64, dtype=torch.uint8)
    bag = Bag({"raw": row[1:], "words": row[8:40].view(torch.int64), "copy": fused[20:]})
    bag.query, bag.key = nn.Parameter(fused[:10]), nn.Parameter(fused[10:20])
    bag.fused, bag.again = nn.Parameter(fused), nn.Parameter(fused)
    shell = on_meta_like(bag)
    async with client(path, "rw") as writer, client_after(path, writer, bag) as reader:
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


async def test_a_parameter_and_a_buffer_in_one_place_stay_what_they_are(path: str) -> None:
    """They share memory, not the object: a module would lose one of the two names."""
    values = torch.randn(9)
    bag = Bag({"buffer": values}, {"parameter": values})
    shell = on_meta_like(bag)
    async with client(path, "rw") as writer, client_after(path, writer, bag) as reader:
        materialise(reader, shell)
        assert (list(shell._parameters), list(shell._buffers)) == (["parameter"], ["buffer"])
        assert shell.parameter.data_ptr() == shell.buffer.data_ptr()


async def test_a_module_that_is_there_twice_is_kept_once(path: str) -> None:
    """A shared submodule has two names for each tensor and one place in the vault."""
    block = nn.Linear(8, 8)
    model = nn.Sequential(block, nn.ReLU(), block)
    assert [spec.name for spec in specs_of(model)] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    with torch.device("meta"):
        apart = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    async with client(path, "rw") as writer, client_after(path, writer, model) as reader:
        materialise(reader, apart)
        assert apart[0].weight is apart[2].weight
        assert torch.equal(apart(torch.ones(8)), model(torch.ones(8)))


async def test_modules_that_keep_lists_of_their_weights_follow(path: str) -> None:
    """A recurrent module computes from the vault's memory, not from a list of what was there before."""
    torch.manual_seed(2)
    model, data = nn.LSTM(4, 4, num_layers=2), torch.randn(3, 1, 4)
    expected = model(data)[0].detach()
    with torch.device("meta"):
        shell = nn.LSTM(4, 4, num_layers=2)
    async with client(path, "rw") as writer, client_after(path, writer, model) as reader:
        materialise(reader, shell)
        assert torch.equal(shell(data)[0], expected)
        assert torch.equal(model(data)[0], expected)


async def test_a_real_module_keeps_its_objects_and_gives_its_memory_back(path: str) -> None:
    """Who holds a parameter of a module that is materialised sees the vault's values in the same object."""
    model, other = loaded(), Language()
    held = other.mix.weight
    held.note = "a loader's"
    old = weakref.ref(held.untyped_storage())
    async with client(path, "rw") as writer, client_after(path, writer, model) as reader:
        materialise(reader, other)
        assert other.mix.weight is held
        assert torch.equal(held, model.mix.weight)
        gc.collect()
        assert old() is None
        shell = on_meta()
        shell.mix.weight.note = "a loader's"
        materialise(reader, shell, fresh=fresh)
        assert shell.mix.weight.note == "a loader's"


async def test_tensors_are_valid_again_after_unmap_and_remap(path: str) -> None:
    """The same objects, the same addresses, the same bits."""
    model, shell = loaded(), on_meta()
    async with client(path, "rw") as writer, client_after(path, writer, model) as reader:
        materialise(reader, shell, fresh=fresh)
        before, addresses = answer(shell), [tensor.data_ptr() for tensor in shell.parameters()]
        for _ in range(3):
            await reader.unmap()
            assert await reader.remap() == "ro"
            assert answer(shell) == before == answer(model)
        assert [tensor.data_ptr() for tensor in shell.parameters()] == addresses


async def test_a_meta_module_is_loaded_straight_into_the_vault(path: str) -> None:
    """`stage`: what is loaded before the commit is what others read; nothing of it was ever elsewhere."""
    model, source, shell = on_meta(), loaded(), on_meta()
    async with client(path, "rw") as writer:
        await stage(writer, model, "staged", fresh=fresh)
        assert model.head.weight is model.embed.weight
        assert inside(writer, model.mix.weight)
        model.load_state_dict(source.state_dict())
        await writer.commit()
        async with client(path, "ro") as reader:
            materialise(reader, shell, fresh=fresh)
            assert answer(shell) == answer(model)
            assert all(torch.equal(tensor, shell.state_dict()[name]) for name, tensor in source.state_dict().items())


async def test_private_tensors_never_reach_the_vault(path: str) -> None:
    """Named ones and those that are not persistent stay writable and one's own, at both ends."""
    model, other = loaded(), Language()
    other.scale.fill_(0.25)
    steps: list[tuple[int, int]] = []
    private = frozenset({"scale", "norm.weight"})
    options = {"private": private, "on_progress": lambda done, total: steps.append((done, total))}
    async with client(path, "rw") as writer, client_after(path, writer, model, **options) as reader:
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


async def test_a_copy_of_a_published_module_is_ones_own(path: str, tmp_path: Path) -> None:
    """It can be written, outlives the mapping, and a saved file holds each tensor's bytes and no slab."""
    model = loaded()
    async with client(path, "rw") as writer:
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
