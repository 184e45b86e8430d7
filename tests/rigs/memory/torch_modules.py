"""What the tests of the torch glue share: modules with odd things in them, and engines. Skips without torch."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch==2.13.0")

from torch import nn  # noqa: E402

from holdfast.memory.client.weights import MemoryClient  # noqa: E402
from holdfast.memory.torch.glue import publish  # noqa: E402
from tests.rigs.memory.vaults import Rig  # noqa: E402

SLAB_BYTES = 4 << 20
SEED = 7


class Bag(nn.Module):
    """Buffers of any kind under their names; parameters under theirs."""

    def __init__(self, buffers: dict[str, Any] | None = None, parameters: dict[str, Any] | None = None) -> None:
        super().__init__()
        for name, tensor in (buffers or {}).items():
            self.register_buffer(name, tensor)
        for name, tensor in (parameters or {}).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))


def inverse_frequencies(width: int) -> Any:
    return 1.0 / 10_000 ** (torch.arange(width, dtype=torch.float32, device="cpu") / width)


class Language(nn.Module):
    """A small model with tied weights, a transposed weight, buffers that are kept and one that is made again."""

    def __init__(self, width: int = 48, words: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("frequencies", inverse_frequencies(width).to(self.scale.device), persistent=False)

    def forward(self, ids: Any) -> Any:
        hidden = self.embed(ids) + torch.sin(ids.unsqueeze(-1) * self.frequencies)
        hidden = self.norm(hidden + torch.relu(self.mix(hidden)) * self.scale)
        return self.head(hidden)


def fresh(name: str, like: Any) -> Any:
    """How a private buffer of `Language` is made."""
    assert name == "frequencies"
    return inverse_frequencies(like.shape[0])


def loaded(width: int = 48) -> Language:
    """As if read from disk: values that every process makes alike, one weight transposed in memory."""
    torch.manual_seed(SEED)
    model = Language(width)
    model.mix.weight = nn.Parameter(torch.randn(width, width).t())
    return model


def on_meta(width: int = 48) -> Language:
    with torch.device("meta"):
        return Language(width)


def answer(model: nn.Module) -> str:
    """Return the bits of a forward pass, as a word."""
    device = next(model.parameters()).device
    with torch.no_grad():
        logits = model((torch.arange(12, device=device) * 7 % 96).view(2, 6))
    return hashlib.sha256(bytes_in(logits.cpu())).hexdigest()


def bytes_in(tensor: Any) -> bytes:
    """Return a tensor's elements in order, whatever its dtype and strides."""
    return bytes(tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist())


@contextlib.asynccontextmanager
async def granted(rig: Rig, mode: str, device: str = "host-0") -> AsyncIterator[MemoryClient]:
    """An engine that got what it asked for."""
    async with rig.client(0, device, slab_bytes=SLAB_BYTES) as one:
        assert await one.acquire(mode, 10_000) == mode
        yield one


@contextlib.asynccontextmanager
async def shared(
    rig: Rig, module: nn.Module, device: str = "host-0", **options: Any
) -> AsyncIterator[tuple[MemoryClient, MemoryClient]]:
    """A module published by one engine; and another one that reads what the vault has of it."""
    async with granted(rig, "rw", device) as writer:
        await publish(writer, module, "test", **options)
        async with granted(rig, "ro", device) as reader:
            yield writer, reader


def inside(one: MemoryClient, tensor: Any) -> bool:
    """Whether a tensor's memory is the vault's."""
    mapped = one.mapped
    assert mapped is not None
    return bool(mapped.address <= tensor.data_ptr() < mapped.address + mapped.size)
