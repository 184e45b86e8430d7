"""Defines the interface of an election lock, implemented with a file, a lock server or etcd.

The lock elects, the vault admits (facts 1, 4d). Holding the lock proves nothing about the GPU. Two holders (after a
recreated file, or behind a network partition) never become two leaders: the vault grants the pool to one epoch only.

Always true of every lock:

- At most one `acquire` per object waits; a cancelled `acquire` leaks nothing.
- `acquire` on a held lock returns the same event at once.
- The event is set when the lock is lost or released, and never cleared. The holder stops emitting when it is set,
  before another engine can be granted the lock.
"""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

import msgspec

from holdfast.core.procfs import read_process


class LockHolder(msgspec.Struct, frozen=True, rename={"engine": "who"}):
    """The lock's holder, for people and logs. Not a proof: the signature remains after a release."""

    engine: str  # its name; stored as `who`
    pid: int = 0  # 0: unknown
    start_ticks: int = 0  # when that process started: a pid may be reused
    since_unix_s: float = 0.0


UNSIGNED = LockHolder("an engine that has not signed yet")


def signature(engine: str, unix_s: float) -> bytes:
    """Return this process's signature as a lock's holder from now on."""
    me = read_process(os.getpid())
    return msgspec.json.encode(LockHolder(engine, os.getpid(), me.start_ticks if me else 0, round(unix_s, 3))) + b"\n"


def read_holder(text: bytes) -> LockHolder:
    """Return the holder that signed; an unreadable signature is `UNSIGNED`."""
    try:
        return msgspec.json.decode(text, type=LockHolder)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return UNSIGNED


def state_text(lost: asyncio.Event | None, waiting: bool) -> str:
    """Return a lock's state in a word or two; `lost` is the event of its last grant."""
    if lost is not None and not lost.is_set():
        return "held"
    return "waited for" if waiting else "lost" if lost is not None else "not held"


class FailoverLock(Protocol):
    """A lock through which one engine takes part in one election."""

    async def acquire(self) -> asyncio.Event:
        """Wait for the lock without a bound; return the event that is set when it is lost. Cancel to stop waiting."""

    async def release(self) -> None:
        """Release the lock; do nothing if it is not held."""

    async def owner(self) -> LockHolder | None:
        """Return the current holder; None if there is none or it cannot be found out. Bounded in time."""

    def nudge(self) -> None:
        """Try again at once instead of at the next poll: the caller saw the holder end. May be called at any time."""

    def pass_fds(self) -> tuple[int, ...]:
        """Return the descriptors that the engine's other processes must inherit to keep the lock held (facts 2)."""
