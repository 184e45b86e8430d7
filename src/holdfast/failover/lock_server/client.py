"""Implements the client of a lock server, for an engine.

Theory. An answered ping proves that the server was alive, and this client its holder, at some time after the ping was
*sent*. If the server dies after that, or the network breaks, the server grants the lock to no other client for a whole
window from then on (machine.py). So the client holds the lock for `bound_s` (at most two thirds of the window) after it
sent the newest answered ping. The clock sets the lost event then, even in a process that was stopped meanwhile
(lost_event.py). The last third of the window is for clocks that differ and for output that is already on its way.

When a connection breaks, the lock is not lost yet: within the bound the client can return to the restarted server with
its id. The client itself closes a connection only once the event is set: a running server takes that as a release.

Always true, besides what every lock promises (lock.py): `acquire` returns only after an answered ping that was sent
after the grant arrived; an exception in the task that keeps the lock sets the event.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import cast

from holdfast.core.address import Address
from holdfast.core.backoff import Backoff
from holdfast.core.errors import UserError
from holdfast.core.ports import World
from holdfast.core.procfs import read_process
from holdfast.core.tasks import Tasks, done_within
from holdfast.failover.lock import LockHolder, state_text
from holdfast.failover.lock_server import messages as m
from holdfast.failover.lock_server.machine import LOST
from holdfast.failover.lost_event import LostEvent
from holdfast.wire.connection import ClientConnection, ConnectionEnded, reconnect

OnPong = Callable[[float, bool], None]


class LockConnection(ClientConnection):
    """A client's connection to the lock server, with one pending question of each kind. It calls `on_pong(sent_s,
    holds)` with the time at which an answered ping was *sent*: the server was alive after it."""

    def __init__(self, on_pong: OnPong) -> None:
        super().__init__("lock server", m.decode_to_client, message_bytes_max=m.MESSAGE_BYTES_MAX)
        self._on_pong = on_pong
        # Number and time of unanswered pings; few, because the holder stops pinging at its bound.
        self._pings: dict[int, float] = {}

    def on_message(self, message: m.ToClient) -> None:
        if isinstance(message, m.Pong) and (sent_s := self._pings.pop(message.number, None)) is not None:
            self._on_pong(sent_s, message.holds)
        self.answer(type(message), message)
        super().on_message(message)

    def ping(self) -> None:
        self.send(self._next_ping())

    async def prove(self) -> m.Pong:
        """Send a ping and return its answer."""
        return cast(m.Pong, await self.ask(m.Pong, self._next_ping()))

    def release(self) -> None:
        """Release the lock and close. The message is needed: over TCP, closing with unread input is a reset, which does
        not prove a release."""
        self.send(m.GiveBack())
        if self.unsent_bytes:
            self.abort()  # the server does not read
        else:
            self.close()

    def _next_ping(self) -> m.Ping:
        number = self.next_call()
        self._pings[number] = asyncio.get_running_loop().time()
        return m.Ping(number)


_log = logging.getLogger(__name__)

GIVE_UP_S = 2.0
WINDOW_SHARE_MAX = 2 / 3
# So that some answers may be late or lost before the bound is reached.
PINGS_PER_BOUND = 6
PING_S_MAX = 0.3
# A holder has only `bound_s` to find a restarted server, so it polls often. One client is no load.
COME_BACK_POLL_S = 0.03
# A local server answers within a millisecond, a remote one within some tens; after this it is frozen or gone.
CONNECT_S = 2.0
RELEASE_S = 2.0
OWNER_S = 2.0
# Refusals that a retry does not change.
HOPELESS = frozenset({m.WRONG_VERSION, m.WRONG_TOKEN, m.WRONG_USER})


class LockRefused(UserError):
    """The server refuses this client for good; the message says why."""


class ServerLock:
    """A `FailoverLock` that a lock server grants."""

    def __init__(
        self,
        address: Address,
        engine: str,
        world: World,
        token: str = "",
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._address = address
        self._engine = engine
        self._token = token
        self._give_up_s = give_up_s
        self._world = world
        self._id = f"{world.rng.getrandbits(128):032x}"
        self._bound_s = give_up_s
        self._grant = 0
        self._link: LockConnection | None = None
        self._lost: LostEvent | None = None
        self._tasks = Tasks(f"lock at {address}")  # renews the lock while it is held
        self._waiting = False

    def __repr__(self) -> str:
        return f"lock at {self._address}: {state_text(self._lost, self._waiting)} by {self._engine}"

    async def acquire(self) -> asyncio.Event:
        if self._lost is not None and not self._lost.is_set():
            return self._lost
        assert not self._waiting, "one acquire at a time"
        self._waiting = True
        self._now_s = asyncio.get_running_loop().time
        try:
            await self._tasks.stop()
            await self._win()
        finally:
            self._waiting = False
        assert self._lost is not None
        self._tasks.spawn(self._keep(self._lost), "keep")
        return self._lost

    async def release(self) -> None:
        """Release the lock; wait at most `RELEASE_S`: if the server does not answer, the end of the connection releases
        it."""
        if self._lost is None or self._lost.is_set():
            return
        self._lost.set()
        try:
            if self._link is not None:
                async with asyncio.timeout(RELEASE_S):
                    await self._link.ask(m.Released, m.GiveBack())
        except OSError as error:
            _log.warning("the lock server did not confirm the release: %s", error or "no answer")
        finally:
            await self._tasks.stop()

    async def owner(self) -> LockHolder | None:
        """Return the holder, or None if there is none or the server does not answer. Uses its own connection, so that a
        late answer is not taken for another question's."""
        link: LockConnection | None = None
        try:
            async with asyncio.timeout(OWNER_S):
                link, _ = await self._connect()
                answer = await link.ask(m.Owner, m.AskOwner())
        except OSError:
            return None
        finally:
            if link is not None:
                link.abort()
        return LockHolder(answer.engine, answer.pid, answer.start_ticks, answer.since_unix_s) if answer.engine else None

    def nudge(self) -> None:
        """Do nothing: the server grants the lock as soon as its holder's connection ends."""

    def pass_fds(self) -> tuple[int, ...]:
        """Return no descriptors: the connection belongs to the holder's process only. The vault detects a rank that
        outlives that process: its registry lists every process that can use the device (facts 2, 4d)."""
        return ()

    # -- waiting

    async def _win(self) -> None:
        """Return when the server has granted the lock and confirmed it."""

        def failed(error: Exception) -> None:
            if isinstance(error, ConnectionEnded) and error.code in HOPELESS:
                raise LockRefused(f"the lock server at {self._address} refused {self._engine}: {error}") from error
            what = "waiting for the lock" if isinstance(error, ConnectionEnded) else "cannot reach the lock server"
            _log.info("%s at %s: %s", what, self._address, error)

        await reconnect(self._queue_once, Backoff(self._world.rng), failed)

    async def _queue_once(self) -> bool:
        link, window_s = await self._connect()
        won = False
        try:
            granted = await link.ask(m.Granted, m.AskLock())
            bound_s = min(self._give_up_s, window_s * WINDOW_SHARE_MAX)
            sent_s = self._now_s()
            # The grant may be old: this process may have been stopped since, and the server gone.
            async with asyncio.timeout(bound_s):
                won = (await link.prove()).holds
            if won:
                self._link, self._grant, self._bound_s = link, granted.grant, bound_s
                self._lost = LostEvent(self._world.clock, sent_s + bound_s)
            return won
        finally:
            if not won:
                link.release()

    # -- holding

    async def _keep(self, lost: LostEvent) -> None:
        """Send pings, and reconnect if needed, until the lock is lost."""
        try:
            while not lost.is_set():
                if self._link is None:
                    self._link = await self._come_back(lost)
                elif await done_within(self._link.closed.wait(), min(PING_S_MAX, self._bound_s / PINGS_PER_BOUND)):
                    _log.warning("lost the connection to the lock server at %s; coming back", self._address)
                    self._link = None
                else:
                    self._link.ping()
        finally:
            lost.set()
            if self._link is not None:
                self._link.release()
                self._link = None

    async def _come_back(self, lost: LostEvent) -> LockConnection | None:
        """Try once to reclaim the lock on a new connection; return the connection or None. Set `lost` if the server
        answers that the lock is lost."""
        link: LockConnection | None = None
        came = False
        try:
            async with asyncio.timeout_at(lost.deadline_s):
                link, window_s = await self._connect()
                sent_s = self._now_s()
                await link.ask(m.Granted, m.AskLock(self._grant))
            # Never longer than before: the server's record has the window promised with the grant.
            self._bound_s = min(self._bound_s, window_s * WINDOW_SHARE_MAX)
            came = lost.extend(sent_s + self._bound_s)
        except OSError as error:
            if isinstance(error, ConnectionEnded) and error.code == LOST:
                _log.error("the lock at %s is lost: %s", self._address, error)
                lost.set()
            await asyncio.sleep(COME_BACK_POLL_S)
        finally:
            # The connection failed, or `lost` is set: only then may we close what may be the holder's connection.
            if link is not None and not came:
                link.release()
        return link if came else None

    def _on_pong(self, sent_s: float, holds: bool) -> None:
        if self._lost is None:
            return
        if holds:
            self._lost.extend(sent_s + self._bound_s)
        else:
            self._lost.set()

    async def _connect(self) -> tuple[LockConnection, float]:
        """Return a welcomed connection and the server's window (s)."""
        link = LockConnection(self._on_pong)
        await self._world.network.connect(self._address, lambda: link, CONNECT_S)
        me = read_process(os.getpid())
        hello = m.Hello(
            m.VERSIONS.first,
            self._id,
            self._engine,
            os.getpid(),
            me.start_ticks if me else 0,
            self._token,
            m.VERSIONS.last,
            m.VERSIONS.features,
        )
        try:
            async with asyncio.timeout(CONNECT_S):
                return link, (await link.ask(m.Welcome, hello)).window_s
        except BaseException:
            link.abort()
            raise
