"""Damages an engine's weights on command, for tests: random bits, or all bytes of one tensor. `mend` undoes it, and so
does a fresh load.

The torch engine has `WeightFaults` only.
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, field

from holdfast.core.errors import Code, HoldfastError
from holdfast.engines.host.memory import VaultMemory
from holdfast.engines.sim.faults import Fault, Faults
from holdfast.memory.client.weights import MappedWeights
from holdfast.memory.devices import pages, view
from holdfast.memory.devices.contract import Device
from holdfast.spec.names import is_host

BITS_MAX = 8  # most corruption is of more than one bit (facts 23)


@dataclass(slots=True)
class Damage:
    """Flipped bits of one mapping. In host memory committed slabs are sealed, so this process gets a private copy of
    the damaged pages. GPU memory is not sealed: every process that maps the weights sees the damage, as in real
    life."""

    device: Device
    mapped: MappedWeights
    _private: set[int] = field(default_factory=set)  # offsets of privately copied pages, in bytes from its start
    _flipped: list[tuple[int, int]] = field(default_factory=list)  # (address, mask)

    def flip(self, address: int, mask: int) -> None:
        """Flip these bits of one mapped byte."""
        assert self.mapped.present, "nothing is mapped"
        if is_host(self.device.name):
            self._own(address - self.mapped.address)
            view(address, 1, writable=True)[0] ^= mask
        else:
            self._write(address, mask)
        self._flipped.append((address, mask))

    def mend(self) -> None:
        if self.mapped.present and not is_host(self.device.name):
            for address, mask in self._flipped:
                self._write(address, mask)
        elif self.mapped.present:
            for start in self._private:
                self._map(start, private=False)
        self._private.clear()
        self._flipped.clear()

    def _own(self, at: int) -> None:
        """Copy the page at this offset for this process only; a page is as large as the device's granularity."""
        start = at // self.device.granularity * self.device.granularity
        if start not in self._private:
            self._private.add(start)
            self._map(start, private=True)

    def _map(self, start: int, *, private: bool) -> None:
        slab = max(number for number, first in enumerate(self.mapped.offsets()) if first <= start)
        offset = start - self.mapped.offsets()[slab]
        address, size, fd = self.mapped.address + start, self.device.granularity, self.mapped.fds[slab]
        if private:
            pages.map_private(address, size, fd, offset)
        else:
            pages.map_fd(address, size, fd, writable=False, offset=offset)

    def _write(self, address: int, mask: int) -> None:
        device, mapped = self.device, self.mapped
        device.synchronize()
        device.protect(mapped.address, mapped.size, writable=True)
        device.write(address, bytes([device.read(address, 1)[0] ^ mask]))
        device.protect(mapped.address, mapped.size, writable=False)


class Flips:
    """The bits flipped in the weights that this process reads."""

    def __init__(self, memory: VaultMemory) -> None:
        self._memory = memory
        self._damage: list[Damage] = []

    def flip_random(self, seed: int) -> tuple[str, ...]:
        """Flip 1 to 8 random bits of the weights; return a description of each."""
        rng, damage = random.Random(seed), self._begin("flip_bits")
        addresses = damage.mapped.addresses()
        tensors = damage.mapped.layout.tensors
        told = []
        for _ in range(rng.randint(1, BITS_MAX)):
            (tensor,) = rng.choices(tensors, [each.size_bytes for each in tensors])
            byte, bit = rng.randrange(tensor.size_bytes), rng.randrange(8)
            damage.flip(addresses[tensor.name] + byte, 1 << bit)
            told.append(f"{tensor.name}: bit {bit} of byte {byte}")
        return tuple(told)

    def flip_all(self, name: str, mask: int) -> None:
        damage = self._begin("memory_flip")
        (tensor,) = (each for each in damage.mapped.layout.tensors if each.name == name)
        start = damage.mapped.addresses()[name]
        for address in range(start, start + tensor.size_bytes):
            damage.flip(address, mask)

    def mend(self) -> None:
        for damage in reversed(self._damage):
            if damage.mapped is self._memory.client.mapped:
                damage.mend()
        self._damage.clear()

    def _begin(self, kind: str) -> Damage:
        mapped = self._memory.client.mapped
        if mapped is None or not mapped.present:
            raise HoldfastError(Code.INVALID_REQUEST, f"fault {kind}: this engine has no weights mapped now")
        if self._damage and self._damage[-1].mapped is mapped:
            return self._damage[-1]
        self._damage.append(Damage(self._memory.device, mapped))
        return self._damage[-1]


class WeightFaults:
    """Fault injection for any engine with its memory in a vault."""

    def __init__(self, memory: VaultMemory) -> None:
        self.faults = Faults()
        self._flips = Flips(memory)

    def inject(self, fault: Fault) -> None:
        match fault.kind:
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "reset":
                self.faults.reset()
            case "flip_bits":
                self.faults.flipped += self._flips.flip_random(int(fault.value))
            case "clear":
                self._flips.mend()
                self.faults.clear()
            case kind:
                has = "crash, stop, reset and flip_bits"
                raise HoldfastError(Code.INVALID_REQUEST, f"fault {kind}: this engine has {has}")
