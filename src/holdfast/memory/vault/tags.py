"""What the vault's tags `weights` and `kv_cache` have in common: shared objects, checks of slabs that clients send,
and the execution of their machines' effects.

Always true:
- A slab is accepted only after the kernel has confirmed its kind and size.
- The budget applies to weights and pool together.
- A refused call changes nothing.
- Effects are carried out in order, even if carrying one out causes a new event.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.core.ports import Clock
from holdfast.memory.devices.contract import DeviceError, WrongFd
from holdfast.memory.devices.fds import check_slab_fd, is_sealed, seal_memfd
from holdfast.memory.layout import SLABS_MAX, Layout
from holdfast.memory.vault.records import VaultRecords
from holdfast.memory.vault.sessions import Session, Upload
from holdfast.spec.names import is_host

Effect = TypeVar("Effect")
# A refusal: code and reason.
Why = tuple[str, str]
# A pool's index is host memory on every device.
INDEX_DEVICE = "host-0"


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory limits of one device's vault. `limit_bytes` bounds device memory (0: no limit), `host_limit_bytes` the
    host memory for demoted weights (0: none allowed)."""

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
    """Return why a slab is not acceptable. Host slabs must be sealed against writing (`sealed=True`) or must not be
    (False); None accepts both."""
    for index, (size, fd) in enumerate(zip(sizes, fds, strict=True)):
        try:
            found = check_slab_fd(device, fd)
            if is_host(device) and sealed is not None and is_sealed(fd) is not sealed:
                raise WrongFd("the slab must be sealed against writing" if sealed else "the slab cannot be written")
        except DeviceError as error:
            return "wrong_fd", f"slab {index}: {error}"
        if found not in (0, size):
            return "wrong_fd", f"slab {index} has {found} bytes, announced were {size}"
    return None


def wrong_pool_slab(device: str, upload: Upload, sizes: list[int], fds: list[int], *, last: bool) -> Why | None:
    """Return why a pool's slab is not acceptable. The first slab is the index; `last` completes the pool."""
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
    """Return why a donation is not acceptable. A set must be donated complete and as it was committed."""
    if (problem := layout.problem()) is not None:
        return "bad_donation", problem
    came, wanted = len(upload.fds), len(layout.slab_sizes)
    if came > wanted or (last and came < wanted):
        return "bad_donation", f"{came} descriptors came for {wanted} slabs"
    return wrong_slab(device, list(layout.slab_sizes), upload.fds, sealed=True) if last else None


def cannot_commit(device: str, layout: Layout, upload: Upload) -> Why | None:
    """Return why the layout does not fit the uploaded slabs. None: it fits, and host slabs are now sealed."""
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


@dataclass(frozen=True)
class Shared:
    device: str
    budget: Budget
    records: VaultRecords
    sessions: dict[int, Session]  # by number
    now_s: Callable[[], float]  # the event loop's clock
    clock: Clock
    note: Callable[[str], None]  # adds a line to the history that people read
    mark: Callable[[str], None]  # writes the marker for the next vault (`VaultSettings.marker`)


class InOrder(Generic[Effect]):
    """Carries out effects one after the other. If an effect causes a new event (a send finds a connection broken), that
    event's effects are queued after those already due."""

    def __init__(self, carry_out: Callable[[Effect], None]) -> None:
        self._carry_out = carry_out
        self._due: deque[Effect] = deque()
        self._at_work = False
        self.counts: Counter[str] = Counter()  # effects by name, for the metrics

    def __call__(self, effects: Iterable[Effect]) -> None:
        self._due += effects
        if self._at_work:
            return
        self._at_work = True
        try:
            while self._due:
                effect = self._due.popleft()
                self.counts[type(effect).__name__] += 1
                self._carry_out(effect)
        finally:
            self._at_work = False
