"""Who belongs to a lifeline: keeper and vault are announced on it; who holds its other end looks after them.

Each announces whom it starts, since that one may be stopped before its first word; and itself, since its starter may
have been killed before that.

Always true: a member is known by the pidfd that was sent, so a signal never reaches a stranger; one is killed for the
kernel's word that it is stopped, for some looks in a row, never for silence.
"""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.core.procfs import is_stopped, pid_of
from holdfast.memory.fdsocket import FdProtocolError, close_all, receive
from holdfast.memory.vault.processes import is_over

KEEPER = "keeper"
SERVER = "server"
# Between two looks, and how many in a row must find it stopped: half a second, as for a busy worker that gives no beat.
# A takeover waits that long for its vault; a person who stops one by hand and at once lets it run is not punished.
LOOK_S = 0.1
STOPPED_LOOKS = 5


@dataclass(slots=True)
class Member:
    pid: int
    pidfd: int
    stopped: int = 0  # looks in a row

    @property
    def is_stopped(self) -> bool:
        return not is_over(self.pidfd) and is_stopped(self.pid)


class Members:
    """Keeper and vault of one lifeline, once they have announced themselves. `changed` is told of each newcomer."""

    def __init__(self, changed: Callable[[dict[str, int]], None]) -> None:
        self._changed = changed
        self._known: dict[str, Member] = {}

    @property
    def pids(self) -> dict[str, int]:
        return {role: member.pid for role, member in self._known.items()}

    def hear(self, lifeline: socket.socket) -> bool:
        """Take what was announced; True once nobody holds the lifeline's other end."""
        while True:
            try:
                said, fds = receive(lifeline, also=socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                return False
            except FdProtocolError:
                continue  # out of descriptors: it is not looked after, and serves all the same
            except (EOFError, ConnectionError):
                return True
            self._take(said.decode(), fds)

    def _take(self, role: str, fds: list[int]) -> None:
        pid = pid_of(fds[0]) if fds else None
        if pid is None or pid <= 0:  # it is over already
            close_all(fds)
            return
        known = self._known.get(role)
        if known is not None:
            os.close(known.pidfd)
        self._known[role] = Member(pid, fds[0])
        if known is None or known.pid != pid:
            self._changed(self.pids)

    def kill_stopped(self, looks: int = STOPPED_LOOKS) -> list[str]:
        """Look at each once, and kill who was found stopped so many times in a row; what was done, in words.

        Where both are stopped, both go, the keeper last: when the leader of its group dies, the kernel hangs up on the
        stopped ones in it and lets them run on. Whether that ends a vault depends on who started us (nohup)."""
        for member in self._known.values():
            member.stopped = member.stopped + 1 if member.is_stopped else 0
        stopped = {role: member for role, member in self._known.items() if member.stopped}
        if any(member.stopped < looks for member in stopped.values()):
            return []
        for role in sorted(stopped, key=(SERVER, KEEPER).index):
            stopped[role].stopped = 0
            self._kill(stopped[role])
        return [f"{role} {member.pid} is stopped: killing it" for role, member in stopped.items()]

    def kill_all(self) -> None:
        for member in self._known.values():
            self._kill(member)

    def _kill(self, member: Member) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)

    def forget(self) -> None:
        close_all([member.pidfd for member in self._known.values()])
        self._known.clear()


def announce(lifeline: int, role: str, pid: int) -> None:
    """Say which process this is, to whoever started the first of them; that one may be gone, and the process too."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(lifeline)) as held:
        pidfd = os.pidfd_open(pid)
        try:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))
            held.sendmsg([role.encode()], [rights], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        finally:
            os.close(pidfd)
