"""Start a vault with its keeper: bind the socket, make the lifeline, start the keeper, which starts the vault."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from holdfast.core.errors import UserError
from holdfast.memory.server import VaultSettings

BACKLOG = 1024
END_S = 5.0


class VaultProcesses:
    """A keeper and its vault, for as long as this object's lifeline is open."""

    def __init__(self, settings: VaultSettings, log_path: Path | None = None) -> None:
        self.settings = settings
        self._log_path = log_path
        self._lifeline = -1
        self.keeper: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        listener = self._bind()
        read_end, self._lifeline = os.pipe()
        vault = [sys.executable, "-m", "holdfast.memory.server", msgspec.json.encode(self.settings).decode()]
        fds = (listener.fileno(), read_end)
        command = [sys.executable, "-m", "holdfast.memory.keeper", *map(str, fds), "-1", "-1", "--", *vault]
        try:
            with contextlib.ExitStack() as stack:
                log = stack.enter_context(self._log_path.open("ab")) if self._log_path else None
                self.keeper = subprocess.Popen(
                    command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        finally:
            listener.close()
            os.close(read_end)

    def _bind(self) -> socket.socket:
        path = self.settings.socket_path
        Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            if _answers(path):
                raise UserError(
                    f"a vault already serves {self.settings.device} at {path}; see `holdfast memory status`"
                )
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
        return listener

    def stop(self) -> None:
        """Close the lifeline and wait; nothing is started again."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self.keeper is not None:
            try:
                self.keeper.wait(END_S)
            except subprocess.TimeoutExpired:
                self.keeper.kill()
                self.keeper.wait(END_S)
            self.keeper = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.settings.socket_path)


def _answers(path: str) -> bool:
    """Whether somebody listens there; a socket left by a killed vault does not."""
    if not os.path.exists(path):
        raise FileNotFoundError(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
