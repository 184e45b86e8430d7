"""A torch module's parameters and buffers in the vault: written once, bound elsewhere without a copy.

`publish` moves a loaded module in; `stage` gives a module built on the meta device writable vault memory to load into,
before `MemoryClient.commit`; `materialise` binds what was imported. Always true: after the commit the tensors are
read-only, here too: a write to them is no error but a fault (SIGSEGV on the host, a lost context on a GPU), so they
need no grad any more; memory that tensors of the writer share is shared by the reader's, and what lies in the same
place is the same tensor object; strides are kept; a call that fails has left the module as it was.

The tensors are as good as the client's mapping: valid again at the same addresses after `unmap` and `remap`, not to be
touched in between, nor after `release` or `close`, nor in a forked child. Buffers that are not persistent, and names
given as private, never go to the vault. Tensors that a module keeps as plain attributes are not known to it, nor here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from holdfast.memory.client import MemoryClient
from holdfast.memory.layout import TensorPlace
from holdfast.memory.overlaps import Group, Span, overlapping
from holdfast.memory.packing import TensorSpec
from holdfast.memory.torch_tensors import (
    bytes_of,
    copy_bytes,
    dtype_name,
    dtype_of,
    span_bytes,
    storage_at,
    tensor_in,
    torch_device,
    unfit,
)

Fresh = Callable[[str, torch.Tensor], torch.Tensor]
OnProgress = Callable[[int, int], None]
NOBODY: frozenset[str] = frozenset()


class ModuleMismatch(Exception):
    """A module and the vault do not fit each other; `problems` has a line for every name that does not."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Slot:
    """A name in a module that holds a tensor. Tied tensors have several."""

    name: str
    holder: nn.Module
    attribute: str
    tensor: torch.Tensor
    is_parameter: bool
    private: bool


# -- what the brief calls for, in the order of a module's life


def specs_of(module: nn.Module, private: frozenset[str] = NOBODY) -> list[TensorSpec]:
    """What the vault is to keep of a module. Raises ModuleMismatch for what cannot be kept."""
    return _specs(_slots(module, private))


async def publish(
    client: MemoryClient,
    module: nn.Module,
    identity: str,
    *,
    private: frozenset[str] = NOBODY,
    on_progress: OnProgress = lambda done, total: None,
) -> str:
    """Copy a loaded module into the vault (held `rw`), commit, and bind the module to the copy; its own is freed.

    Returns the layout's hash. Takes the module's size once more until it ends; `stage` does not.
    """
    slots = _slots(module, private)
    empty = [f"{slot.name} is on the meta device: there is nothing to publish" for slot in slots if slot.tensor.is_meta]
    if empty:
        raise ModuleMismatch(empty)
    places = await _allocate(client, slots, identity)
    await _fill(client, places, {slot.name: slot.tensor for slot in slots}, on_progress)
    name = await client.commit()
    _bind(client, slots, places)
    _place_private(client, slots, _no_recipe)
    return name


async def stage(
    client: MemoryClient,
    module: nn.Module,
    identity: str,
    *,
    private: frozenset[str] = NOBODY,
    fresh: Fresh | None = None,
) -> None:
    """Bind a module to vault memory (held `rw`) that is still writable and has no values: load, then `commit`."""
    slots = _slots(module, private)
    _check_private(slots, fresh)
    places = await _allocate(client, slots, identity)
    _place_private(client, slots, fresh or _no_recipe)
    _bind(client, slots, places)


def materialise(
    client: MemoryClient, module: nn.Module, *, private: frozenset[str] = NOBODY, fresh: Fresh | None = None
) -> None:
    """Bind a module, on the meta device or real, to the weights mapped here. Raises ModuleMismatch naming all misfits.

    Private tensors stay as they are; one on the meta device is made by `fresh(name, meta tensor)`.
    """
    slots = _slots(module, private)
    mapped = client.mapped
    if mapped is None or not mapped.present:
        raise ModuleMismatch(["no weights are mapped: acquire them first"])
    places = {place.name: place for place in mapped.layout.tensors}
    problems = _misfits(slots, places)
    if problems:
        raise ModuleMismatch(problems)
    _check_private(slots, fresh)
    _place_private(client, slots, fresh or _no_recipe)
    _bind(client, slots, places)


# -- looking at a module


def _slots(module: nn.Module, private: frozenset[str]) -> list[Slot]:
    """Every name of a parameter or buffer, tied ones too."""
    slots: list[Slot] = []
    for prefix, holder in module.named_modules(remove_duplicate=False):
        for is_parameter, held in ((True, holder._parameters), (False, holder._buffers)):
            for attribute, tensor in held.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                alone = name in private or attribute in holder._non_persistent_buffers_set
                slots.append(Slot(name, holder, attribute, tensor, is_parameter, alone))
    problems = [f"{name} is private and not in the module" for name in sorted(private - {slot.name for slot in slots})]
    public = [slot for slot in slots if not slot.private]
    problems += [f"{slot.name} {why}" for slot in public if (why := unfit(slot.tensor))]
    if not problems:
        problems = _half_private(slots)
    if problems:
        raise ModuleMismatch(problems)
    return slots


def _half_private(slots: list[Slot]) -> list[str]:
    """Names that are private and share their bytes with one that is not: the two would part."""
    private = {slot.name for slot in slots if slot.private}
    problems = []
    for group in _groups(slots):
        names = {span.name for span in group.spans}
        if names & private and names - private:
            alone, others = ", ".join(sorted(names & private)), ", ".join(sorted(names - private))
            problems.append(f"{alone} is private and shares memory with {others}, which is not")
    return problems


def _groups(slots: Iterable[Slot]) -> list[Group]:
    """Which names share memory, and how. On the meta device there are no addresses, but storages are shared there too."""
    spaces: dict[object, list[Span]] = {}
    for slot in slots:
        tensor = slot.tensor
        if unfit(tensor):
            continue  # only a private one can be, and it does not go anywhere
        size, item = span_bytes(tensor), tensor.element_size()
        if tensor.is_meta:
            start = tensor.storage_offset() * item
            spaces.setdefault(tensor.untyped_storage()._cdata, []).append(Span(slot.name, start, size, item))
        else:
            spaces.setdefault(tensor.device, []).append(Span(slot.name, tensor.data_ptr(), size, item))
    return [group for spans in spaces.values() for group in overlapping(spans)]


def _specs(slots: list[Slot]) -> list[TensorSpec]:
    public = [slot for slot in slots if not slot.private]
    shared: dict[str, tuple[str, int]] = {}
    problems: list[str] = []
    for group in _groups(public):
        for span in group.spans:
            shared[span.name] = (group.spans[0].name, span.start - group.start)
            if (span.start - group.start) % span.item_bytes:
                problems.append(f"{span.name} lies askew in memory that it shares with {group.spans[0].name}")
    if not public:
        problems.append("the module has no tensors to publish")
    if problems:
        raise ModuleMismatch(problems)
    return [_spec(slot, *shared.get(slot.name, ("", 0))) for slot in public]


def _spec(slot: Slot, shared: str, shared_at: int) -> TensorSpec:
    tensor = slot.tensor
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return TensorSpec(slot.name, shape, stride, dtype_name(tensor.dtype), span_bytes(tensor), shared, shared_at)


# -- comparing it with what is mapped


def _misfits(slots: list[Slot], places: dict[str, TensorPlace]) -> list[str]:
    public = {slot.name: slot for slot in slots if not slot.private}
    private = {slot.name for slot in slots if slot.private}
    problems = [f"{name} is not in the vault" for name in public if name not in places]
    for name in places:
        if name not in public:
            problems.append(f"{name} is in the vault and {'private' if name in private else 'not in the module'}")
    one_place: dict[int, tuple[str, tuple[object, ...]]] = {}
    for name in public.keys() & places.keys():
        tensor, place = public[name].tensor, places[name]
        if tuple(tensor.shape) != place.shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, in the vault {place.shape}")
        if tensor.dtype is not dtype_of(place.dtype):
            problems.append(f"{name} is {dtype_name(tensor.dtype)}, in the vault {place.dtype}")
        where = (place.slab, place.offset, place.stride)
        first, expected = one_place.setdefault(id(tensor), (name, where))
        if where != expected and place.size_bytes:
            problems.append(f"{first} and {name} are one tensor in the module and two in the vault")
    return problems


# -- moving it


async def _allocate(client: MemoryClient, slots: list[Slot], identity: str) -> dict[str, TensorPlace]:
    await client.allocate(_specs(slots), identity)
    assert client.mapped is not None
    return {place.name: place for place in client.mapped.layout.tensors}
