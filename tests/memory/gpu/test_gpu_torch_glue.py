"""The torch glue on a real GPU: tensors over the vault's pages, at the writer and at readers, with no copy by torch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast.memory.torch.glue import materialise, stage
from tests.rigs.memory.torch_agent import Engine
from tests.rigs.memory.torch_modules import (
    Bag,
    answer,
    bytes_in,
    fresh,
    granted,
    inside,
    loaded,
    on_meta,
    shared,
    torch,
)
from tests.rigs.memory.vaults import Rig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU here"),
]

GPU = "cuda-0"
WIDTH = 1024


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig((GPU,)) as started:
        yield started


@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_a_module_comes_out_as_it_went_in(rig: Rig, home: str) -> None:
    """Published from host or GPU, bound from the meta device, remapped: the same bits, ties, strides, and no copy."""
    model, twin = loaded(WIDTH).to(home), on_meta(WIDTH)
    before = answer(loaded(WIDTH).cuda())

    async def story() -> None:
        async with shared(rig, model, GPU) as (writer, reader):
            own_bytes = torch.cuda.memory_allocated()
            materialise(reader, twin, fresh=fresh)
            assert torch.cuda.memory_allocated() - own_bytes < WIDTH * WIDTH
            assert answer(model) == answer(twin) == before
            for one, module in ((writer, model), (reader, twin)):
                assert all(inside(one, tensor) for tensor in (*module.parameters(), module.scale))
                assert module.head.weight is module.embed.weight
                assert module.mix.weight.stride() == (1, WIDTH)
                assert module.frequencies.is_cuda
                assert not inside(one, module.frequencies)
            await reader.unmap()
            assert await reader.remap() == "ro"
            assert answer(twin) == before

    asyncio.run(story())


def test_every_dtype_is_kept_on_the_gpu(rig: Rig) -> None:
    """Bytes and strides are the writer's, from host memory to the GPU and from there to a module that is loaded."""
    floats = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
    kinds: dict[str, Any] = {f"a_{name}": torch.randn(5, 7).to(getattr(torch, name)) for name in floats}
    kinds |= {"a_int8": torch.randint(0, 99, (3, 11), dtype=torch.int8), "a_bool": torch.randn(9) > 0}
    kinds |= {"scalar": torch.tensor(2**40), "nothing": torch.empty(0, 3), "expanded": torch.randn(1, 8).expand(5, 8)}
    kinds |= {"transposed": torch.randn(6, 10).t(), "every_other": torch.randn(6, 10)[::2, 1::3]}
    bag = Bag(kinds)
    shell = Bag({name: tensor.to("meta") for name, tensor in kinds.items()})
    before = {name: (bytes_in(tensor), tensor.stride()) for name, tensor in kinds.items()}

    async def story() -> None:
        async with shared(rig, bag, GPU) as (_, reader):
            materialise(reader, shell)
            for module in (bag, shell):
                assert all(tensor.is_cuda for tensor in module.buffers())
                state = module.state_dict()
                assert {name: (bytes_in(tensor), tensor.stride()) for name, tensor in state.items()} == before

    asyncio.run(story())


def test_a_meta_module_is_loaded_straight_into_the_gpu(rig: Rig) -> None:
    """`stage`: what is loaded before the commit is what others read, and torch allocates nothing for it."""
    model, source, shell = on_meta(WIDTH), loaded(WIDTH), on_meta(WIDTH)

    async def story() -> None:
        async with granted(rig, "rw", GPU) as writer:
            own_bytes = torch.cuda.memory_allocated()
            await stage(writer, model, "staged", fresh=fresh)
            model.load_state_dict(source.state_dict())
            assert torch.cuda.memory_allocated() - own_bytes < WIDTH * WIDTH
            await writer.commit()
            async with granted(rig, "ro", GPU) as reader:
                materialise(reader, shell, fresh=fresh)
                assert answer(shell) == answer(model)
                state = shell.state_dict()
                assert all(torch.equal(tensor, state[name].cpu()) for name, tensor in source.state_dict().items())

    asyncio.run(story())


def test_a_write_on_the_gpu_costs_only_its_process(rig: Rig) -> None:
    """Three engines compute the same bits; who writes to the weights loses its context, the bytes stay."""
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(rig.path(GPU), WIDTH, GPU)) for _ in range(3)]
        writer, first, second = engines
        expected = writer.do("publish")
        assert [engine.do("materialise") for engine in (first, second)] == ["done"] * 2
        computed = [engine.do("answer") for engine in engines]
        assert computed == [computed[0]] * 3
        assert expected is not None
        for engine in (writer, first):
            assert engine.do("write") is None
            assert engine.fate() != 0
        assert second.do("answer") == computed[0]
        assert (second.do("sleep"), second.do("wake"), second.do("answer")) == ("done", "ro", computed[0])
