"""The keeper: holds a vault's descriptors and records, and starts the vault again when it dies. No policy.

It never reads the content of a record, and never maps a page. Always true:
- A record replaces the old one only when its last part has come. A vault that dies during a `Put` leaves the old
  record.
- A restarted vault gets exactly the acknowledged records.
- When the lifeline from their parent closes, or vault or keeper gets SIGTERM, both end and neither is restarted.
- A keeper that loses its connection to a living vault ends: the vault starts another keeper, and this one's records are
  no longer complete.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass, field

from holdfast.core.backoff import RestartBackoff
from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.log_files import say
from holdfast.core.procfs import is_ending, pid_of
from holdfast.core.tasks import done_within, first
from holdfast.memory.fdsocket import FDS_PER_FRAME_MAX, FdConnection, Frame, close_all
from holdfast.memory.protocol import READ_ERRORS, End, KeeperDone, ListAll, Put, encode, to_keeper

RESTART_S_FIRST, RESTART_S_MAX = 0.05, 5.0
VAULT_END_S = 2.0  # time for a vault to end before it is killed
TAKEN = 75  # a vault's exit status: another one serves the socket
# The roles of the processes on a lifeline.
KEEPER = "keeper"
SERVER = "server"


def announce(lifeline: int, role: str, pid: int) -> None:
    """Announce a process to the lifeline's other end, which may be gone. Keeper and vault announce the process they
    start, which may be stopped before it can, and themselves, because their starter may have been killed before."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(lifeline)) as held:
        pidfd = os.pidfd_open(pid)
        try:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))
            held.sendmsg([role.encode()], [rights], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        finally:
            os.close(pidfd)


@dataclass(slots=True)
class KeeperRecord:
    blob: bytes = b""
    fds: list[int] = field(default_factory=list)

    def close(self) -> None:
        close_all(self.fds)
        self.fds = []


class PartialRecords(dict[str, KeeperRecord]):
    def add(self, message: Put, fds: list[int]) -> KeeperRecord | None:
        """Add a part of a record. If it is the last one, remove the record here and return it."""
        record = self.setdefault(message.key, KeeperRecord())
        record.blob += message.blob
        record.fds += fds
        return None if message.more else self.pop(message.key)


def parts(call: int, key: str, record: KeeperRecord) -> list[tuple[Put, list[int]]]:
    """Return a record as `Put` messages, each with as many descriptors as a frame may have."""
    starts = range(0, max(1, len(record.fds)), FDS_PER_FRAME_MAX)
    return [
        (Put(call, key, b"" if start else record.blob, start != starts[-1]), record.fds[start : start + starts.step])
        for start in starts
    ]


def spawn(command: list[str], fds: tuple[int, ...]) -> int:
    """Start a process that inherits these descriptors, under the same numbers; return its pid."""
    actions = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds]  # which also clears close-on-exec
    return os.posix_spawn(command[0], command, os.environ, file_actions=actions)


@dataclass(frozen=True, slots=True)
class KeeperFds:
    """The descriptors that a keeper is started with."""

    listener: int  # the vault's public socket, bound and listening
    lifeline: int  # when it closes, keeper and vault end
    link: int = -1  # connection to the running vault that started this keeper
    vault_pidfd: int = -1


class Keeper:
    """The keeper's process: it holds descriptors and records, and restarts the vault."""

    def __init__(self, fds: KeeperFds, vault_command: list[str]) -> None:
        self._fds = fds
        self._vault_command = vault_command
        self._records: dict[str, KeeperRecord] = {}
        self._partial = PartialRecords()
        self._restarts = RestartBackoff(RESTART_S_FIRST, RESTART_S_MAX)
        self._over = asyncio.Event()
        self._replaced = False  # the vault, or another one, continues without this keeper
        self._vault_knows = False  # the vault knows that all must end
        self._vault_gone = asyncio.Event()
        self._link: FdConnection | None = None
        self._pidfd = -1

    async def run(self) -> None:
        """Return when the lifeline has closed or SIGTERM has come, and the vault has ended."""
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._over.set)
        self._loop.add_reader(self._fds.lifeline, self._all_end)
        if self._fds.link >= 0:
            self._watch_vault(self._fds.vault_pidfd, socket.socket(fileno=self._fds.link))
        else:
            self._start_vault()
        while True:
            await first((self._over.wait(), self._vault_gone.wait()))
            await done_within(self._over.wait(), self._restarts.next_s(self._loop.time()))
            if self._over.is_set():
                break
            self._start_vault()
        if not self._replaced:
            await self._end_vault()

    def _all_end(self) -> None:
        self._vault_knows = True
        self._over.set()

    def _start_vault(self) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fds = (self._fds.listener, its.fileno(), self._fds.lifeline)
        try:
            pid = spawn([*self._vault_command, *map(str, fds)], fds)
        except OSError as error:  # no memory or processes left: keep the records and try again
            say(f"cannot start a vault: {error}")
            mine.close()
            self._vault_gone.set()
        else:
            announce(self._fds.lifeline, SERVER, pid)
            self._watch_vault(os.pidfd_open(pid), mine)
        finally:
            its.close()

    def _watch_vault(self, pidfd: int, sock: socket.socket) -> None:
        self._vault_gone.clear()
        self._pidfd = pidfd
        self._loop.add_reader(pidfd, self._vault_over)
        self._link = FdConnection(sock, self._on_frame, self._link_lost)

    def _link_lost(self, why: str) -> None:
        """Handle the end of the link. If the vault is alive, one side has given up on the other: end this keeper. If it
        is dying, its pidfd will report that in a moment."""
        pid = pid_of(self._pidfd) if self._pidfd >= 0 else -1
        if not self._over.is_set() and pid is not None and pid > 0 and not is_ending(pid):
            self._leave(f"the link to vault {pid} ended, and it lives: {why}")

    def _leave(self, why: str) -> None:
        say(f"keeper {os.getpid()} ends: {why}")
        self._replaced = True
        self._over.set()

    def _on_frame(self, frame: Frame) -> None:
        link = self._link
        assert link is not None
        try:
            message = to_keeper.decode(frame.body)
        except READ_ERRORS:
            frame.close_fds()
            link.close("the vault sent what is not our protocol")
            return
        if isinstance(message, Put):
            self._put(message, frame.fds, link)
            return
        frame.close_fds()
        if isinstance(message, End):
            self._all_end()
            return
        if isinstance(message, ListAll):
            for key, record in self._records.items():
                for part, fds in parts(message.call, key, record):
                    link.send(encode(part), fds)
        elif (dropped := self._records.pop(message.key, None)) is not None:
            dropped.close()
        link.send(encode(KeeperDone(message.call)))

    def _put(self, message: Put, fds: list[int], link: FdConnection) -> None:
        record = self._partial.add(message, fds)
        if record is not None:
            old = self._records.get(message.key)
            self._records[message.key] = record
            if old is not None:
                old.close()
            link.send(encode(KeeperDone(message.call)))

    def _vault_over(self) -> None:
        self._loop.remove_reader(self._pidfd)
        ended = None
        with contextlib.suppress(ChildProcessError):  # a vault that started this keeper is not its child
            ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        os.close(self._pidfd)
        self._pidfd = -1
        if ended is not None and ended.si_code == os.CLD_EXITED and ended.si_status == TAKEN:
            self._leave("another vault serves the socket")
        if self._link is not None:
            self._link.close()
            self._link = None
        for record in self._partial.values():  # the vault died in the middle of a `Put`
            record.close()
        self._partial.clear()
        self._vault_gone.set()

    async def _end_vault(self) -> None:
        """Wait for the vault, which sees the same lifeline, to end; kill it if it does not."""
        if self._pidfd < 0:
            return
        if not self._vault_knows:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        # It may end in the same iteration of the loop in which its time runs out.
        if not await done_within(self._vault_gone.wait(), VAULT_END_S) and self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def main(argv: list[str]) -> int:
    """Run `python -m holdfast.memory.vault.keeper LISTENER LIFELINE LINK VAULT_PIDFD -- VAULT COMMAND…`"""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a vault that started this keeper ignored it
    raise_descriptor_limit()
    numbers, command = [int(text) for text in argv[:4]], argv[5:]
    announce(numbers[1], KEEPER, os.getpid())
    asyncio.run(Keeper(KeeperFds(*numbers), command).run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
