"""Slabs on their way into the vault: what a client has handed over so far, and why more of it is not taken.

Always true: a slab counts only if the kernel says what it is and how large; the budget holds for weights and pool
together; what is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.memory.devices.contract import DeviceError, WrongFd
from holdfast.memory.devices.fds import check_slab_fd, is_host, is_sealed, seal_memfd
from holdfast.memory.layout import SLABS_MAX

# A refusal: its code and its reason.
Why = tuple[str, str]


@dataclass(slots=True)
class Upload:
    """What one client has handed over so far."""

    sizes: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Budget:
    """What one device may keep; without a limit, whatever the writers can allocate."""

    limit_bytes: int
    used_bytes: Callable[[], int]

    def exceeded(self, sizes: list[int]) -> Why | None:
        if self.limit_bytes and self.used_bytes() + sum(sizes) > self.limit_bytes:
            used = self.used_bytes()
            return "over_budget", f"{sum(sizes)} bytes do not fit: {used} of {self.limit_bytes} are in use"
        return None


def wrong_count(upload: Upload, sizes: list[int], fds: list[int]) -> Why | None:
    if len(sizes) != len(fds):
        return "bad_request", f"{len(sizes)} sizes came with {len(fds)} descriptors"
    if len(upload.fds) + len(fds) > SLABS_MAX:
        return "bad_request", f"more than {SLABS_MAX} slabs"
    if any(size <= 0 for size in sizes):
        return "bad_request", "a slab has at least one byte"
    return None


def wrong_slab(device: str, sizes: list[int], fds: list[int], *, sealed: bool | None) -> Why | None:
    """`sealed`: whether host slabs must be sealed against writing already, must not be, or may be."""
    for place, (size, fd) in enumerate(zip(sizes, fds, strict=True)):
        try:
            found = check_slab_fd(device, fd)
            if is_host(device) and sealed is not None and is_sealed(fd) is not sealed:
                raise WrongFd("the slab must be sealed against writing" if sealed else "the slab cannot be written")
        except DeviceError as error:
            return "wrong_fd", f"slab {place}: {error}"
        if found not in (0, size):
            return "wrong_fd", f"slab {place} has {found} bytes, announced were {size}"
    return None


def cannot_seal(device: str, fds: list[int]) -> Why | None:
    """Seal all slabs for good, where a device's slabs can be."""
    if not is_host(device):
        return None
    try:
        for fd in fds:
            seal_memfd(fd)
    except DeviceError as error:
        return "not_sealed", str(error)
    return None
