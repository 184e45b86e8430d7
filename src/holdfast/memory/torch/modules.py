"""What a torch module holds under which names: what of it the vault keeps, and whether it fits what is kept there.

Always true: nothing here changes a module; every problem is found before any is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from holdfast.memory.layout import TensorPlace
from holdfast.memory.packing import TensorSpec
from holdfast.memory.torch.overlaps import Group, Span, overlapping
from holdfast.memory.torch.tensors import dtype_name, dtype_of, span_bytes, unfit


class ModuleMismatch(Exception):
    """A module and the vault do not fit each other; `problems` has a line for everything that does not."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, slots=True)
class Slot:
    """A name in a module, and the tensor there. A tied tensor has several."""

    name: str
    holder: nn.Module
    attribute: str
    tensor: torch.Tensor
    is_parameter: bool
    private: bool


def refuse(problems: list[str]) -> None:
    if problems:
        raise ModuleMismatch(problems)


def slots_of(module: nn.Module, private: frozenset[str]) -> list[Slot]:
    """Every name of a parameter or buffer, tied ones too. Buffers that are not persistent are private unasked."""
    slots: list[Slot] = []
    for prefix, holder in module.named_modules(remove_duplicate=False):
        for is_parameter, held in ((True, holder._parameters), (False, holder._buffers)):
            for attribute, tensor in held.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                alone = name in private or attribute in holder._non_persistent_buffers_set
                slots.append(Slot(name, holder, attribute, tensor, is_parameter, alone))
    unknown = private - {slot.name for slot in slots}
    problems = [f"{name} is named as private and not in the module" for name in sorted(unknown)]
    problems += [f"{slot.name} {why}" for slot in slots if not slot.private and (why := unfit(slot.tensor))]
    refuse(problems)
    refuse(_half_private(slots))
    return slots


def _half_private(slots: list[Slot]) -> list[str]:
    """Names that are private and share memory with one that is not: the two would part."""
    private = {slot.name for slot in slots if slot.private}
    problems = []
    for group in _groups(slots):
        names = {span.name for span in group.spans}
        if names & private and names - private:
            alone, others = ", ".join(sorted(names & private)), ", ".join(sorted(names - private))
            problems.append(f"{alone} is private and shares memory with {others}, which is not")
    return problems


def _groups(slots: Iterable[Slot]) -> list[Group]:
    """Which names share memory. On the meta device nothing has an address, but storages are shared there too."""
    spaces: dict[object, list[Span]] = {}
    for slot in slots:
        tensor = slot.tensor
        if unfit(tensor):
            continue  # a private one; it goes nowhere
        size, item = span_bytes(tensor), tensor.element_size()
        if tensor.is_meta:
            start = int(tensor.storage_offset()) * item
            spaces.setdefault(tensor.untyped_storage()._cdata, []).append(Span(slot.name, start, size, item))
        else:
            spaces.setdefault(tensor.device, []).append(Span(slot.name, tensor.data_ptr(), size, item))
    return [group for spans in spaces.values() for group in overlapping(spans)]


def specs_of(module: nn.Module, private: frozenset[str] = frozenset()) -> list[TensorSpec]:
    """What the vault is to keep of a module. Raises ModuleMismatch naming all that cannot be kept."""
    return specs_of_slots(slots_of(module, private))


def specs_of_slots(slots: list[Slot]) -> list[TensorSpec]:
    public = [slot for slot in slots if not slot.private]
    shared: dict[str, tuple[str, int]] = {}
    problems: list[str] = []
    for group in _groups(public):
        first = group.spans[0].name
        for span in group.spans:
            shared[span.name] = (first if len(group.spans) > 1 else "", span.start - group.start)
            if (span.start - group.start) % span.item_bytes:
                problems.append(f"{span.name} lies askew in memory that it shares with {first}")
    if not any(span_bytes(slot.tensor) for slot in public):
        problems.append("the module has nothing to keep")
    refuse(problems)
    return [_spec(slot, *shared.get(slot.name, ("", 0))) for slot in public]


def _spec(slot: Slot, shared: str, shared_at: int) -> TensorSpec:
    tensor = slot.tensor
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return TensorSpec(slot.name, shape, stride, dtype_name(tensor.dtype), span_bytes(tensor), shared, shared_at)


def misfits(slots: list[Slot], places: dict[str, TensorPlace]) -> list[str]:
    """Everything in which a module differs from what is kept. Strides may: those of the vault are taken."""
    public = {slot.name: slot.tensor for slot in slots if not slot.private}
    private = {slot.name for slot in slots if slot.private}
    problems = [f"{name} is in the module and not in the vault" for name in public if name not in places]
    for name in places:
        if name not in public:
            problems.append(f"{name} is in the vault and {'private' if name in private else 'not in the module'} here")
    tied: dict[int, tuple[str, TensorPlace]] = {}
    for name, tensor in public.items():
        place = places.get(name)
        if place is None:
            continue
        if tuple(tensor.shape) != place.shape:
            problems.append(f"{name} has the shape {tuple(tensor.shape)} here and {place.shape} in the vault")
        if tensor.dtype is not dtype_of(place.dtype):
            problems.append(f"{name} is {dtype_name(tensor.dtype)} here and {place.dtype} in the vault")
        first, known = tied.setdefault(id(tensor), (name, place))
        if _apart(known, place):
            problems.append(f"{first} and {name} are one tensor here and two in the vault")
    return problems


def _apart(one: TensorPlace, other: TensorPlace) -> bool:
    places = {(place.slab, place.offset, place.shape, place.stride) for place in (one, other) if place.size_bytes}
    return len(places) > 1
