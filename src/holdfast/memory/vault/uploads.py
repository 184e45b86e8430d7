"""Slabs on their way into the vault: what a client has handed over so far, and why more of it is not taken.

Always true: a slab counts only if the kernel says what it is and how large; the budget holds for weights and pool
together; what is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.memory.devices.contract import DeviceError, WrongFd
from holdfast.memory.devices.fds import check_slab_fd, is_sealed, seal_memfd
from holdfast.memory.fdsocket import close_all
from holdfast.memory.layout import SLABS_MAX, Layout
from holdfast.spec.names import is_host

# A refusal: its code and its reason.
Why = tuple[str, str]
# A pool's index is host memory on every device.
INDEX_DEVICE = "host-0"


@dataclass(slots=True)
class Upload:
    """What one client has handed over so far."""

    sizes: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def add(self, sizes: list[int], fds: list[int]) -> None:
        self.sizes += sizes
        self.fds += fds

    def take(self) -> Upload:
        """All of it; nothing is left here."""
        taken = Upload(self.sizes, self.fds)
        self.sizes, self.fds = [], []
        return taken

    def drop(self) -> None:
        close_all(self.take().fds)


@dataclass(frozen=True, slots=True)
class Budget:
    """What one device may keep; without a limit, whatever the writers can allocate. And what of the host's memory
    weights may take that are not on it; without a limit, nothing."""

    limit_bytes: int
    used_bytes: Callable[[], int]
    host_limit_bytes: int = 0

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


def wrong_pool_slab(device: str, upload: Upload, sizes: list[int], fds: list[int], *, last: bool) -> Why | None:
    """The first slab of all is the index; with the last ones the pool is complete."""
    why = wrong_count(upload, sizes, fds)
    if why is not None:
        return why
    if last and len(upload.fds) + len(fds) < 2:
        return "bad_request", "a pool is an index and at least one slab of pages"
    index = 0 if upload.fds else 1
    return wrong_slab(INDEX_DEVICE, sizes[:index], fds[:index], sealed=False) or wrong_slab(
        device, sizes[index:], fds[index:], sealed=False
    )


def wrong_donation(device: str, layout: Layout, upload: Upload, *, last: bool) -> Why | None:
    """A set is given back complete and as it was committed, or not at all."""
    if (problem := layout.problem()) is not None:
        return "bad_donation", problem
    came, wanted = len(upload.fds), len(layout.slab_sizes)
    if came > wanted or (last and came < wanted):
        return "bad_donation", f"{came} descriptors came for {wanted} slabs"
    return wrong_slab(device, list(layout.slab_sizes), upload.fds, sealed=True) if last else None


def cannot_commit(device: str, layout: Layout, upload: Upload) -> Why | None:
    """None: the layout fits what was handed over, and host slabs are sealed for good."""
    if list(layout.slab_sizes) != upload.sizes:
        return "bad_layout", f"the layout's slabs are not the {len(upload.sizes)} handed over"
    if (problem := layout.problem()) is not None:
        return "bad_layout", problem
    if not is_host(device):
        return None
    try:
        for fd in upload.fds:
            seal_memfd(fd)
    except DeviceError as error:
        return "not_sealed", str(error)
    return None
