"""A torch module's parameters and buffers in the vault: written once, bound in other processes without a copy.

- `publish` moves a loaded module into the vault.
- `stage` gives a module built on the meta device writable vault memory to load into, before `MemoryClient.commit`.
- `materialise` binds a module to the mapped weights.

Always true:
- Committed weights are read-only, for the writer too. A write is not a Python error but a fault (SIGSEGV on the host, a
  lost context on a GPU), so `requires_grad` is off.
- Tensors that share memory at the writer share it at the reader; those at the same address are the same object.
- Strides are kept.
- A call that fails has changed nothing in the module.

The tensors are valid while the client's mapping is. After `unmap` and `remap` they are valid again at the same
addresses. Do not use them in between, after `release` or `close`, or in a forked child. Non-persistent buffers and the
names given as `private` are private: never in the vault. Tensors that are plain attributes of a module are ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from holdfast.memory.client.weights import MappedWeights, MemoryClient
from holdfast.memory.layout import TensorLocation
from holdfast.memory.torch.modules import (
    ModuleMismatch,
    OverlapGroup,
    Slot,
    Span,
    misfits,
    overlapping,
    refuse,
    slots_of,
    specs_of,
    specs_of_slots,
)
from holdfast.memory.torch.tensors import bytes_of, copy_bytes, dtype_of, storage_at, tensor_in, torch_device

__all__ = ["ModuleMismatch", "bind", "materialise", "publish", "specs_of", "stage", "tensors_of"]

# Makes the private tensor of a name, like the given tensor on the meta device.
Fresh = Callable[[str, torch.Tensor], torch.Tensor]
# Called with the bytes copied and the total bytes.
OnProgress = Callable[[int, int], None]


async def publish(
    client: MemoryClient,
    module: nn.Module,
    identity: str,
    *,
    private: frozenset[str] = frozenset(),
    on_progress: OnProgress = lambda done, total: None,
) -> str:
    """Copy a loaded module into the vault (held `rw`), commit, bind the module to the copy, and free its old memory.

    Returns the layout's hash. Until then the weights take memory twice; if a GPU cannot hold that, use `stage`.
    """
    slots = slots_of(module, private)
    refuse([f"{slot.name} is on the meta device and has no values" for slot in slots if slot.tensor.is_meta])
    await client.allocate(specs_of_slots(slots), identity)
    mapped = _mapped(client)
    moved = _fresh_private(client, slots, None)
    await _fill(client, mapped, {slot.name: slot.tensor for slot in slots}, on_progress)
    layout_hash = await client.commit()
    bind(slots, tensors_of(mapped, torch_device(client.device.name), client) | moved)
    return layout_hash


async def stage(
    client: MemoryClient,
    module: nn.Module,
    identity: str,
    *,
    private: frozenset[str] = frozenset(),
    fresh: Fresh | None = None,
) -> None:
    """Bind a module to writable, uninitialised vault memory (held `rw`): load into it, then `commit`."""
    slots = slots_of(module, private)
    specs = specs_of_slots(slots)
    made = _fresh_private(client, slots, fresh)
    await client.allocate(specs, identity)
    bind(slots, tensors_of(_mapped(client), torch_device(client.device.name), client) | made)


def materialise(
    client: MemoryClient, module: nn.Module, *, private: frozenset[str] = frozenset(), fresh: Fresh | None = None
) -> None:
    """Bind a module, on the meta device or real, to the weights mapped here. Raises ModuleMismatch naming all misfits.

    Private tensors keep their values; `fresh` makes those that are on the meta device.
    """
    slots = slots_of(module, private)
    mapped = _mapped(client)
    refuse(misfits(slots, {location.name: location for location in mapped.layout.tensors}))
    bind(slots, _fresh_private(client, slots, fresh) | tensors_of(mapped, torch_device(client.device.name), client))


def _mapped(client: MemoryClient) -> MappedWeights:
    if client.mapped is None or not client.mapped.present:
        raise ModuleMismatch(["no weights are mapped: acquire or remap them first"])
    return client.mapped


def _groups(mapped: MappedWeights) -> tuple[list[OverlapGroup], dict[str, TensorLocation]]:
    locations = {location.name: location for location in mapped.layout.tensors}
    spans = [
        Span(name, address, locations[name].size_bytes, _dtype(locations[name]).itemsize)
        for name, address in mapped.addresses().items()
    ]
    return overlapping(spans), locations


def _dtype(location: TensorLocation) -> torch.dtype:
    dtype = dtype_of(location.dtype)
    assert dtype is not None, "checked before"
    return dtype


# -- bytes


async def _fill(
    client: MemoryClient, mapped: MappedWeights, sources: dict[str, torch.Tensor], on_progress: OnProgress
) -> None:
    """Copy spans byte by byte: exact for every dtype, and for tensors with overlapping elements (expanded ones)."""
    device = torch_device(client.device.name)
    spans = [span for group in _groups(mapped)[0] for span in group.cover()]
    done, total = 0, sum(span.size for span in spans)
    for span in spans:
        target = storage_at(span.start, span.size, device, client)
        await copy_bytes(tensor_in(target, torch.uint8, 0, (span.size,), (1,)), bytes_of(sources[span.name]))
        done += span.size
        on_progress(done, total)


# -- tensors


def tensors_of(mapped: MappedWeights, device: torch.device, owner: object) -> dict[str, torch.Tensor]:
    """Return a tensor over the mapping for each name. Each group that shares memory has one storage of just its
    size."""
    groups, locations = _groups(mapped)
    made: dict[tuple[object, ...], torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for group in groups:
        storage = storage_at(group.start, group.size, device, owner)
        for span in group.spans:
            location = locations[span.name]
            key = (span.start, location.dtype, location.shape, location.stride)
            if key not in made:
                made[key] = tensor_in(
                    storage, _dtype(location), span.start - group.start, location.shape, location.stride
                )
            tensors[span.name] = made[key]
    for name, location in locations.items():
        if not location.size_bytes:
            tensors[name] = torch.empty_strided(location.shape, location.stride, dtype=_dtype(location), device=device)
    return tensors


def _fresh_private(client: MemoryClient, slots: list[Slot], fresh: Fresh | None) -> dict[str, torch.Tensor]:
    """Return the private tensors that are not yet on the other tensors' device, made there."""
    device = torch_device(client.device.name)
    problems: list[str] = []
    made: dict[int, torch.Tensor] = {}  # tied tensors are made once
    for slot in slots:
        like = slot.tensor
        if not slot.private or id(like) in made or (not like.is_meta and like.device == device):
            continue
        if not like.is_meta:
            made[id(like)] = like.detach().to(device)
        elif fresh is None:
            problems.append(f"{slot.name} is private and on the meta device: tell how to make it (fresh)")
        else:
            value = fresh(slot.name, like).detach().to(device)
            if value.shape != like.shape or value.dtype is not like.dtype:
                problems.append(f"{slot.name} was made as {value.dtype} {tuple(value.shape)}, not as it is")
            made[id(like)] = value
    refuse(problems)
    return {slot.name: made[id(slot.tensor)] for slot in slots if slot.private and id(slot.tensor) in made}


def bind(slots: list[Slot], tensors: dict[str, torch.Tensor]) -> None:
    """Put the tensors under their names. The same tensor under several names becomes the same object under them."""
    bound: dict[tuple[int, bool], torch.Tensor] = {}
    for slot in slots:
        tensor = tensors.get(slot.name)
        if tensor is None:
            continue  # private, and already in place
        # A parameter and a buffer at the same address stay two objects: a module does not accept one as the other.
        key = (id(tensor) if tensor.numel() else id(slot.tensor), slot.is_parameter)
        if key not in bound:
            bound[key] = _rebound(slot, tensor)
        if getattr(slot.holder, slot.attribute) is not bound[key]:
            setattr(slot.holder, slot.attribute, bound[key])  # not through the dict: some modules keep extra lists


def _rebound(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    """Return the object to bind to a name: if torch allows, the old object with new memory (others may refer to it)."""
    old = slot.tensor
    needs_grad = slot.private and old.requires_grad
    if not old.is_meta and old.is_leaf:
        old.requires_grad_(needs_grad)
        old.grad = None
        old.data = tensor
        return old
    if not slot.is_parameter:
        return tensor
    new = nn.Parameter(tensor, requires_grad=needs_grad)
    new.__dict__.update(old.__dict__)  # attributes that loaders set on parameters
    object.__setattr__(new, "__class__", type(old))  # and the subclass they use
    return new
