"""A torch module's parameters and buffers in the vault: written once, bound elsewhere without a copy.

`publish` moves a loaded module in; `stage` gives a module built on the meta device writable vault memory to load into,
before `MemoryClient.commit`; `materialise` binds what was imported. Always true: what is committed is read-only, for
the writer too: a write to it is no error but a fault (SIGSEGV on the host, a lost context on a GPU), so it needs no
grad any more; tensors that share memory at the writer share it at the reader, and those in the same place are the same
object; strides are kept; a call that fails has changed nothing in the module.

The tensors are as good as the client's mapping: valid again, at the same addresses, after `unmap` and `remap`; not to
be touched in between, nor after `release` or `close`, nor in a forked child. Private (never in the vault) are buffers
that are not persistent and the names given as such. Tensors kept as plain attributes of a module are not seen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from holdfast.memory.client.mapped import Mapped
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.layout import TensorPlace
from holdfast.memory.torch.modules import ModuleMismatch, Slot, misfits, refuse, slots_of, specs_of, specs_of_slots
from holdfast.memory.torch.overlaps import Group, Span, overlapping
from holdfast.memory.torch.tensors import bytes_of, copy_bytes, dtype_of, storage_at, tensor_in, torch_device

__all__ = ["ModuleMismatch", "bind", "materialise", "publish", "specs_of", "stage", "tensors_of"]

# Makes a private tensor of a name, like the one (on the meta device) given.
Fresh = Callable[[str, torch.Tensor], torch.Tensor]
# Told bytes copied and bytes in all.
OnProgress = Callable[[int, int], None]


async def publish(
    client: MemoryClient,
    module: nn.Module,
    identity: str,
    *,
    private: frozenset[str] = frozenset(),
    on_progress: OnProgress = lambda done, total: None,
) -> str:
    """Copy a loaded module into the vault (held `rw`), commit, bind the module to the copy; its own memory is freed.

    Returns the layout's hash. Until it returns, the weights are there twice: on a GPU that cannot hold that, `stage`.
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
    """Bind a module to vault memory (held `rw`) that is writable and has no values yet: load into it, then `commit`."""
    slots = slots_of(module, private)
    specs = specs_of_slots(slots)
    made = _fresh_private(client, slots, fresh)
    await client.allocate(specs, identity)
    bind(slots, tensors_of(_mapped(client), torch_device(client.device.name), client) | made)


def materialise(
    client: MemoryClient, module: nn.Module, *, private: frozenset[str] = frozenset(), fresh: Fresh | None = None
) -> None:
    """Bind a module, on the meta device or real, to the weights mapped here. Raises ModuleMismatch naming all misfits.

    Private tensors keep their values; those on the meta device have none, and are what `fresh` makes of their names.
    """
    slots = slots_of(module, private)
    mapped = _mapped(client)
    refuse(misfits(slots, {place.name: place for place in mapped.layout.tensors}))
    bind(slots, _fresh_private(client, slots, fresh) | tensors_of(mapped, torch_device(client.device.name), client))


def _mapped(client: MemoryClient) -> Mapped:
    if client.mapped is None or not client.mapped.present:
        raise ModuleMismatch(["no weights are mapped: acquire or remap them first"])
    return client.mapped


def _groups(mapped: Mapped) -> tuple[list[Group], dict[str, TensorPlace]]:
    places = {place.name: place for place in mapped.layout.tensors}
    spans = [
        Span(name, address, places[name].size_bytes, _dtype(places[name]).itemsize)
        for name, address in mapped.addresses().items()
    ]
    return overlapping(spans), places


def _dtype(place: TensorPlace) -> torch.dtype:
    dtype = dtype_of(place.dtype)
    assert dtype is not None, "checked before"
    return dtype


# -- bytes


async def _fill(
    client: MemoryClient, mapped: Mapped, sources: dict[str, torch.Tensor], on_progress: OnProgress
) -> None:
    """Copy spans byte by byte: exact for every dtype, and for tensors whose elements overlap (expanded ones)."""
    device = torch_device(client.device.name)
    spans = [span for group in _groups(mapped)[0] for span in group.cover()]
    done, total = 0, sum(span.size for span in spans)
    for span in spans:
        target = storage_at(span.start, span.size, device, client)
        await copy_bytes(tensor_in(target, torch.uint8, 0, (span.size,), (1,)), bytes_of(sources[span.name]))
        done += span.size
        on_progress(done, total)


# -- tensors


def tensors_of(mapped: Mapped, device: torch.device, owner: object) -> dict[str, torch.Tensor]:
    """A tensor over the mapping for each name; one storage for each group that shares memory, and no larger."""
    groups, places = _groups(mapped)
    made: dict[tuple[object, ...], torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for group in groups:
        storage = storage_at(group.start, group.size, device, owner)
        for span in group.spans:
            place = places[span.name]
            key = (span.start, place.dtype, place.shape, place.stride)
            if key not in made:
                made[key] = tensor_in(storage, _dtype(place), span.start - group.start, place.shape, place.stride)
            tensors[span.name] = made[key]
    for name, place in places.items():
        if not place.size_bytes:
            tensors[name] = torch.empty_strided(place.shape, place.stride, dtype=_dtype(place), device=device)
    return tensors


def _fresh_private(client: MemoryClient, slots: list[Slot], fresh: Fresh | None) -> dict[str, torch.Tensor]:
    """The private tensors, on the device of the others, where they are not there already."""
    device = torch_device(client.device.name)
    problems: list[str] = []
    made: dict[int, torch.Tensor] = {}  # tied ones once
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
            continue  # private, and where it should be
        # A parameter and a buffer in one place stay two objects: a module takes neither for the other.
        key = (id(tensor) if tensor.numel() else id(slot.tensor), slot.is_parameter)
        if key not in bound:
            bound[key] = _rebound(slot, tensor)
        if getattr(slot.holder, slot.attribute) is not bound[key]:
            setattr(slot.holder, slot.attribute, bound[key])  # not into the dict: some modules keep lists beside it


def _rebound(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    """The object to stand under a name: the old one, over other memory, where torch can (others may hold it too)."""
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
    new.__dict__.update(old.__dict__)  # what loaders hang on parameters
    object.__setattr__(new, "__class__", type(old))  # and what they derive from it
    return new
