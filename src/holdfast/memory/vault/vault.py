"""Sessions in front, the two tags behind: what a vault does with connections, processes, calls and time.

Always true: only allowed uids are served; a client that breaks the protocol loses its connection and nothing else; a
client's end is an event of both machines at once; what the keeper has is the truth a restarted vault begins with.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
from collections import deque
from random import SystemRandom
from typing import Any

import msgspec

from holdfast.core.limits import descriptor_limit
from holdfast.core.ports import Clock
from holdfast.memory.fdsocket import FdConnection, copy_all
from holdfast.memory.protocol import VERSION, GetStatus, Hello, Quiesced, Status, Welcome
from holdfast.memory.vault.calls import dispatch
from holdfast.memory.vault.guests import HELLO_BYTES_MAX, HELLO_FDS_MAX, Guest
from holdfast.memory.vault.kept import KeptRecords
from holdfast.memory.vault.pool import VaultPool
from holdfast.memory.vault.pool_machine import Seat
from holdfast.memory.vault.processes import Processes, is_over
from holdfast.memory.vault.sessions import PREFIX, ClientRecord, Session, decode_client
from holdfast.memory.vault.settings import ENDED, LIVE, WARM, VaultSettings
from holdfast.memory.vault.tags import Shared
from holdfast.memory.vault.uploads import Budget
from holdfast.memory.vault.warm import VaultWarm
from holdfast.memory.vault.weights import VaultWeights
from holdfast.memory.vault.weights_machine import NEVER_S, Holder

log = logging.getLogger("holdfast.vault")

HISTORY_MAX = 1000
SESSIONS_MAX = 4096
# Connections that have not said hello; a machine's engines starting at once are some dozens.
GUESTS_MAX = 256
# Out of descriptors: somebody must leave before another can come.
ACCEPT_PAUSE_S = 0.1
# Kept for those who are here: a set of slabs, a pool, a keeper that must be started. Newcomers are refused before.
FDS_RESERVED = 64


class Vault:
    """One device's vault. `facts` is what it would say of itself."""

    def __init__(self, settings: VaultSettings, kept: KeptRecords, listener: socket.socket, clock: Clock) -> None:
        self._settings = settings
        self._kept = kept
        self._listener = listener
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._processes = Processes(self._process_over)
        self._guests: set[Guest] = set()
        self.id = SystemRandom().randbytes(8).hex()
        self.status_address = ""  # where the status page really is
        self.sessions: dict[int, Session] = {}
        self._ended: dict[int, Session] = {}  # connection closed, process alive, epoch not quiesced
        self.history: deque[tuple[float, str]] = deque(maxlen=HISTORY_MAX)
        budget = Budget(settings.budget_bytes, self.kept_bytes, settings.host_budget_bytes)
        shared = Shared(settings.device, budget, kept, self.sessions, self._loop.time, clock, self._note, settings.mark)
        self.weights, self.pool = VaultWeights(shared), VaultPool(shared)
        self.warm = VaultWarm(shared, self.weights, self.pool)
        self._uids = {os.getuid(), *settings.allowed_uids}

    # -- life

    def start(self) -> None:
        """Adopt what the keeper has, then accept."""
        settings = self._settings
        lost = settings.marked(LIVE) and not self._kept.whole
        readers, seats = self._expect_clients()
        refill_from_s = self._loop.time() + settings.weights_donation_s if lost else None
        self.weights.adopt(readers, NEVER_S if settings.leased and settings.marked(WARM) else refill_from_s)
        if self.weights.state.refill_from_s != NEVER_S:
            settings.mark(LIVE)
        self.pool.adopt(seats, lost=lost, donation_s=self._settings.pool_donation_s)
        if lost:  # and should this vault die before that, the next one must know it too
            self._loop.call_later(settings.weights_donation_s, self._kept.mark_whole)
        else:
            self._kept.mark_whole()
        records = f"{len(self._kept.records)} records{', the rest was lost' if lost else ''}"
        self._note(f"vault {self.id} serves {self._settings.device}: {records}")
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._tick()

    def _expect_clients(self) -> tuple[list[Holder], list[Seat]]:
        """Clients of the vault before this one whose processes live keep their seats; the others are over."""
        readers, seats = list[Holder](), list[Seat]()
        for key, kept in list(self._kept.records.items()):
            if not key.startswith(PREFIX):
                continue
            living = [fd for fd in kept.fds if not is_over(fd)]
            if not living:
                self._kept.drop(key)
                continue
            session = self._known_before(decode_client(kept.blob), living)
            if session.generation is not None:
                readers.append(Holder(session.number, session.generation))
            if session.maps:
                seats += [Seat(session.number, p, session.epoch, closed=session.closed) for p in session.processes]
        self._numbers = itertools.count(max([*self.sessions, *self._ended], default=0) + 1)
        return readers, seats

    def _known_before(self, record: ClientRecord, pidfds: list[int]) -> Session:
        hello = Hello(VERSION, record.client, record.engine_id, record.pid)
        processes = self._processes.join(record.number, copy_all(pidfds))
        session = Session(record.number, hello, processes, self._processes, self._kept)
        session.generation, session.maps, session.epoch = record.generation, record.maps, record.epoch
        session.closed = record.closed
        (self._ended if record.closed else self.sessions)[record.number] = session
        return session

    def end(self, *, meant: bool) -> None:
        """This vault ends. Meant: nothing is to come back. Else whoever held the lifeline is gone, perhaps killed, and
        the next vault takes back what engines still map (who lets go of everything removes the marker itself)."""
        if meant:
            self._settings.mark(ENDED)
        self.warm.end()
        self._loop.remove_reader(self._listener.fileno())
        self._kept.close()
        for session in list(self.sessions.values()):
            if session.connection is not None:
                session.connection.close("the vault has ended")

    # -- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(ACCEPT_PAUSE_S, self._loop.add_reader, self._listener.fileno(), self._accept)
            return
        guest = Guest(self)
        guest.connection = FdConnection(sock, guest.take, guest.lost)
        guest.connection.allow(HELLO_BYTES_MAX, HELLO_FDS_MAX)
        self._guests.add(guest)
        if guest.connection.peer_uid() not in self._uids:
            guest.refuse("forbidden", f"uid {guest.connection.peer_uid()} may not use this vault")
        elif len(self.sessions) >= SESSIONS_MAX or len(self._guests) > GUESTS_MAX:
            guest.refuse("too_many", f"{len(self.sessions)} clients are here already")
        elif sock.fileno() >= descriptor_limit() - FDS_RESERVED:  # the kernel gives the lowest number that is free
            kept = f"{FDS_RESERVED} of its {descriptor_limit()} descriptors are kept for who is here already"
            guest.refuse("too_many", f"the vault has no room for another client: {kept}; raise its `ulimit -n`")

    def guest_left(self, guest: Guest) -> None:
        self._guests.discard(guest)

    def greet(self, hello: Hello, pidfd: int, connection: FdConnection) -> Session:
        """A client has said who it is; one that was here before the vault's restart gets its seat back."""
        before = next((s for s in self.sessions.values() if s.client == hello.client and s.connection is None), None)
        if before is not None and not self._processes.has(before.processes, pidfd):
            before = None  # another process of that name
        if before is not None and hello.resume is not None:
            os.close(pidfd)
            self._come_back(before, hello, connection)
            return before
        if before is not None:
            self._end_session(before)  # it has nothing of what it had
        number = next(self._numbers)
        processes = self._processes.join(number, [pidfd, *connection.peer_pidfd()])
        session = self.sessions[number] = Session(number, hello, processes, self._processes, self._kept)
        session.connection = connection
        session.reply(self._welcome(resumed=False))
        if hello.resume is not None:
            self.pool.disown(session, hello.resume.epoch)
        return session

    def _welcome(self, *, resumed: bool) -> Welcome:
        return Welcome(VERSION, self._settings.device, self.id, resumed, self.pool.state.last_epoch)

    def _come_back(self, session: Session, hello: Hello, connection: FdConnection) -> None:
        assert hello.resume is not None
        layout = self.weights.layouts.get(session.generation or 0)
        resumed = hello.resume.layout_hash == (layout.hash() if layout is not None else None)
        if not resumed:
            self.weights.let_go(session)
        session.connection = connection
        session.reply(self._welcome(resumed=resumed))
        self.pool.come_back(session, hello.resume.epoch)
        self._rearm()

    def session_lost(self, session: Session, why: str) -> None:
        """The connection ended. What works under an epoch ends with it only if the process does, or said so: the CPU
        fence rests on that. One that runs on, cut off or by its own doing, keeps its seat and is expected back."""
        connection = session.connection
        if connection is None:
            return
        if session.engine_id >= 0:  # else somebody who only asked for the status
            self._note(f"{session!r}: {why}")
        session.connection = None
        ended = connection.peer_ended and (session.leaving or not self._processes.running(session.processes))
        if ended or session.epoch is None or not self._processes.live(session.processes):
            self._end_session(session)
        else:
            session.drop_unsaid()
            self.pool.cut_off(session)
            if session.generation is None:  # it reads on; what it waited for or wrote is over
                self.weights.gone(session)
            self._rearm()

    def _end_session(self, session: Session) -> None:
        session.drop_unsaid()
        self.sessions.pop(session.number, None)
        self.pool.gone(session)  # first: if it was the pool's owner, a standby waits for this very news
        self.weights.gone(session)
        session.generation = None
        if self._processes.live(session.processes) and self.pool.has_seat(session):
            session.closed = True  # its queued GPU work is not over: a restarted vault must know of it
            self._ended[session.number] = session
            session.remember()
        else:
            session.forget()
        self._rearm()

    # -- processes

    def _process_over(self, process: int, members: set[int]) -> None:
        for number in members:
            session = self.sessions.get(number)
            if session is None or self._processes.live(session.processes):
                continue
            if session.connection is None:
                self._end_session(session)  # it was expected back, and will not come
            else:
                session.forget()
        self.pool.process_over(process)
        self._forget_fenced()
        self._rearm()

    def _forget_fenced(self) -> None:
        """Sessions that had ended and fence nobody any more."""
        for session in [s for s in self._ended.values() if not self.pool.has_seat(s)]:
            del self._ended[session.number]
            session.forget()

    # -- calls

    def take(self, session: Session, message: object, fds: list[int]) -> None:
        """One call of a client's. Descriptors belong to whoever takes them; the rest are closed by the caller."""
        if isinstance(message, GetStatus):
            session.reply(Status(message.call, msgspec.json.encode(self.facts())))
        else:
            dispatch(self.weights, self.pool, self.warm, session, message, fds)
        if isinstance(message, Quiesced):
            self._forget_fenced()
        self._rearm()

    # -- time and facts

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = [due_s for due_s in (self.weights.deadline_s(), self.pool.deadline_s()) if due_s is not None]
        if due:
            self._timer = self._loop.call_at(min(due), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.weights.tick()
        self.pool.tick()
        self._rearm()

    def _note(self, text: str) -> None:
        self.history.append((self._clock.unix_s(), text))
        log.info("%s", text)

    def kept_bytes(self) -> int:
        return self.weights.kept_bytes() + self.warm.device_bytes + self.pool.kept_bytes()

    def facts(self) -> dict[str, Any]:
        """What `holdfast memory status` shows."""
        return {
            "device": self._settings.device,
            "vault": self.id,
            "pid": os.getpid(),
            "uptime_s": self._loop.time() - self._started_s,
            **(self.weights.facts() | self.warm.facts() | self.pool.facts()),
            "waiting": len(self.weights.state.waiters) + len(self.pool.state.waiters),
            "device_bytes": self.kept_bytes(),
            "budget_bytes": self._settings.budget_bytes,
            "status_address": self.status_address,
            "counts": self.weights.perform.counts + self.warm.perform.counts + self.pool.perform.counts,
            "clients": [repr(session) for session in (*self.sessions.values(), *self._ended.values())],
            "history": [{"at": at, "what": what} for at, what in list(self.history)[-50:]],
        }
