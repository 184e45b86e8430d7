"""Start a vault with its keeper, kill either when it is stopped, and start both again when both are gone; the
listening socket stays open here.

The lifeline is a socket pair. Keeper and vault have one end: they are announced on it, and when the other is shut
or closed, they end. This process has the other, and reads its end once nobody holds the first: vault and keeper are
both gone, whoever had started them. Who is stopped is killed here, and started again by the other one.
Always true: while this object is started, clients' connections wait in the socket's backlog, never find nobody; `stop`
leaves nobody behind, not even one that is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.core.errors import UserError
from holdfast.core.tasks import set_within
from holdfast.memory.vault.members import KEEPER, LOOK_S, Members, announce
from holdfast.memory.vault.settings import ENDED, VaultSettings
from holdfast.memory.writer_lock import FILE_NAME as WRITER_LOCK
from holdfast.wire.net import CannotListenError

log = logging.getLogger("holdfast.vault")

BACKLOG = 1024
END_S = 5.0
# A pair that dies again at once is started more and more slowly; after a quiet minute the count is forgotten.
RESTART_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
QUIET_S = 60.0


class VaultProcesses:
    """A keeper and its vault, for as long as this object's lifeline is open."""

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
                # A group of its own, out of a terminal's Ctrl-C; but the session of whoever serves, with whose end a
                # supervisor kills what is left of it.
                self.keeper = subprocess.Popen(
                    command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
                )
            announce(theirs.fileno(), KEEPER, self.keeper.pid)
        finally:
            theirs.close()

    # -- both gone

    def gone(self) -> bool:
        """Whether neither vault nor keeper lives."""
        assert self._lifeline is not None
        return self.members.hear(self._lifeline)

    def ensure(self) -> bool:
        """Start both again if both died; True if that was so. Weights and pool come back from whoever maps them."""
        if self._listener is None or self._lifeline is None or not self.gone() or self.settings.marked(ENDED):
            return False
        self._lifeline.close()
        self.members.forget()
        if self.keeper is not None:
            self.keeper.wait()  # it is gone: this only reaps it
        self._start_pair()
        return True

    async def watch(self) -> None:
        """`ensure`, as soon as it is needed, until cancelled or until both have ended as they were told to; meanwhile
        look after them."""
        loop = asyncio.get_running_loop()
        deaths, born_s = 0, loop.time()
        while True:
            await self._until_gone()
            deaths = 0 if loop.time() - born_s > QUIET_S else deaths
            await asyncio.sleep(RESTART_S[min(deaths, len(RESTART_S) - 1)])
            deaths, born_s = deaths + 1, loop.time()
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
                await set_within(said, LOOK_S)
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
                raise UserError(
                    f"a vault already serves {self.settings.device} at {path}; see `holdfast memory status`"
                )
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
        except OSError as error:
            listener.close()
            raise CannotListenError(error.errno, error.strerror or str(error), path) from error
        # The vault asks the kernel for each peer's uid; the mode only keeps out those whom nobody allowed.
        os.chmod(path, 0o666 if self.settings.allowed_uids else 0o600)
        listener.listen(BACKLOG)
        return listener

    def stop(self) -> None:
        """Shut the lifeline and wait until both are gone; nothing is started again."""
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
        """Whether both leave in time; who is stopped cannot, and is killed for it at the first look."""
        assert self._lifeline is not None
        for _ in range(round(within_s / LOOK_S)):
            if self.members.hear(self._lifeline):
                return True
            self.members.kill_stopped(looks=1)
            select.select([self._lifeline], [], [], LOOK_S)
        return self.members.hear(self._lifeline)


def open_to_others(folder: Path) -> None:
    """Let allowed users pass through the socket's folder (not list it): each socket in it asks who they are. And let
    them lock out other writers with its writer's lock. UserError names what is in their way."""
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
    """Whether somebody listens there; a socket left by a killed vault does not."""
    if not os.path.exists(path):
        raise FileNotFoundError(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except TimeoutError:
            return True  # so many wait that there is no room for one more: somebody listens, stopped or not
        return True
