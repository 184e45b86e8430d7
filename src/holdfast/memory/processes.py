"""The registry of client processes: each known by its pidfd and watched until it is over.

Always true: connections of one process count as one process (by the pidfd's inode, where the kernel gives each process
its own), so what a process vouches for covers its earlier connections; a process with no member left is not watched.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import select
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Process:
    pidfd: int
    identity: int | None
    members: set[int] = field(default_factory=set)  # sessions, by number


class Processes:
    """`over` is called once for each process that ended, with its number and its members."""

    def __init__(self, over: Callable[[int, set[int]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = over
        self._numbers = itertools.count(1)
        self._known: dict[int, _Process] = {}

    def join(self, session: int, pidfd: int) -> int:
        """A session is of this process; the pidfd is the registry's from now on. The process's number."""
        identity = _identity(pidfd)
        for number, process in self._known.items():
            if identity is not None and process.identity == identity:
                os.close(pidfd)
                process.members.add(session)
                return number
        number = next(self._numbers)
        self._known[number] = _Process(pidfd, identity, {session})
        self._loop.add_reader(pidfd, self._ended, number)
        return number

    def lives(self, number: int) -> bool:
        return number in self._known

    def copy(self, number: int) -> list[int]:
        """A pidfd of its own for a record; none if the process is over."""
        process = self._known.get(number)
        return [] if process is None else [os.dup(process.pidfd)]

    def leave(self, session: int, number: int) -> None:
        """Nothing depends on this session's process any more."""
        process = self._known.get(number)
        if process is None:
            return
        process.members.discard(session)
        if not process.members:
            self._forget(number)

    def _ended(self, number: int) -> None:
        self._over(number, self._forget(number).members)

    def _forget(self, number: int) -> _Process:
        process = self._known.pop(number)
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        return process


def is_over(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _identity(pidfd: int) -> int | None:
    """Before Linux 6.9 all pidfds share one anonymous inode, which tells nothing."""
    status, link = os.fstat(pidfd), os.readlink(f"/proc/self/fd/{pidfd}")
    return status.st_ino if link.startswith("pidfd:[") else None
