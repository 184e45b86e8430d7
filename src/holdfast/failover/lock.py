"""What an election lock is, whoever keeps it: a file, a lock server, etcd.

The lock elects, the vault admits (facts 1, 4d): holding this proves nothing about the GPU, and two holders (a recreated
file, a partitioned server) never become two leaders, because the vault grants the pool to one epoch only.

Always true of every lock: at most one `acquire` waits per object; a cancelled `acquire` leaks nothing; acquiring
what this object holds already answers at once with the same event; the event is set when the lock is lost or given
back, and never cleared: its holder has then stopped emitting before anyone else can be granted the lock.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Protocol

import msgspec

from holdfast.core.procfs import read_process


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has the lock, for people; never a proof, for what a holder signs with stays behind after a release."""

    who: str  # the engine's name
    pid: int = 0  # 0: not known here
    start_ticks: int = 0  # of that process: a pid may be used again
    since_unix_s: float = 0.0


UNSIGNED = Holder("somebody who has not signed yet")


def signature(who: str, unix_s: float) -> bytes:
    """This process, as a lock's holder from now on."""
    me = read_process(os.getpid())
    return msgspec.json.encode(Holder(who, os.getpid(), me.start_ticks if me else 0, round(unix_s, 3))) + b"\n"


def read_holder(text: bytes) -> Holder:
    """Who signed; what cannot be read is somebody all the same."""
    try:
        return msgspec.json.decode(text, type=Holder)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return UNSIGNED


def in_a_word(lost: asyncio.Event | None, waiting: bool) -> str:
    """Where a lock is, by the event of its last grant, if it had one."""
    if lost is not None and not lost.is_set():
        return "held"
    return "waited for" if waiting else "lost" if lost is not None else "not held"


class FailoverLock(Protocol):
    """One engine's way to one election."""

    async def acquire(self) -> asyncio.Event:
        """Wait for the lock, for as long as it takes; cancel it to stop waiting. The event: set when it is lost."""

    async def release(self) -> None:
        """Give it back; nothing happens if it is not held."""

    async def owner(self) -> Holder | None:
        """Who has it now; None: nobody, as far as can be seen. Bounded."""

    def nudge(self) -> None:
        """Somebody saw the holder go: look at once instead of at the next poll. Free to call at any time."""

    def pass_fds(self) -> tuple[int, ...]:
        """Descriptors that the engine's other processes must inherit, so that they too keep the lock (facts 2)."""
