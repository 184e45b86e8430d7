"""A connection to the vault from its first byte to its end; a session once it has said hello.

Always true: who does not say hello in time, or says it wrongly, is told why and is gone; until then it costs a few kB.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from holdfast.memory import protocol
from holdfast.memory.devices.fds import FdKind, fd_kind
from holdfast.memory.fdsocket import FDS_PER_FRAME_MAX, FRAME_BYTES_MAX, FdConnection, Frame
from holdfast.memory.vault.sessions import Session

# A client says hello in the same breath as it connects; a busy machine may take its time.
HELLO_S = 10.0
# What somebody may send before it is known: who it is, with its pidfd. So many strangers cost so little memory.
HELLO_BYTES_MAX = 4096
HELLO_FDS_MAX = 2  # one too many is told so, more are cut off
# What a client may call itself; it is kept and logged.
NAME_CHARS_MAX = 200


class Host(Protocol):
    """The vault, as a guest sees it."""

    def greet(self, hello: protocol.Hello, pidfd: int, connection: FdConnection) -> Session: ...

    def take(self, session: Session, message: object, fds: list[int]) -> None: ...

    def session_lost(self, session: Session, why: str) -> None: ...

    def guest_left(self, guest: Guest) -> None: ...


class Guest:
    """One connection. `connection` is set right after it is made."""

    def __init__(self, vault: Host) -> None:
        self._vault = vault
        self._session: Session | None = None
        self.connection: FdConnection | None = None
        self._hello_due = asyncio.get_running_loop().call_later(HELLO_S, self.refuse, "silent", "no hello came")

    def take(self, frame: Frame) -> None:
        try:
            message = protocol.from_client.decode(frame.body)
        except protocol.READ_ERRORS as error:
            frame.close_fds()
            self.refuse("bad_request", f"cannot read message: {error}")
            return
        if self._session is None:
            self._greet(message, frame)
            return
        if frame.fds and not isinstance(
            message, protocol.AddSlabs | protocol.AddPoolSlabs | protocol.Donate | protocol.DonatePool
        ):
            frame.close_fds()
        try:
            self._vault.take(self._session, message, frame.fds)
        except OSError as error:  # no descriptors left for its record: it has nothing, rather than something unrecorded
            assert self.connection is not None
            self.connection.close(f"cannot be served: {error}")

    def _greet(self, message: object, frame: Frame) -> None:
        assert self.connection is not None
        why = None
        if not isinstance(message, protocol.Hello):
            why = "the first message must be a Hello"
        elif message.version != protocol.VERSION:
            why = f"protocol version {message.version} is spoken to a vault of version {protocol.VERSION}"
        elif not 0 < len(message.client) <= NAME_CHARS_MAX:
            why = f"a client's name has 1 to {NAME_CHARS_MAX} characters"
        elif len(frame.fds) != 1 or fd_kind(frame.fds[0]) is not FdKind.PIDFD:
            why = "a Hello comes with exactly one descriptor, the client's pidfd"
        if why is not None:
            frame.close_fds()
            self.refuse("bad_request", why)
            return
        assert isinstance(message, protocol.Hello)
        self._hello_due.cancel()
        self._vault.guest_left(self)
        self.connection.allow(FRAME_BYTES_MAX, FDS_PER_FRAME_MAX)
        self._session = self._vault.greet(message, frame.fds[0], self.connection)
        if not self.connection.open:  # it left while it was being greeted
            self._vault.session_lost(self._session, "connection lost")

    def refuse(self, code: str, reason: str) -> None:
        assert self.connection is not None
        self.connection.send(protocol.encode(protocol.Failed(0, code, reason)))
        self.connection.close(f"refused: {reason}")

    def lost(self, why: str) -> None:
        self._hello_due.cancel()
        self._vault.guest_left(self)
        if self._session is not None:
            self._vault.session_lost(self._session, why)
