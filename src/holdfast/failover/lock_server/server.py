"""The lock server: sockets and the record on disk around its machine.

Always true: a grant's record is on disk before the grant is told; nothing a client sends or fails to read ends the
process or grows it without bound; a holder that is silent keeps the lock as long as its connection stands. Closing the
server keeps the record: for the holder it is like any other restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from holdfast.core.address import Address, TcpAddress
from holdfast.core.errors import UserError
from holdfast.core.ports import Listener, Network
from holdfast.failover.lock_server import machine
from holdfast.failover.lock_server import messages as m
from holdfast.failover.lock_server.record import LockRecord
from holdfast.failover.lock_server.session import Session

_log = logging.getLogger(__name__)

# Four times the waiters; one that says no Hello makes room for the next before the holder finds the house full.
CONNECTIONS_MAX = 1024


class LockServer:
    """One lock. `start`, then `run` until cancelled."""

    def __init__(
        self,
        address: Address,
        network: Network,
        record: LockRecord,
        *,
        window_s: float,
        token: str,
        unix_s: Callable[[], float],
    ) -> None:
        self.address = address
        self.token = token
        self.window_s = window_s
        self._network = network
        self._record = record
        self._unix_s = unix_s
        self._sessions: dict[int, Session] = {}
        self._next_session = 0
        self._listener: Listener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self.state = machine.LockState(window_s, 0.0)

    def __repr__(self) -> str:
        return f"lock server {self.address}: {self.state!r}"

    @property
    def needs_token(self) -> bool:
        return isinstance(self.address, TcpAddress)

    async def start(self) -> Address:
        """Read the record, then listen. The window counts from here: the server before this one is dead by now."""
        self._record.open()
        found = self._record.load()
        self.state = machine.begin(found.record, not found.trouble, self.window_s, self._loop.time(), self._unix_s())
        if found.trouble:
            _log.error("cannot read %s: %s; who held the lock is unknown", self._record.path, found.trouble)
        self._listener = await self._network.listen(self.address, lambda: Session(self))
        self.address = self._listener.address
        self._arm()
        _log.info("%r", self)
        return self.address

    async def run(self) -> None:
        """Serve; UserError once the record cannot be written, for then nobody can be granted anything."""
        try:
            await self._failed
        finally:
            self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for session in list(self._sessions.values()):
            session.close()
        self._sessions.clear()
        self._record.close()

    # -- what sessions call

    def admit(self, session: Session) -> int | None:
        """A new connection's number, or None when there is no room."""
        if len(self._sessions) >= CONNECTIONS_MAX:
            strangers = [number for number, other in self._sessions.items() if not other.greeted]
            if not strangers:
                return None
            self._sessions.pop(strangers[0]).close()
        self._next_session += 1
        self._sessions[self._next_session] = session
        return self._next_session

    def dismiss(self, number: int, sure: bool) -> None:
        if self._sessions.pop(number, None) is not None:
            self.take(machine.Ended(number, sure))

    def take(self, event: machine.Event) -> None:
        """Decide, and carry it out. Writing stops this thread, and may: it happens only while nobody holds the lock,
        so no holder waits for its pings to be answered."""
        if self._failed.done():
            return
        self.state, effects = machine.step(self.state, event, self._loop.time())
        try:
            for effect in effects:
                self._do(effect)
        except OSError as error:
            reason = f"the lock server cannot write {self._record.path}: {error}; make room, or choose another file"
            self._failed.set_exception(UserError(reason))
        self._arm()

    def owner(self) -> m.Owner:
        grant, waiting = self.state.grant, len(self.state.waiters)
        if grant is None:
            unknown = self.state.situation is machine.Situation.UNKNOWN
            return m.Owner("somebody unknown, until the window ends" if unknown else "", waiting=waiting)
        client = grant.client
        return m.Owner(client.who, client.pid, client.start_ticks, grant.since_unix_s, waiting)

    # -- effects

    def _do(self, effect: machine.Effect) -> None:
        match effect:
            case machine.Save(record):
                self._record.save(record)
            case machine.GrantTo(connection, grant, back, waited_s):
                how = "is back with" if back else "has"
                _log.info("%s %s the lock, grant %d, after %.3f s", grant.client.who, how, grant.number, waited_s)
                self._send(connection, m.Granted(grant.number))
            case machine.Freed(grant, why, held_s):
                _log.info("grant %d of %s is over after %.3f s: %s", grant.number, grant.client.who, held_s, why)
            case machine.Missing(grant, until_s):
                left_s = until_s - self._loop.time()
                _log.warning("lost sight of %s, grant %d; waiting %.1f s", grant.client.who, grant.number, left_s)
            case machine.ConfirmRelease(connection):
                self._send(connection, m.Released())
            case machine.Refuse(connection, code, reason):
                if (session := self._sessions.get(connection)) is not None:
                    session.refuse(code, reason)
            case machine.Drop(connection):
                if (old := self._sessions.pop(connection, None)) is not None:
                    old.close()

    def _send(self, connection: int, message: m.ToClient) -> None:
        if (session := self._sessions.get(connection)) is not None:
            session.send(message)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = machine.next_deadline_s(self.state)
        self._timer = None if due_s is None else self._loop.call_at(due_s, self.take, machine.Tick())
