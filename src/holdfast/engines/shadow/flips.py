"""An engine's weights, broken on command: random bits of them, or all bytes of one tensor. `mend` undoes it, and so
does a fresh load.

`WeightFaults` are the faults of an engine that has no others: the torch engine's.
"""

from __future__ import annotations

import os
import random
import signal

from holdfast.core.errors import Code, HoldfastError
from holdfast.engines.shadow.memory import VaultMemory
from holdfast.engines.sim.faults import Fault, Faults
from holdfast.memory.client.damage import Damage

BITS_MAX = 8  # most corruption is of more than one bit (facts 23)


class Flips:
    """What was flipped in the weights that this process reads."""

    def __init__(self, memory: VaultMemory) -> None:
        self._memory = memory
        self._damage: list[Damage] = []

    def flip_random(self, seed: int) -> tuple[str, ...]:
        """1 to 8 bits anywhere in the weights: which, in words."""
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
        """These bits of every byte of one tensor."""
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
    """Faults on command for an engine whose memory is in a vault, whatever it computes with."""

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
