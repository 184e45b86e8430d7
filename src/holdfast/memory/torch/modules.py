"""The named tensors of a torch module: which of them the vault keeps, and whether they fit the vault's layout.

Always true:
- Nothing here changes a module, and all problems are reported together.
- Tensors that share memory at the writer share it at the reader. Spans of two groups have no byte in common, and each
  span of a group overlaps another one of it.
- A group's start is aligned for its widest element, so that offsets in it are whole elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from holdfast.memory.layout import TensorLocation, TensorSpec
from holdfast.memory.torch.tensors import dtype_name, dtype_of, span_bytes, unfit

# The widest element: a complex number of two doubles.
_ITEM_BYTES_MAX = 16


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a tensor from its first to its last, including the gaps of its strides."""

    name: str
    start: int
    size: int
    item_bytes: int  # a power of two

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class OverlapGroup:
    """Spans that overlap, sorted by start, then the largest first. `start` is less than one element below the first."""

    start: int
    size: int
    spans: tuple[Span, ...]

    def cover(self) -> list[Span]:
        """Return spans that cover all bytes, without those inside another span."""
        chosen: list[Span] = []
        for span in self.spans:
            if not chosen or span.end > chosen[-1].end:
                chosen.append(span)
        return chosen


def overlapping(spans: Iterable[Span]) -> list[OverlapGroup]:
    """Return groups of spans with common bytes, sorted by start. Empty spans are in no group."""
    groups: list[list[Span]] = []
    reached = 0
    for span in sorted((span for span in spans if span.size), key=lambda span: (span.start, -span.size)):
        if groups and span.start < reached:
            groups[-1].append(span)
        else:
            groups.append([span])
        reached = max(reached, span.end)
    found = []
    for members in groups:
        widest, first = max(members, key=lambda span: span.item_bytes), members[0].start
        start = first - (first - widest.start) % _ITEM_BYTES_MAX
        found.append(OverlapGroup(start, max(span.end for span in members) - start, tuple(members)))
    return found


class ModuleMismatch(Exception):
    """Raised if a module does not fit the vault; `problems` has a line for each mismatch."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, slots=True)
class Slot:
    """A name in a module, and its tensor. A tied tensor has several slots."""

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
    """Return a slot for every name of a parameter or buffer, also tied ones. Non-persistent buffers are private."""
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
    """Return a problem for each group in which private names share memory with others: they would be separated."""
    private = {slot.name for slot in slots if slot.private}
    problems = []
    for group in _groups(slots):
        names = {span.name for span in group.spans}
        if names & private and names - private:
            alone, others = ", ".join(sorted(names & private)), ", ".join(sorted(names - private))
            problems.append(f"{alone} is private and shares memory with {others}, which is not")
    return problems


def _groups(slots: Iterable[Slot]) -> list[OverlapGroup]:
    """Return groups of names that share memory. Tensors on the meta device have no address, but may share storages."""
    spaces: dict[object, list[Span]] = {}
    for slot in slots:
        tensor = slot.tensor
        if unfit(tensor):
            continue  # private: not stored in the vault
        size, item = span_bytes(tensor), tensor.element_size()
        if tensor.is_meta:
            start = int(tensor.storage_offset()) * item
            spaces.setdefault(tensor.untyped_storage()._cdata, []).append(Span(slot.name, start, size, item))
        else:
            spaces.setdefault(tensor.device, []).append(Span(slot.name, tensor.data_ptr(), size, item))
    return [group for spans in spaces.values() for group in overlapping(spans)]


def specs_of(module: nn.Module, private: frozenset[str] = frozenset()) -> list[TensorSpec]:
    """Return the tensors of a module that the vault keeps. Raises ModuleMismatch naming all it cannot keep."""
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
    specs = []
    for slot in public:
        shape, stride, dtype = tuple(slot.tensor.shape), tuple(slot.tensor.stride()), dtype_name(slot.tensor.dtype)
        first, offset = shared.get(slot.name, ("", 0))
        specs.append(TensorSpec(slot.name, shape, stride, dtype, span_bytes(slot.tensor), first, offset))
    return specs


def misfits(slots: list[Slot], locations: dict[str, TensorLocation]) -> list[str]:
    """Return all differences between a module and the vault's tensors. Strides may differ: the vault's are used."""
    public = {slot.name: slot.tensor for slot in slots if not slot.private}
    private = {slot.name for slot in slots if slot.private}
    problems = [f"{name} is in the module and not in the vault" for name in public if name not in locations]
    for name in locations:
        if name not in public:
            problems.append(f"{name} is in the vault and {'private' if name in private else 'not in the module'} here")
    tied: dict[int, tuple[str, TensorLocation]] = {}
    for name, tensor in public.items():
        location = locations.get(name)
        if location is None:
            continue
        if tuple(tensor.shape) != location.shape:
            problems.append(f"{name} has the shape {tuple(tensor.shape)} here and {location.shape} in the vault")
        if tensor.dtype is not dtype_of(location.dtype):
            problems.append(f"{name} is {dtype_name(tensor.dtype)} here and {location.dtype} in the vault")
        first, known = tied.setdefault(id(tensor), (name, location))
        kept = {(each.slab, each.offset, each.shape, each.stride) for each in (known, location) if each.size_bytes}
        if len(kept) > 1:
            problems.append(f"{first} and {name} are one tensor here and two in the vault")
    return problems
