"""The registry of client processes: each known by its pidfd and watched until it is over.

A session names a process by the pidfd it sends; the kernel names the one that connected (`SO_PEERPIDFD`). Usually they
are the same. Where they are not, the session is of both: nobody gets past a fence by sending somebody else's pidfd.

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

from holdfast.core.procfs import is_ending, pid_of
from holdfast.memory.fdsocket import copy_all


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

    def join(self, session: int, pidfds: list[int]) -> tuple[int, ...]:
        """A session is of these processes; the pidfds are the registry's from now on. The processes' numbers."""
        return tuple(dict.fromkeys(self._join(session, pidfd) for pidfd in pidfds))

    def _join(self, session: int, pidfd: int) -> int:
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

    def live(self, numbers: tuple[int, ...]) -> bool:
        """Whether any of them is not over."""
        return any(number in self._known for number in numbers)

    def running(self, numbers: tuple[int, ...]) -> bool:
        """Return True if any of them may still run code. One that cannot be looked at (another PID namespace, no
        descriptor left to look with, a hidden /proc) counts as running until its pidfd says that it is over."""
        pidfds = [self._known[number].pidfd for number in numbers if number in self._known]
        return any(_runs_on(pidfd) for pidfd in pidfds)

    def has(self, numbers: tuple[int, ...], pidfd: int) -> bool:
        """Whether a pidfd is of one of them; True where the kernel cannot tell."""
        identity = _identity(pidfd)
        known = [self._known[number].identity for number in numbers if number in self._known]
        return identity is None or None in known or identity in known

    def copies(self, numbers: tuple[int, ...]) -> list[int]:
        """Pidfds of their own for a record, of those that are not over."""
        return copy_all([self._known[number].pidfd for number in numbers if number in self._known])

    def leave(self, session: int, numbers: tuple[int, ...]) -> None:
        """Nothing depends on this session's processes any more."""
        for number in numbers:
            process = self._known.get(number)
            if process is not None:
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


def _runs_on(pidfd: int) -> bool:
    """A killed process ends its connections 50 to 150 ms before its pidfd tells (fact 1); it is marked before both. The
    mark of a process in a sibling namespace (pid 0) cannot be read: that fence waits for the pidfd."""
    pid = pid_of(pidfd)
    return not is_over(pidfd) and (not pid or (pid > 0 and not is_ending(pid)))


def _identity(pidfd: int) -> int | None:
    """Before Linux 6.9 all pidfds share one anonymous inode, which tells nothing."""
    status, link = os.fstat(pidfd), os.readlink(f"/proc/self/fd/{pidfd}")
    return status.st_ino if link.startswith("pidfd:[") else None
