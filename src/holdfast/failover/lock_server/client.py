"""An engine's way to the lock that a lock server keeps.

Theory. The server was there, and we its holder, when it answered a ping; that was not before the ping was *sent*. If
the server dies after that, or the network breaks, it grants the lock to nobody else for a whole window from then on
(machine.py). So we hold for `bound_s` (two thirds of the window at most) after the newest answered ping was sent,
and not a moment longer unless another is answered: the event is set by the clock, and whoever asks it after that moment
is told so, also in a process that was stopped and knows nothing yet (lost_event.py). The last third of the window is
for two clocks that differ and for what is on its way out already.

A connection that ends is not a lock that is lost: within the bound we come back to the restarted server with our id.
But a connection is ended by *us* only once the event is set: to a living server its end is our letting go.

Always true: besides what every lock promises (lock.py): `acquire` answers only after a ping that was sent after the
grant came back; a fault in here sets the event.
"""

from __future__ import annotations

import asyncio
import logging
import os

from holdfast.core.address import Address
from holdfast.core.errors import UserError
from holdfast.core.ports import World
from holdfast.core.procfs import read_process
from holdfast.core.tasks import Tasks
from holdfast.failover.lock import Holder, in_a_word
from holdfast.failover.lock_server import messages as m
from holdfast.failover.lock_server.link import Link, LinkEnded
from holdfast.failover.lock_server.machine import LOST
from holdfast.failover.lost_event import LostEvent
from holdfast.store.backoff import Backoff

_log = logging.getLogger(__name__)

GIVE_UP_S = 2.0
WINDOW_SHARE_MAX = 2 / 3
# Some answers may come late, or one be lost with a server's connection, before the bound is near.
PINGS_PER_BOUND = 6
PING_S_MAX = 0.3
# A holder has one bound to find a restarted server: look often. It is one client, so this is no load.
COME_BACK_POLL_S = 0.03
# A server on this machine answers within a millisecond, one elsewhere within some tens; then it is frozen or gone.
CONNECT_S = 2.0
RELEASE_S = 2.0
OWNER_S = 2.0
# What waiting does not mend.
HOPELESS = frozenset({m.WRONG_VERSION, m.WRONG_TOKEN, m.WRONG_USER})


class LockRefused(UserError):
    """The server will never grant us anything, and says why."""


class ServerLock:
    """`FailoverLock` by a lock server."""

    def __init__(
        self,
        address: Address,
        who: str,
        world: World,
        token: str = "",
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._address = address
        self._who = who
        self._token = token
        self._give_up_s = give_up_s
        self._world = world
        self._id = f"{world.rng.getrandbits(128):032x}"
        self._bound_s = give_up_s
        self._grant = 0
        self._link: Link | None = None
        self._lost: LostEvent | None = None
        self._tasks = Tasks(f"lock at {address}")  # what proves the hold, while there is one
        self._waiting = False

    def __repr__(self) -> str:
        return f"lock at {self._address}: {in_a_word(self._lost, self._waiting)} by {self._who}"

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
        """Bounded: if the server does not answer, the end of the connection tells it the same, later."""
        if self._lost is None or self._lost.is_set():
            return
        self._lost.set()
        try:
            if self._link is not None:
                async with asyncio.timeout(RELEASE_S):
                    await self._link.ask(m.GiveBack(), m.Released)
        except (LinkEnded, TimeoutError) as error:
            _log.warning("the lock server did not confirm the release: %s", error or "no answer")
        finally:
            await self._tasks.stop()

    async def owner(self) -> Holder | None:
        """By a connection of its own: an answer that does not come must not be taken for another's."""
        link: Link | None = None
        try:
            async with asyncio.timeout(OWNER_S):
                link, _ = await self._connect()
                answer = await link.ask(m.AskOwner(), m.Owner)
        except (OSError, LinkEnded, TimeoutError):
            return None
        finally:
            if link is not None:
                link.abort()
        return Holder(answer.who, answer.pid, answer.start_ticks, answer.since_unix_s) if answer.who else None

    def nudge(self) -> None:
        """Nothing to do: the server grants the lock the moment its holder's connection ends."""

    def pass_fds(self) -> tuple[int, ...]:
        """None: the connection is the holder's own, and what it says is one process's. A rank that outlives it is the
        vault's to see: its registry has every process that can touch the device (facts 2, 4d)."""
        return ()

    # -- waiting

    async def _win(self) -> None:
        """Until the lock is ours and proven to be."""
        backoff = Backoff(self._world.rng)
        while True:
            try:
                if await self._queue_once():
                    return
            except LinkEnded as ended:
                if ended.code in HOPELESS:
                    raise LockRefused(f"the lock server at {self._address} refused {self._who}: {ended}") from ended
                _log.info("waiting for the lock at %s: %s", self._address, ended)
            except (OSError, TimeoutError) as error:
                _log.info("cannot reach the lock server at %s: %s", self._address, error)
            await asyncio.sleep(backoff.next_s())

    async def _queue_once(self) -> bool:
        link, window_s = await self._connect()
        won = False
        try:
            granted = await link.ask(m.AskLock(), m.Granted)
            bound_s = min(self._give_up_s, window_s * WINDOW_SHARE_MAX)
            sent_s = self._now_s()
            # The grant may be old: we may have been stopped since, and the server gone.
            async with asyncio.timeout(bound_s):
                won = (await link.prove()).holds
            if won:
                self._link, self._grant, self._bound_s = link, granted.grant, bound_s
                self._lost = LostEvent(self._world.clock, sent_s + bound_s)
            return won
        finally:
            if not won:
                link.let_go()

    # -- holding

    async def _keep(self, lost: LostEvent) -> None:
        """Prove the hold again and again until it is lost."""
        try:
            while not lost.is_set():
                if self._link is None:
                    self._link = await self._come_back(lost)
                elif await self._link.wait_closed(min(PING_S_MAX, self._bound_s / PINGS_PER_BOUND)):
                    _log.warning("lost the connection to the lock server at %s; coming back", self._address)
                    self._link = None
                else:
                    self._link.ping()
        finally:
            lost.set()
            if self._link is not None:
                self._link.let_go()
                self._link = None

    async def _come_back(self, lost: LostEvent) -> Link | None:
        """One attempt, or None; `lost` may be set by it."""
        link: Link | None = None
        came = False
        try:
            async with asyncio.timeout_at(lost.deadline_s):
                link, window_s = await self._connect()
                sent_s = self._now_s()
                await link.ask(m.AskLock(self._grant), m.Granted)
            # Never longer than before: what we were promised is on the server's record.
            self._bound_s = min(self._bound_s, window_s * WINDOW_SHARE_MAX)
            came = lost.extend(sent_s + self._bound_s)
        except LinkEnded as ended:
            if ended.code == LOST:
                _log.error("the lock at %s is lost: %s", self._address, ended)
                lost.set()
            await asyncio.sleep(COME_BACK_POLL_S)
        except (OSError, TimeoutError):
            await asyncio.sleep(COME_BACK_POLL_S)
        finally:
            # It ended by itself, or our time did: the event is set before we end what the server may take for a hold.
            if link is not None and not came:
                link.let_go()
        return link if came else None

    def _on_pong(self, sent_s: float, holds: bool) -> None:
        if self._lost is None:
            return
        if holds:
            self._lost.extend(sent_s + self._bound_s)
        else:
            self._lost.set()

    async def _connect(self) -> tuple[Link, float]:
        """A link that was welcomed, and the server's window."""
        link = Link(self._on_pong)
        await self._world.network.connect(self._address, lambda: link, CONNECT_S)
        me = read_process(os.getpid())
        hello = m.Hello(m.VERSION, self._id, self._who, os.getpid(), me.start_ticks if me else 0, self._token)
        try:
            async with asyncio.timeout(CONNECT_S):
                return link, (await link.ask(hello, m.Welcome)).window_s
        except BaseException:
            link.abort()
            raise
