"""The machine-wide writer lock: a flock on `writer.lock` in the vaults' socket directory, taken before any first write.

The kernel's lock decides; the file's content only tells people which engine has it. The lock keeps two engines from
each writing a part of one set of weights (`plan_load` decides which engine tries to take it). The vault also admits
only one writer per device, so removing the lock file may cause a race, but never two writers (facts 4d).

Always true:
- No file is open while `acquire` waits, so cancelling it leaks nothing.
- A lock on a file that has been replaced at its path is not valid (facts 18).
- Acquiring a lock that this object holds returns at once.
- The file is never removed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from holdfast.core.flock import is_at_path, open_lock_file, read_signature, sign, try_flock
from holdfast.core.tasks import true_within

FILE_NAME = "writer.lock"
# A blocking flock cannot be cancelled, so poll. A load takes seconds: this delay is small, at 50 opens a second.
POLL_S = 0.02
# The file may be replaced between open and flock: try this often, then leave it to the next poll.
TRIES_MAX = 3


class WriterLock:
    """One engine's handle of the lock. Others read `owner_text` as its owner. Release it in a `finally`."""

    def __init__(self, directory: Path, owner_text: str) -> None:
        self.path = directory / FILE_NAME
        self.signature = f"{owner_text}, pid {os.getpid()}"
        self._descriptor: int | None = None
        self._pid = 0  # the process that took it

    def __repr__(self) -> str:
        return f"writer lock {self.path}: {'held' if self.held else 'not held'} by {self.signature}"

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def fileno(self) -> int:
        """Return the lock's descriptor, for children that load too (`pass_fds`): they keep the lock while they live
        (facts 2)."""
        assert self._descriptor is not None, f"{self!r}"
        return self._descriptor

    def try_acquire(self) -> bool:
        """Take the lock if it is free. It seems taken while another process reads the owner."""
        if self.held:
            return True
        for _ in range(TRIES_MAX):
            descriptor = open_lock_file(self.path)
            try:
                if not try_flock(descriptor):
                    return False
                if is_at_path(descriptor, self.path):
                    sign(descriptor, f"{self.signature}\n".encode())
                    self._descriptor, self._pid = descriptor, os.getpid()
                    return True
            finally:
                if self._descriptor != descriptor:
                    os.close(descriptor)
        return False

    async def acquire(self, timeout_s: float) -> None:
        """Wait for the lock. Raises TimeoutError, which names the holder."""
        if not await true_within(self.try_acquire, timeout_s, POLL_S):
            owner = self.owner() or "an engine, a moment ago"
            raise TimeoutError(f"the writer lock {self.path} was not free within {timeout_s:g} s: {owner} has it")

    def release(self) -> None:
        """Release the lock, also for children that got its descriptor. In a forked child: close only the child's
        copy."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        if self._pid == os.getpid():
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def owner(self) -> str | None:
        text = read_signature(self.path)
        if text is None:
            return None
        return text.decode(errors="replace").strip() or "an engine that has not signed yet"


# -- which engine loads weights onto empty devices: one engine's decision from what it observes (pure)
#
# An engine of several ranks needs all its devices. Two engines that each wrote some of them would deadlock. So an
# engine that wants to write to an EMPTY device first takes the machine-wide writer lock, and then asks for `rw_or_ro`
# on all devices. All other engines ask for `ro` and wait for a writer.
#
# Engine ids avoid races at the usual start. ENGINE_ID 0 tries the lock at once. The others first wait a grace time,
# which counts while a device is EMPTY and no engine has the lock. If the lock changes owner or becomes free before the
# set is complete, its writer was lost. Two lost writers suggest a crash loop: from then on there is no grace time.
#
# Any engine may load: the lock decides, and a wrong guess by id costs only time.
#
# Always true: LOAD only with the lock; the lock is taken only while some device is EMPTY; with all devices committed
# the answer is READ.

# Longer than the restart of a loader that died once; short compared with loading the weights.
GRACE_S = 5.0
# One death may be an accident; a second one in the same wait is a crash loop.
WRITERS_LOST_MAX = 2


class LoadAction(StrEnum):
    READ = "read"  # all is committed: ask for `ro` where not held yet; release the lock
    LOAD = "load"  # we have the lock: ask for `rw_or_ro` where not held yet
    TAKE_LOCK = "take the lock"  # try it without waiting, then observe again
    WAIT = "wait"  # ask for `ro`, waiting for a writer, where not held yet; then observe again


@dataclass(frozen=True, slots=True)
class LoadLook:
    """What an engine observes. Read the lock first, then the devices: a writer commits before it releases the lock."""

    devices: Mapping[str, str]  # name -> phase of its weights (EMPTY, RW, COMMITTED, RO; else not on the device)
    lock_owner: str | None  # None: free
    lock_mine: bool = False


@dataclass(frozen=True, slots=True)
class LoadPlan:
    action: LoadAction
    look_again_at_s: float | None = None  # for WAIT; None: when the lock or a device changes, or by polling
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LoadWatch:
    engine_id: int
    grace_s: float = GRACE_S
    idle_since_s: float | None = None  # since when a device is EMPTY and the lock free
    owner: str | None = None
    writers_lost: int = 0

    @property
    def patience_s(self) -> float:
        return 0.0 if self.engine_id == 0 or self.writers_lost >= WRITERS_LOST_MAX else self.grace_s


def plan_load(watch: LoadWatch, look: LoadLook, now_s: float) -> tuple[LoadWatch, LoadPlan]:
    """Return what this engine does now. Stop calling it once the engine holds all devices' weights."""
    if all(phase in ("COMMITTED", "RO") for phase in look.devices.values()):
        return replace(watch, idle_since_s=None, owner=None, writers_lost=0), LoadPlan(
            LoadAction.READ, reason="all committed"
        )
    watch = _notice(watch, look, now_s)
    if look.lock_mine:
        return watch, LoadPlan(LoadAction.LOAD, reason="this engine has the writer lock")
    if look.lock_owner is not None:
        return watch, LoadPlan(LoadAction.WAIT, reason=f"{look.lock_owner} has the writer lock")
    if watch.idle_since_s is None:
        return watch, LoadPlan(LoadAction.WAIT, reason="a writer is at work on every device that is not committed")
    if now_s >= (due_s := watch.idle_since_s + watch.patience_s):
        return watch, LoadPlan(LoadAction.TAKE_LOCK, reason="no engine loads")
    return watch, LoadPlan(LoadAction.WAIT, due_s, "another engine may be about to load")


def _notice(watch: LoadWatch, look: LoadLook, now_s: float) -> LoadWatch:
    lost = watch.owner is not None and watch.owner != look.lock_owner
    idle = look.lock_owner is None and not look.lock_mine and "EMPTY" in look.devices.values()
    since_s = (now_s if watch.idle_since_s is None else watch.idle_since_s) if idle else None
    owner = None if look.lock_mine else look.lock_owner
    return replace(watch, idle_since_s=since_s, owner=owner, writers_lost=watch.writers_lost + lost)
