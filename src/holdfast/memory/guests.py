"""A connection to the vault from its first byte to its end; a session once it has said hello."""

from __future__ import annotations

from typing import Protocol

from holdfast.memory.devices.fds import FdKind, fd_kind
from holdfast.memory.fdsocket import FdConnection, Frame
from holdfast.memory.protocol import (
    READ_ERRORS,
    VERSION,
    AddPoolSlabs,
    AddSlabs,
    Donate,
    Failed,
    Hello,
    encode,
    from_client,
)
from holdfast.memory.sessions import Session


class Host(Protocol):
    """The vault, as a guest sees it."""

    def greet(self, hello: Hello, pidfd: int, connection: FdConnection) -> Session: ...

    def take(self, session: Session, message: object, fds: list[int]) -> None: ...

    def session_lost(self, session: Session, why: str) -> None: ...


class Guest:
    """A connection from its first byte to its end; a session once it has said hello."""

    def __init__(self, vault: Host) -> None:
        self._vault = vault
        self._session: Session | None = None
        self.connection: FdConnection | None = None

    def take(self, frame: Frame) -> None:
        try:
            message = from_client.decode(frame.body)
        except READ_ERRORS as error:
            frame.close_fds()
            self.refuse("bad_request", f"cannot read message: {error}")
            return
        if self._session is None:
            self._greet(message, frame)
            return
        if frame.fds and not isinstance(message, AddSlabs | AddPoolSlabs | Donate):
            frame.close_fds()
        self._vault.take(self._session, message, frame.fds)

    def _greet(self, message: object, frame: Frame) -> None:
        assert self.connection is not None
        why = None
        if not isinstance(message, Hello):
            why = "the first message must be a Hello"
        elif message.version != VERSION:
            why = f"protocol version {message.version} is spoken to a vault of version {VERSION}"
        elif len(frame.fds) != 1 or fd_kind(frame.fds[0]) is not FdKind.PIDFD:
            why = "a Hello comes with exactly one descriptor, the client's pidfd"
        if why is not None:
            frame.close_fds()
            self.refuse("bad_request", why)
            return
        assert isinstance(message, Hello)
        self._session = self._vault.greet(message, frame.fds[0], self.connection)

    def refuse(self, code: str, reason: str) -> None:
        assert self.connection is not None
        self.connection.send(encode(Failed(0, code, reason)))
        self.connection.close(f"refused: {reason}")

    def lost(self, why: str) -> None:
        if self._session is not None:
            self._vault.session_lost(self._session, why)
