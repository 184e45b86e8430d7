"""vLLM's own model in vault memory: vLLM loads it and Holdfast moves it there; or vLLM builds it hollow (without
values) and Holdfast binds it to the weights in the vault.

vLLM builds its model in the step thread, while it makes its engine; the event loop's side knows what must be loaded.
`ModelBuild` connects the two: the loader's thread asks for a model, real or hollow. The step thread builds it, and
continues when its tensors are bound.

Always true:
- The tensors' names, ties, strides and object identities stay as vLLM made them.
- A checksum of every tensor is stored beside it, written last, so that a process that maps the weights can verify them.
- Tensors that a module keeps outside its parameters and buffers are compared with the writer's. A difference is refused
  by name.
"""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Callable

import torch
from torch import nn

from holdfast.memory.client.weights import MappedWeights
from holdfast.memory.devices.contract import DeviceError
from holdfast.memory.layout import TensorSpec
from holdfast.memory.torch.glue import bind, tensors_of
from holdfast.memory.torch.modules import Slot, misfits, slots_of, specs_of_slots
from holdfast.memory.torch.tensors import bytes_of, storage_at, tensor_in, word_sum

SUMS = "holdfast.sums"
BESIDE = "beside"  # in a layout's meta: what modules keep besides their parameters and buffers, by attribute


class ModelBuild:
    """The meeting point of two threads: the loader's calls `model`, the step thread `build`, until `bound` or
    `fail`."""

    def __init__(self) -> None:
        self._wanted: queue.Queue[bool | None] = queue.Queue()
        self._made: queue.Queue[nn.Module | BaseException] = queue.Queue()
        self._over = False

    @property
    def over(self) -> bool:
        """Return True if the model is built, and will not be built again."""
        return self._over

    def model(self, *, hollow: bool) -> nn.Module:
        """Return the next model, with or without values; raise the error that ended the build."""
        self._wanted.put(hollow)
        made = self._made.get()
        if isinstance(made, BaseException):
            self._made.put(made)
            raise DeviceError(str(made)) from made
        return made

    def build(self, load: Callable[[bool], nn.Module]) -> None:
        """Build the models that are asked for, until the last one's tensors are bound."""
        while (hollow := self._wanted.get()) is not None:
            self._made.put(load(hollow))

    def bound(self) -> None:
        if not self._over:
            self._over = True
            self._wanted.put(None)

    def fail(self, error: BaseException) -> None:
        self._over = True
        self._made.put(error)


class VllmWeights:
    """The `WeightsPlan` of `engines.host.loading` for vLLM."""

    def __init__(self, identity: str, device: torch.device, build: ModelBuild) -> None:
        self.identity, self.meta = identity, dict[str, str]()
        self._device, self._build = device, build
        self._model: nn.Module | None = None
        self._is_hollow = True
        self._slots: list[Slot] = []
        self._addresses: dict[str, int] = {}  # what the model's tensors were first bound to

    @property
    def specs(self) -> list[TensorSpec]:
        if self._build.over:
            # The mapping is read-only, and a second model does not fit beside the first.
            raise DeviceError("a vLLM engine that was loaded cannot load its weights again: it must be restarted")
        self._have(hollow=False)
        specs = specs_of_slots(self._slots)
        count = len(specs)
        return [*specs, TensorSpec(SUMS, (count,), (1,), "int64", 8 * count)]

    def fill(self, addresses: dict[str, int]) -> None:
        names = [slot.name for slot in self._slots if not slot.private]
        tensors = {slot.name: slot.tensor for slot in self._slots}
        for name in names:
            source = bytes_of(tensors[name])
            if source.numel():
                storage = storage_at(addresses[name], source.numel(), self._device, self)
                tensor_in(storage, torch.uint8, 0, (source.numel(),), (1,)).copy_(source)
        sums = torch.stack([_sum(tensors[name]) for name in names])
        storage = storage_at(addresses[SUMS], 8 * len(names), self._device, self)
        tensor_in(storage, torch.int64, 0, (len(names),), (1,)).copy_(sums)

    def verify(self, mapped: MappedWeights) -> str:
        layout = mapped.layout
        if layout.identity != self.identity:
            return f"it is {layout.identity}, not {self.identity}"
        if self._model is None:
            self._have(hollow=True)
        locations = {location.name: location for location in layout.tensors if location.name != SUMS}
        problems = misfits(self._slots, locations) or self._differs(layout.meta.get(BESIDE, ""))
        if problems:
            return problems[0]
        tensors = tensors_of(mapped, self._device, self)
        sums, names = tensors[SUMS].cpu(), [location for location in locations if location in tensors]
        wrong = [name for at, name in enumerate(names) if _sum(tensors[name]).cpu() != sums[at]]
        return f"{wrong[0]} is not what was written" if wrong else ""

    def use(self, mapped: MappedWeights | None) -> None:
        if mapped is None:
            return  # nothing computes until they are bound again
        addresses = mapped.addresses()
        if self._addresses and self._device.type == "cuda" and addresses != self._addresses:
            raise DeviceError("the weights lie elsewhere now, and vLLM's graphs know where they lay")
        self._addresses = addresses
        tensors = tensors_of(mapped, self._device, self)
        tensors.pop(SUMS)
        bind(self._slots, tensors)
        self._build.bound()

    # -- inside

    def _have(self, *, hollow: bool) -> None:
        if self._model is None or (self._is_hollow and not hollow):
            self._slots = []
            self._model, self._is_hollow = self._build.model(hollow=hollow), hollow
            self._slots = slots_of(self._model, frozenset())
            self.meta[BESIDE] = beside(self._model)

    def _differs(self, theirs: str) -> list[str]:
        ours = self.meta[BESIDE]
        known = dict(part.split("=") for part in theirs.split())
        return [
            f"modules keep another {name} than those of the engine that wrote the weights"
            for name, digest in (part.split("=") for part in ours.split())
            if known.get(name) != digest
        ]


def beside(model: nn.Module) -> str:
    """Return a digest of the tensors and floats that modules keep as plain attributes, as `name=digest` of all modules'
    together. vLLM computes them as it loads, scales of a quantised cache among them: a hollow model's may differ."""
    digests: dict[str, hashlib.blake2b] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.numel() and not attribute.startswith("kv_cache"):
                data = bytes_of(value.detach()).cpu().numpy().tobytes()
            elif isinstance(value, float):
                data = repr(value).encode()
            else:
                continue
            digest = digests.setdefault(attribute, hashlib.blake2b(digest_size=4))
            digest.update(f"{prefix}\0".encode() + data)
    return " ".join(f"{name}={digest.hexdigest()}" for name, digest in sorted(digests.items()))


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    data = bytes_of(tensor)
    return word_sum(data.clone() if data.data_ptr() % 8 else data)
