"""One supervisor per state directory: a flock on `STATE_DIR/up.lock`, whose content says who has it, and whose time of
change when that one last looked.

Always true: the kernel's lock decides, the content only informs; we never remove the file (a file made anew would be a
second lock, facts 18). Where somebody else did, its holder is still found by its open file, and puts one back (`keep`)
that nobody sees unlocked or unsigned. Looking whether it is there costs a few system calls and stops nobody; what
cannot be put back is told once, and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.core import flock
from holdfast.core.errors import UserError

# Somebody's look at the holder reads as a lock that is not free, for less time than it takes to look who it is.
TRIES_MAX = 25
WORDS_MAX = 800  # characters of each reason, so that the whole is never longer than what is read


class Holder(msgspec.Struct, frozen=True):
    """Who supervises."""

    pid: int
    detached: bool = False
    up: bool = False  # everything has served once
    lack: str = ""  # what was still missing when the bound for that had passed
    trouble: str = ""  # why it gives up
    deployment: str = ""  # a manifest's, whose rollouts it carries out; empty: there is no manifest
    store: str = ""  # where that stands


def lock_path(state_dir: Path) -> Path:
    return state_dir / "up.lock"


def take_lock(state_dir: Path) -> int | None:
    """The lock as a descriptor (it may be handed to a child), or None if another has it."""
    path = lock_path(state_dir)
    for _ in range(TRIES_MAX):
        try:
            descriptor = flock.open_lock_file(path)
        except OSError as error:
            raise UserError(f"{path} cannot be opened: {error.strerror}; remove it") from error
        free = flock.try_flock(descriptor)
        if free and flock.is_at_path(descriptor, path) and _removed(path) is None:
            sign(descriptor, Holder(0))  # who held it before must not be taken for who does now
            return descriptor
        os.close(descriptor)
        if holder(state_dir) is not None:
            break
    return None


def sign(descriptor: int, holder: Holder) -> None:
    """Say who has the lock."""
    short = {"lack": holder.lack[:WORDS_MAX], "trouble": holder.trouble[:WORDS_MAX]}
    flock.sign(descriptor, msgspec.json.encode(msgspec.structs.replace(holder, **short)))


def signed(descriptor: int) -> Holder:
    """What was last said of who has it."""
    return _decode(os.pread(descriptor, flock.SIGNATURE_BYTES_MAX, 0))


def beat(state_dir: Path) -> None:
    """Say that the supervisor looks, now. A time needs no room on a disk; where it cannot be set it is missed."""
    with contextlib.suppress(OSError):
        os.utime(lock_path(state_dir))


def heard_unix_s(state_dir: Path) -> float | None:
    """When a supervisor last looked, this one or one that is gone; None: there never was one."""
    try:
        return lock_path(state_dir).stat().st_mtime
    except OSError:
        return None


def holder(state_dir: Path) -> Holder | None:
    """Who supervises now; pid 0 if the holder has not signed yet; None if nobody does."""
    path = lock_path(state_dir)
    try:
        text = flock.read_signature(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; remove it") from error
    if text is None:
        text = _removed(path)
    return None if text is None else _decode(text)


def last_holder(state_dir: Path) -> Holder | None:
    """Who supervises, or did last, whether or not it lives; None: nobody knows."""
    try:
        return _decode(lock_path(state_dir).read_bytes()[: flock.SIGNATURE_BYTES_MAX])
    except OSError:
        return None


def keep(descriptor: int, state_dir: Path) -> str:
    """Put the file back where it was removed or made anew; what was done or cannot be, in words, or "". The descriptor
    stays the same."""
    path = lock_path(state_dir)
    try:
        if flock.is_at_path(descriptor, path):
            return ""
        fresh = _put_back(path, os.pread(descriptor, flock.SIGNATURE_BYTES_MAX, 0))
    except OSError as error:
        return f"{path} was taken away and cannot be put back: {error}"
    if fresh is None:
        return f"{path} was taken away, and another process holds the one that is there now: stop one of the two"
    os.dup2(fresh, descriptor, inheritable=False)
    os.close(fresh)
    return f"{path} was taken away, and put back"


def _put_back(path: Path, signature: bytes) -> int | None:
    """The file at the path, locked and signed; None if another has locked it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    fresh = flock.open_lock_file(aside)
    try:
        if flock.try_flock(fresh):
            flock.sign(fresh, signature)
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
                return fresh
    finally:
        aside.unlink(missing_ok=True)
    os.close(fresh)
    made = flock.open_lock_file(path)  # whoever made it may have seen who we are, and left
    if flock.try_flock(made) and flock.is_at_path(made, path):
        flock.sign(made, signature)
        return made
    os.close(made)
    return None


def _removed(path: Path) -> bytes | None:
    """What the holder of a file that stood here and was removed says of itself: it is still among its open files."""
    mark = f"{path.resolve()} (deleted)"
    for process in os.scandir("/proc"):
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for name in os.listdir(f"/proc/{process.name}/fd"):
                opened = f"/proc/{process.name}/fd/{name}"
                if os.readlink(opened) == mark and _is_locked(process.name, name):
                    return Path(opened).read_bytes()[: flock.SIGNATURE_BYTES_MAX]
    return None


def _is_locked(pid: str, descriptor: str) -> bool:
    lines = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().splitlines()
    return any(line.startswith("lock:") and "FLOCK" in line and "WRITE" in line for line in lines)


def _decode(text: bytes) -> Holder:
    try:
        return msgspec.json.decode(text, type=Holder)
    except msgspec.DecodeError:
        return Holder(0)


LOOK_S = 0.1  # for a lock that was moved away a second `up` sees nobody this long; one that was deleted it sees
RECORDS_LOOKS = 10  # looks at the lock for each at the records: there are many of them, and `ps` can wait a second


class Keeping:
    """What others find a supervisor that holds `lock` by, and with `put_back` its processes, put back where somebody
    removed it. `run` it beside the supervisor, until that has stopped everything."""

    def __init__(
        self, lock: int, state_dir: Path, put_back: Callable[[], None], tell: Callable[[str], None]
    ) -> None:
        self._lock, self._state_dir, self._put_back, self._tell = lock, state_dir, put_back, tell
        self._said = ""
        self._looks = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        self._looks += 1
        words = keep(self._lock, self._state_dir)
        if words or self._looks % RECORDS_LOOKS == 0:
            self._put_back()
        if words and words != self._said:
            self._tell(words)
        self._said = words
