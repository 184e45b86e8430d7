"""The vault: accepts connections, watches client processes and timers, and passes calls to the tags `weights` and
`kv_cache`.

Always true:
- Only allowed uids are served.
- A client that breaks the protocol loses only its connection.
- When a client ends, the machines of both tags get the event at once.
- A restarted vault starts from the keeper's records.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from random import SystemRandom
from typing import Any

import msgspec

from holdfast.core.limits import descriptor_limit
from holdfast.core.ports import Clock
from holdfast.core.procfs import is_over
from holdfast.memory import protocol
from holdfast.memory.devices.fds import FdKind, fd_kind
from holdfast.memory.fdsocket import FDS_PER_FRAME_MAX, FRAME_BYTES_MAX, FdConnection, Frame, copy_all
from holdfast.memory.protocol import VERSION, VERSIONS, Hello, Welcome
from holdfast.memory.vault import pool_machine, weights_machine
from holdfast.memory.vault.pool import VaultPool
from holdfast.memory.vault.pool_machine import Mapper
from holdfast.memory.vault.records import VaultRecords
from holdfast.memory.vault.sessions import PREFIX, ClientRecord, Processes, Session, decode_client
from holdfast.memory.vault.settings import ENDED, LIVE, WARM, VaultSettings
from holdfast.memory.vault.tags import Budget, Shared
from holdfast.memory.vault.warm import VaultWarm
from holdfast.memory.vault.weights import VaultWeights
from holdfast.memory.vault.weights_machine import NEVER_S, GenerationHolder

log = logging.getLogger("holdfast.vault")

# A client sends its hello as soon as it connects; the limit allows for a busy machine.
HELLO_S = 10.0
# A client may send only its hello, with its pidfd, before it is admitted. Bounds the cost of unknown clients.
HELLO_BYTES_MAX = 4096
HELLO_FDS_MAX = 2  # one too many gets an error reply; with more, the kernel truncates the message
# Length of the name a client gives itself; it is recorded and logged.
NAME_CHARS_MAX = 200
HISTORY_MAX = 1000
SESSIONS_MAX = 4096
# Connections that have not said hello; if all engines of a machine start at once, these are some dozens.
UNGREETED_MAX = 256
# Errors when descriptors run out: a client must leave before another can connect.
ACCEPT_PAUSE_S = 0.1
# Reserved for connected clients: slabs, a pool, starting a keeper. New connections are refused below this.
FDS_RESERVED = 64


class AcceptedConnection:
    """A connection to the vault; it gets a session once the client has said hello. The caller sets `connection` right
    after construction. If the hello is late or wrong, the vault sends the reason and closes the connection."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._session: Session | None = None
        self.connection: FdConnection | None = None
        self._hello_due = asyncio.get_running_loop().call_later(HELLO_S, self.refuse, "silent", "no hello came")

    def on_frame(self, frame: Frame) -> None:
        try:
            message = protocol.from_client.decode(frame.body)
        except protocol.READ_ERRORS as error:
            frame.close_fds()
            self.refuse("bad_request", f"cannot read message: {error}")
            return
        if self._session is None:
            self._greet(message, frame)
            return
        try:
            self._vault.on_call(self._session, message, frame)
        except OSError as error:  # no descriptors left for its record: an unrecorded client is refused
            assert self.connection is not None
            self.connection.close(f"cannot be served: {error}")

    def _greet(self, message: object, frame: Frame) -> None:
        assert self.connection is not None
        why = None
        if not isinstance(message, Hello):
            why = "the first message must be a Hello"
        elif VERSIONS.agree(message) is None:
            why = VERSIONS.refusal(message, "this vault")
        elif not 0 < len(message.client) <= NAME_CHARS_MAX:
            why = f"a client's name has 1 to {NAME_CHARS_MAX} characters"
        elif len(frame.fds) != 1 or fd_kind(frame.fds[0]) is not FdKind.PIDFD:
            why = "a Hello comes with exactly one descriptor, the client's pidfd"
        if why is not None:
            frame.close_fds()
            self.refuse("bad_request", why)
            return
        assert isinstance(message, Hello)
        self._hello_due.cancel()
        self._vault.ungreeted.discard(self)
        self.connection.allow(FRAME_BYTES_MAX, FDS_PER_FRAME_MAX)
        self._session = self._vault.greet(message, frame.fds[0], self.connection)
        if not self.connection.open:  # the client left while it was admitted
            self._vault.session_lost(self._session, "connection lost")

    def refuse(self, code: str, reason: str) -> None:
        assert self.connection is not None
        self.connection.send(protocol.encode(protocol.Failed(0, code, reason)))
        self.connection.close(f"refused: {reason}")

    def lost(self, why: str) -> None:
        self._hello_due.cancel()
        self._vault.ungreeted.discard(self)
        if self._session is not None:
            self._vault.session_lost(self._session, why)


class Vault:
    """One device's vault. `facts` returns its status."""

    def __init__(self, settings: VaultSettings, records: VaultRecords, listener: socket.socket, clock: Clock) -> None:
        self._settings = settings
        self._records = records
        self._listener = listener
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._processes = Processes(self._process_over)
        self.ungreeted: set[AcceptedConnection] = set()
        self.id = SystemRandom().randbytes(8).hex()
        self.status_address = ""  # the address that the status page is bound to
        self.sessions: dict[int, Session] = {}
        self._ended: dict[int, Session] = {}  # connection closed, process alive, epoch not quiesced
        self.history: deque[tuple[float, str]] = deque(maxlen=HISTORY_MAX)
        budget = Budget(settings.budget_bytes, self.used_bytes, settings.host_budget_bytes)
        shared = Shared(
            settings.device, budget, records, self.sessions, self._loop.time, clock, self._note, settings.mark
        )
        self.weights, self.pool = VaultWeights(shared), VaultPool(shared)
        self.warm = VaultWarm(shared, self.weights, self.pool)
        # Handlers of the calls that a client may make after its hello.
        self._handlers: dict[type, Callable[[Session, Any], None]] = {
            protocol.AskWeights: self.weights.ask,
            protocol.CommitWeights: self.weights.commit,
            protocol.ReleaseWeights: self.weights.release,
            protocol.FetchSlabs: self.weights.fetch,
            protocol.Demote: self.warm.demote,
            protocol.Promote: self.warm.promote,
            protocol.Mapping: self.pool.join,
            protocol.AcquirePool: self.pool.acquire,
            protocol.FetchPool: self.pool.fetch,
            protocol.Quiesced: self.pool.quiesce,
            protocol.CancelCall: self._cancel,
            protocol.GetStatus: self._tell_status,
        }
        self._slab_handlers: dict[type, Callable[[Session, Any, list[int]], None]] = {
            protocol.AddSlabs: self.weights.add_slabs,
            protocol.Donate: self.weights.donate,
            protocol.AddPoolSlabs: self.pool.add_slabs,
            protocol.DonatePool: self.pool.donate,
        }
        self._uids = {os.getuid(), *settings.allowed_uids}

    # -- life

    def start(self) -> None:
        """Restore the state from the keeper's records, then accept connections."""
        settings = self._settings
        lost = settings.marked(LIVE) and not self._records.whole
        readers, mappers = self._expect_clients()
        refill_from_s = self._loop.time() + settings.weights_donation_s if lost else None
        self.weights.adopt(readers, NEVER_S if settings.leased and settings.marked(WARM) else refill_from_s)
        if self.weights.state.refill_from_s != NEVER_S:
            settings.mark(LIVE)
        self.pool.adopt(mappers, lost=lost, donation_s=self._settings.pool_donation_s)
        if lost:  # if this vault dies before, the next one must know of the loss too
            self._loop.call_later(settings.weights_donation_s, self._records.mark_whole)
        else:
            self._records.mark_whole()
        found = f"{len(self._records.by_key)} records{', the rest was lost' if lost else ''}"
        self._note(f"vault {self.id} serves {self._settings.device}: {found}")
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._tick()

    def _expect_clients(self) -> tuple[list[GenerationHolder], list[Mapper]]:
        """Restore the sessions of the previous vault's clients whose processes still run; end the others."""
        readers, mappers = list[GenerationHolder](), list[Mapper]()
        for key, record in list(self._records.by_key.items()):
            if not key.startswith(PREFIX):
                continue
            living = [fd for fd in record.fds if not is_over(fd)]
            if not living:
                self._records.drop(key)
                continue
            session = self._known_before(decode_client(record.blob), living)
            if session.generation is not None:
                readers.append(GenerationHolder(session.number, session.generation))
            if session.maps:
                mappers += [Mapper(session.number, p, session.epoch, closed=session.closed) for p in session.processes]
        self._numbers = itertools.count(max([*self.sessions, *self._ended], default=0) + 1)
        return readers, mappers

    def _known_before(self, record: ClientRecord, pidfds: list[int]) -> Session:
        hello = Hello(VERSION, record.client, record.engine_id, record.pid)
        processes = self._processes.join(record.number, copy_all(pidfds))
        session = Session(record.number, hello, processes, self._processes, self._records)
        session.generation, session.maps, session.epoch = record.generation, record.maps, record.epoch
        session.closed = record.closed
        (self._ended if record.closed else self.sessions)[record.number] = session
        return session

    def end(self, *, meant: bool) -> None:
        """End this vault. `meant`: the shutdown is intended, and the next vault starts empty. Otherwise the lifeline's
        holder is gone, perhaps killed, and the next vault takes back what engines still map. (An engine that releases
        everything removes the marker itself.)"""
        if meant:
            self._settings.mark(ENDED)
        self.warm.end()
        self._loop.remove_reader(self._listener.fileno())
        self._records.close()
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
        accepted = AcceptedConnection(self)
        accepted.connection = FdConnection(sock, accepted.on_frame, accepted.lost)
        accepted.connection.allow(HELLO_BYTES_MAX, HELLO_FDS_MAX)
        self.ungreeted.add(accepted)
        uid = accepted.connection.peer_uid()
        if uid not in self._uids:
            accepted.refuse("forbidden", f"uid {uid} may not use this vault")
        elif len(self.sessions) >= SESSIONS_MAX or len(self.ungreeted) > UNGREETED_MAX:
            accepted.refuse("too_many", f"{len(self.sessions)} clients are here already")
        elif sock.fileno() >= descriptor_limit() - FDS_RESERVED:  # the kernel assigns the lowest free number
            kept = f"{FDS_RESERVED} of its {descriptor_limit()} descriptors are kept for connected clients"
            accepted.refuse("too_many", f"the vault has no room for another client: {kept}; raise its `ulimit -n`")

    def greet(self, hello: Hello, pidfd: int, connection: FdConnection) -> Session:
        """Admit a client that said hello. One from before the vault's restart gets its session back."""
        before = next((s for s in self.sessions.values() if s.client == hello.client and s.connection is None), None)
        if before is not None and not self._processes.has(before.processes, pidfd):
            before = None  # another process with the same client name
        if before is not None and hello.resume is not None:
            os.close(pidfd)
            self._come_back(before, hello, connection)
            return before
        if before is not None:
            self._end_session(before)  # it does not resume: nothing of its old session is mapped
        number = next(self._numbers)
        processes = self._processes.join(number, [pidfd, *connection.peer_pidfd()])
        session = self.sessions[number] = Session(number, hello, processes, self._processes, self._records)
        session.connection = connection
        session.reply(self._welcome(hello, resumed=False))
        if hello.resume is not None:
            self.pool.disown(session, hello.resume.epoch)
        return session

    def _welcome(self, hello: Hello, *, resumed: bool) -> Welcome:
        version, features = VERSIONS.agree(hello) or VERSION, VERSIONS.common_features(hello)
        return Welcome(version, self._settings.device, self.id, resumed, self.pool.state.last_epoch, features)

    def _come_back(self, session: Session, hello: Hello, connection: FdConnection) -> None:
        assert hello.resume is not None
        layout = self.weights.layouts.get(session.generation or 0)
        resumed = hello.resume.layout_hash == (layout.hash() if layout is not None else None)
        if not resumed:
            self.weights.release_lock(session)
        session.connection = connection
        session.reply(self._welcome(hello, resumed=resumed))
        self.pool.come_back(session, hello.resume.epoch)
        self._rearm()

    def session_lost(self, session: Session, why: str) -> None:
        """Handle the end of a connection. A session under an epoch ends with it only if its process has ended or has
        sent `Leave`; the CPU fence relies on that. If the process still runs, the session stays a mapper and is
        expected to reconnect."""
        connection = session.connection
        if connection is None:
            return
        if session.engine_id >= 0:  # other clients only asked for the status
            self._note(f"{session!r}: {why}")
        session.connection = None
        ended = connection.peer_ended and (session.leaving or not self._processes.running(session.processes))
        if ended or session.epoch is None or not self._processes.live(session.processes):
            self._end_session(session)
        else:
            session.drop_unsaid()
            self.pool.cut_off(session)
            if session.generation is None:  # a reader stays one; a waiter or writer loses its lock
                self.weights.gone(session)
            self._rearm()

    def _end_session(self, session: Session) -> None:
        session.drop_unsaid()
        self.sessions.pop(session.number, None)
        self.pool.gone(session)  # first: if it owned the pool, a standby waits for this notice
        self.weights.gone(session)
        session.generation = None
        if self._processes.live(session.processes) and self.pool.is_mapper(session):
            session.closed = True  # its GPU work may still run: a restarted vault must know of it
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
                self._end_session(session)  # it was expected to reconnect, and now cannot
            else:
                session.forget()
        self.pool.step(pool_machine.ProcessOver(process))
        self._forget_fenced()
        self._rearm()

    def _forget_fenced(self) -> None:
        """Forget ended sessions that no longer keep a fence closed."""
        for session in [s for s in self._ended.values() if not self.pool.is_mapper(s)]:
            del self._ended[session.number]
            session.forget()

    # -- calls

    def on_call(self, session: Session, message: object, frame: Frame) -> None:
        """Handle a client's call. Only handlers of slabs get the descriptors, and own them; others are closed."""
        if (take_slabs := self._slab_handlers.get(type(message))) is not None:
            take_slabs(session, message, frame.fds)
        else:
            frame.close_fds()
            if (handle := self._handlers.get(type(message))) is not None:
                handle(session, message)
            elif isinstance(message, protocol.Leave):
                session.leaving = True
            else:
                session.fail(0, "bad_request", "a Hello comes once")
        if isinstance(message, protocol.Quiesced):
            self._forget_fenced()
        self._rearm()

    def _cancel(self, session: Session, message: protocol.CancelCall) -> None:
        """Stop a wait that the client gave up. If it was granted in the meantime, release what was granted."""
        waiting = message.waiting
        if waiting and waiting in (session.weights_call, session.weights_granted):
            self.weights.release_lock(session)
        elif waiting and waiting == session.pool_call:
            self.pool.cancel(session)
        elif waiting and waiting == session.pool_granted:
            self.pool.give_up(session)
        session.reply(protocol.Done(message.call))

    def _tell_status(self, session: Session, message: protocol.GetStatus) -> None:
        session.reply(protocol.Status(message.call, msgspec.json.encode(self.facts())))

    # -- time and facts

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadlines = weights_machine.next_deadline_s(self.weights.state), pool_machine.next_deadline_s(self.pool.state)
        due = [due_s for due_s in deadlines if due_s is not None]
        if due:
            self._timer = self._loop.call_at(min(due), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.weights.step(weights_machine.WeightsTick())
        self.pool.step(pool_machine.PoolTick())
        self._rearm()

    def _note(self, text: str) -> None:
        self.history.append((self._clock.unix_s(), text))
        log.info("%s", text)

    def used_bytes(self) -> int:
        return self.weights.used_bytes() + self.warm.device_bytes + self.pool.used_bytes()

    def facts(self) -> dict[str, Any]:
        return {
            "device": self._settings.device,
            "vault": self.id,
            "pid": os.getpid(),
            "uptime_s": self._loop.time() - self._started_s,
            **(self.weights.facts() | self.warm.facts() | self.pool.facts()),
            "waiting": len(self.weights.state.waiters) + len(self.pool.state.waiters),
            "device_bytes": self.used_bytes(),
            "budget_bytes": self._settings.budget_bytes,
            "status_address": self.status_address,
            "counts": self.weights.perform.counts + self.warm.perform.counts + self.pool.perform.counts,
            "clients": [repr(session) for session in (*self.sessions.values(), *self._ended.values())],
            "history": [{"at": at, "what": what} for at, what in list(self.history)[-50:]],
        }
