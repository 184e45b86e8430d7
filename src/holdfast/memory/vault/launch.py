"""Starts a vault with its keeper, kills either if it is stopped (SIGSTOP), and restarts both if both have died.

This process keeps the listening socket open. The lifeline is a socket pair:
- Keeper and vault hold one end. They are announced on it, and they end when the other end is shut down or closed.
- This process holds the other end. It reads EOF once both vault and keeper have ended, no matter which process started
  them.

If this process kills a stopped keeper or vault, the other one of the two restarts it.

Always true: while this object is started, clients' connections wait in the socket's backlog and are never refused;
`stop` leaves no process behind, not even a stopped one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.core.backoff import RestartBackoff
from holdfast.core.errors import UserError
from holdfast.core.procfs import is_over, is_stopped, pid_of
from holdfast.core.tasks import done_within
from holdfast.memory.fdsocket import FdProtocolError, close_all, receive
from holdfast.memory.vault.keeper import KEEPER, SERVER, announce
from holdfast.memory.vault.settings import ENDED, VaultSettings
from holdfast.memory.writer_lock import FILE_NAME as WRITER_LOCK
from holdfast.wire.net import CannotListenError

log = logging.getLogger("holdfast.vault")

BACKLOG = 1024
END_S = 5.0
RESTART_S_FIRST, RESTART_S_MAX = 0.1, 5.0


# Interval of the checks, and how many in a row must find a process stopped: half a second in all, as for a worker
# without heartbeat. A takeover waits that long for its vault; a short SIGSTOP by hand does no harm.
LOOK_S = 0.1
STOPPED_LOOKS = 5


@dataclass(slots=True)
class Member:
    pid: int
    pidfd: int
    stopped: int = 0  # checks in a row that found it stopped


class Members:
    """Keeper and vault of one lifeline, once announced. `changed` is called for each new one."""

    def __init__(self, changed: Callable[[dict[str, int]], None]) -> None:
        self._changed = changed
        self._known: dict[str, Member] = {}

    @property
    def pids(self) -> dict[str, int]:
        return {role: member.pid for role, member in self._known.items()}

    def read_announcements(self, lifeline: socket.socket) -> bool:
        """Read the announcements; return True once no process holds the lifeline's other end."""
        while True:
            try:
                said, fds = receive(lifeline, also=socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                return False
            except FdProtocolError:
                continue  # out of descriptors: the process serves, but is not monitored
            except (EOFError, ConnectionError):
                return True
            self._add(said.decode(), fds)

    def _add(self, role: str, fds: list[int]) -> None:
        pid = pid_of(fds[0]) if fds else None
        if pid is None or pid <= 0:  # it has ended already
            close_all(fds)
            return
        known = self._known.get(role)
        if known is not None:
            os.close(known.pidfd)
        self._known[role] = Member(pid, fds[0])
        if known is None or known.pid != pid:
            self._changed(self.pids)

    def kill_stopped(self, looks: int = STOPPED_LOOKS) -> list[str]:
        """Check each process once, and kill those found stopped `looks` times in a row. Return a text line for each.

        If both are stopped, both are killed, the keeper last. The keeper leads their process group: when it dies, the
        kernel sends SIGHUP and SIGCONT to stopped members. Whether that ends a vault depends on how we were started
        (nohup)."""
        for member in self._known.values():
            member.stopped = member.stopped + 1 if not is_over(member.pidfd) and is_stopped(member.pid) else 0
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


class VaultProcesses:
    """A keeper and its vault, which run while this object's lifeline is open."""

    def __init__(
        self,
        settings: VaultSettings,
        log_path: Path | None = None,
        on_members: Callable[[dict[str, int]], None] = lambda pids: None,
    ) -> None:
        self.settings = settings
        self._log_path = log_path
        self._lifeline: socket.socket | None = None
        self._listener: socket.socket | None = None
        self.keeper: subprocess.Popen[bytes] | None = None
        self.members = Members(on_members)

    def start(self) -> None:
        self._listener = self._bind()
        if self.settings.marked(ENDED):
            self.settings.marker.unlink()
        self._start_pair()

    def _start_pair(self) -> None:
        assert self._listener is not None
        self._lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        vault = [sys.executable, "-m", "holdfast.memory.vault.server", msgspec.json.encode(self.settings).decode()]
        fds = (self._listener.fileno(), theirs.fileno())
        command = [sys.executable, "-m", "holdfast.memory.vault.keeper", *map(str, fds), "-1", "-1", "--", *vault]
        try:
            with contextlib.ExitStack() as stack:
                log = stack.enter_context(self._log_path.open("ab")) if self._log_path else None
                # A separate process group, so that a terminal's Ctrl-C does not reach it; but the session of the
                # serving process, because a supervisor kills leftover processes by session.
                self.keeper = subprocess.Popen(
                    command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
                )
            announce(theirs.fileno(), KEEPER, self.keeper.pid)
        finally:
            theirs.close()

    # -- both gone

    def gone(self) -> bool:
        assert self._lifeline is not None
        return self.members.read_announcements(self._lifeline)

    def ensure(self) -> bool:
        """Restart both if both have died; return True if so. Engines then donate the weights and pool they map."""
        if self._listener is None or self._lifeline is None or not self.gone() or self.settings.marked(ENDED):
            return False
        self._lifeline.close()
        self.members.forget()
        if self.keeper is not None:
            self.keeper.wait()  # it has ended: this only reaps it
        self._start_pair()
        return True

    async def watch(self) -> None:
        """Monitor both processes and call `ensure` when both have died, until cancelled or until they have ended on
        request."""
        loop, restarts = asyncio.get_running_loop(), RestartBackoff(RESTART_S_FIRST, RESTART_S_MAX)
        while True:
            await self._until_gone()
            await asyncio.sleep(restarts.next_s(loop.time()))
            if not self.ensure():
                return

    async def _until_gone(self) -> None:
        loop = asyncio.get_running_loop()
        said, lifeline = asyncio.Event(), self._lifeline
        assert lifeline is not None
        loop.add_reader(lifeline, said.set)
        try:
            while not self.gone():
                said.clear()
                await done_within(said.wait(), LOOK_S)
                for told in self.members.kill_stopped():
                    log.warning("%s: %s", self.settings.device, told)
        finally:
            loop.remove_reader(lifeline)

    # -- the socket

    def _bind(self) -> socket.socket:
        path = self.settings.socket_path
        folder = Path(path).parent
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.settings.allowed_uids:
            open_to_others(folder)
        with contextlib.suppress(FileNotFoundError):
            if _answers(path):
                raise UserError(f"a vault already serves {self.settings.device} at {path}; see `holdfast get memory`")
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
        except OSError as error:
            listener.close()
            raise CannotListenError(error.errno, error.strerror or str(error), path) from error
        # The vault checks each peer's uid through the kernel; the mode only keeps out users that are not allowed.
        os.chmod(path, 0o666 if self.settings.allowed_uids else 0o600)
        listener.listen(BACKLOG)
        return listener

    def stop(self) -> None:
        """Shut the lifeline down and wait until both have ended. Neither is restarted."""
        if self._listener is None or self._lifeline is None:
            return
        self._listener.close()
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_WR)
        if not self._all_left(END_S):
            self.members.kill_all()
            if self.keeper is not None:
                self.keeper.kill()
        if self.keeper is not None:
            self.keeper.wait(END_S)
        self._lifeline.close()
        self.members.forget()
        self._listener = self._lifeline = self.keeper = None
        for left in (Path(self.settings.socket_path), self.settings.marker):
            left.unlink(missing_ok=True)

    def _all_left(self, within_s: float) -> bool:
        """Return True if both end in time. A stopped process cannot end, so it is killed at the first check."""
        assert self._lifeline is not None
        for _ in range(round(within_s / LOOK_S)):
            if self.members.read_announcements(self._lifeline):
                return True
            self.members.kill_stopped(looks=1)
            select.select([self._lifeline], [], [], LOOK_S)
        return self.members.read_announcements(self._lifeline)


def open_to_others(folder: Path) -> None:
    """Let allowed users traverse the socket's folder (not list it) and take its writer lock. Each socket in the folder
    checks their uid. Raises UserError if the folder's path blocks them."""
    try:
        folder.chmod(folder.stat().st_mode | 0o011)
        lock = folder / WRITER_LOCK
        lock.touch(mode=0o600)
        lock.chmod(0o666)
    except PermissionError as error:
        why = f"{error.filename} cannot be opened to others; choose another --socket-dir"
        raise UserError(f"--allow-uid: {why}") from error
    closed = next((above for above in folder.resolve().parents if not above.stat().st_mode & 0o001), None)
    if closed is not None:
        mend = "choose a --socket-dir outside of it, or chmod o+x it"
        raise UserError(f"--allow-uid: others cannot pass {closed}; {mend}")


def _answers(path: str) -> bool:
    """Return True if a process listens there; a socket left by a killed vault has none."""
    if not os.path.exists(path):
        raise FileNotFoundError(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except TimeoutError:
            return True  # the backlog is full: a process listens, perhaps a stopped one
        return True
