"""The keeper: holds a vault's descriptors and records, and starts the vault again when it dies. No policy.

It understands four words (`Put`, `Drop`, `ListAll`, `End`), never looks into a record, and never maps a page. Always
true: a record counts only once its last part has come, so a vault that dies in the middle of a `Put` leaves the old
record; a restarted vault gets exactly what was acknowledged; when the lifeline closes, or one of them gets SIGTERM,
vault and keeper end and nothing is started again; a keeper whose link ends while its vault runs on ends too, since that
vault starts another one, and what is kept here is no longer all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass, field

from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.procfs import is_ending, pid_of
from holdfast.core.tasks import first
from holdfast.core.unwritten import say
from holdfast.memory.fdsocket import FDS_PER_FRAME_MAX, FdConnection, Frame, close_all
from holdfast.memory.protocol import READ_ERRORS, Drop, End, Kept, ListAll, Put, encode, to_keeper
from holdfast.memory.vault.members import KEEPER, SERVER, announce

# A vault that dies again at once is started more and more slowly; after a quiet minute the count is forgotten.
RESTART_S = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
QUIET_S = 60.0
VAULT_END_S = 2.0  # for a vault to leave by itself before it is killed
TAKEN = 75  # a vault's exit status: another one serves the socket


@dataclass(slots=True)
class Record:
    blob: bytes = b""
    fds: list[int] = field(default_factory=list)

    def close(self) -> None:
        close_all(self.fds)
        self.fds = []


class Records:
    """What a keeper keeps. No sockets: frames in, answers out through `send`."""

    def __init__(self) -> None:
        self.kept: dict[str, Record] = {}
        self._partial: dict[str, Record] = {}

    def take(self, frame: Frame, connection: FdConnection) -> bool:
        """Carry out one message of the vault's; True if all is to end."""
        try:
            message = to_keeper.decode(frame.body)
        except READ_ERRORS:
            frame.close_fds()
            connection.close("the vault sent what is not our protocol")
            return False
        if isinstance(message, Put):
            self._put(message, frame.fds, connection)
            return False
        frame.close_fds()
        if isinstance(message, End):
            return True
        if isinstance(message, Drop):
            dropped = self.kept.pop(message.key, None)
            if dropped is not None:
                dropped.close()
        elif isinstance(message, ListAll):
            for key, record in self.kept.items():
                for part in parts(message.call, key, record.blob, record.fds):
                    connection.send(encode(part[0]), part[1])
        connection.send(encode(Kept(message.call)))
        return False

    def _put(self, message: Put, fds: list[int], connection: FdConnection) -> None:
        partial = self._partial.setdefault(message.key, Record())
        partial.blob += message.blob
        partial.fds += fds
        if message.more:
            return
        old = self.kept.get(message.key)
        self.kept[message.key] = self._partial.pop(message.key)
        if old is not None:
            old.close()
        connection.send(encode(Kept(message.call)))

    def forget_partial(self) -> None:
        """The vault is gone in the middle of something: that never counted."""
        for record in self._partial.values():
            record.close()
        self._partial.clear()


def parts(call: int, key: str, blob: bytes, fds: list[int]) -> list[tuple[Put, list[int]]]:
    """A record as `Put` messages, each with as many descriptors as a frame may have."""
    batches = [fds[start : start + FDS_PER_FRAME_MAX] for start in range(0, len(fds), FDS_PER_FRAME_MAX)] or [[]]
    last = len(batches) - 1
    return [(Put(call, key, blob if place == 0 else b"", place < last), batch) for place, batch in enumerate(batches)]


@dataclass(frozen=True, slots=True)
class KeeperFds:
    """What a keeper is started with."""

    listener: int  # the vault's public socket, bound and listening
    lifeline: int  # read end of a pipe; its end means: all stop
    link: int = -1  # to a vault that already runs and started this keeper
    vault_pidfd: int = -1


class Keeper:
    """One keeper process."""

    def __init__(self, fds: KeeperFds, vault_command: list[str]) -> None:
        self._fds = fds
        self._vault_command = vault_command
        self._records = Records()
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._replaced = False  # the vault, or another one, goes on without this keeper
        self._vault_knows = False  # that all is to end
        self._vault_gone = asyncio.Event()
        self._link: FdConnection | None = None
        self._pidfd = -1

    async def run(self) -> None:
        """Until the lifeline closes or SIGTERM comes."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._over.set)
        self._loop.add_reader(self._fds.lifeline, self._all_end)
        if self._fds.link >= 0:
            self._watch_vault(self._fds.vault_pidfd, socket.socket(fileno=self._fds.link))
        else:
            self._start_vault()
        deaths, born_s = 0, self._loop.time()
        while await self._vault_died():
            if self._loop.time() - born_s > QUIET_S:
                deaths = 0
            await self._pause(RESTART_S[min(deaths, len(RESTART_S) - 1)])
            if self._over.is_set():
                break
            deaths, born_s = deaths + 1, self._loop.time()
            self._start_vault()
        if not self._replaced:
            await self._end_vault()

    def _all_end(self) -> None:
        self._vault_knows = True
        self._over.set()

    async def _vault_died(self) -> bool:
        """Wait for the vault's death; False if everything is to end first."""
        await first((self._over.wait(), self._vault_gone.wait()))
        return not self._over.is_set()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    def _start_vault(self) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fds = (self._fds.listener, its.fileno(), self._fds.lifeline)
        command = [*self._vault_command, *map(str, fds)]
        actions = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds]  # the same number without close-on-exec
        try:
            pid = os.posix_spawn(command[0], command, os.environ, file_actions=actions)
        except OSError as error:  # no memory or no processes left: what is kept stays kept, and it is tried again
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
        self._link = FdConnection(sock, self._take, self._link_lost)

    def _link_lost(self, why: str) -> None:
        """A dying vault's pidfd tells in a moment; one that lives has had enough of this keeper, or this one of it."""
        pid = pid_of(self._pidfd) if self._pidfd >= 0 else -1
        if not self._over.is_set() and pid is not None and pid > 0 and not is_ending(pid):
            self._leave(f"the link to vault {pid} ended, and it lives: {why}")

    def _leave(self, why: str) -> None:
        say(f"keeper {os.getpid()} ends: {why}")
        self._replaced = True
        self._over.set()

    def _take(self, frame: Frame) -> None:
        if self._link is None:
            frame.close_fds()
        elif self._records.take(frame, self._link):
            self._all_end()

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
        self._records.forget_partial()
        self._vault_gone.set()

    async def _end_vault(self) -> None:
        """The vault sees the same lifeline; only one that does not leave is killed."""
        if self._pidfd < 0:
            return
        if not self._vault_knows:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        try:
            async with asyncio.timeout(VAULT_END_S):
                await self._vault_gone.wait()
        except TimeoutError:
            if self._pidfd >= 0:  # else it left in the very turn of the loop in which its time was over
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


async def _keep(fds: KeeperFds, vault_command: list[str]) -> None:
    await Keeper(fds, vault_command).run()


def main(argv: list[str]) -> int:
    """`python -m holdfast.memory.vault.keeper LISTENER LIFELINE LINK VAULT_PIDFD -- VAULT COMMAND…`"""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a vault that started this keeper ignored it
    raise_descriptor_limit()
    numbers, command = [int(text) for text in argv[:4]], argv[5:]
    announce(numbers[1], KEEPER, os.getpid())
    asyncio.run(_keep(KeeperFds(*numbers), command))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
