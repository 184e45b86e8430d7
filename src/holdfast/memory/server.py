"""The vault: one process per device that keeps the pages' descriptors, decides who may use them, and maps nothing.

It opens no CUDA context and imports neither torch nor cuda. Always true: only allowed uids are served; a client that
breaks the protocol loses its connection and nothing else; a client's end is an event of both machines at once; what
the keeper has is the truth a restarted vault begins with.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast.memory.fdsocket import FdConnection
from holdfast.memory.guests import Guest
from holdfast.memory.kept import KeptRecords, VaultFds, ignore_children
from holdfast.memory.pool_machine import Seat
from holdfast.memory.protocol import (
    VERSION,
    AcquirePool,
    AddPoolSlabs,
    AddSlabs,
    AskWeights,
    CancelCall,
    CommitWeights,
    Donate,
    Done,
    FetchPool,
    FetchSlabs,
    GetStatus,
    Hello,
    Mapping,
    Quiesced,
    ReleaseWeights,
    Status,
    Welcome,
)
from holdfast.memory.sessions import PREFIX, ClientRecord, Session, decode_client
from holdfast.memory.vault_pool import VaultPool
from holdfast.memory.vault_weights import VaultWeights
from holdfast.memory.weights_state import Reader

log = logging.getLogger("holdfast.vault")

HISTORY_MAX = 1000
SESSIONS_MAX = 4096
# After a loss of vault and keeper together, how long mapped engines have to give their pages back.
DONATION_S = 3.0


class VaultSettings(msgspec.Struct, frozen=True):
    """How one vault runs; travels as JSON on its command line."""

    device: str
    socket_path: str
    budget_bytes: int = 0  # 0: whatever the writers can allocate
    allowed_uids: tuple[int, ...] = ()  # besides the vault's own

    @property
    def marker(self) -> Path:
        """There while a vault of this socket has not ended cleanly: tells a first start from a total loss."""
        return Path(self.socket_path + ".live")


@dataclass(slots=True)
class _Process:
    """A client's process, until it is over."""

    pidfd: int


class Vault:
    """Sessions in front, the two tags behind."""

    def __init__(self, settings: VaultSettings, kept: KeptRecords, listener: socket.socket) -> None:
        self._settings = settings
        self._kept = kept
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._processes: dict[int, _Process] = {}
        self.id = os.urandom(8).hex()
        self.sessions: dict[int, Session] = {}
        self.history: deque[tuple[float, str]] = deque(maxlen=HISTORY_MAX)
        self.weights = VaultWeights(
            settings.device, settings.budget_bytes, kept, self.sessions, self._loop.time, self._note
        )
        self.pool = VaultPool(settings.device, kept, self.sessions, self._loop.time, self._note)
        self._uids = {os.getuid(), *settings.allowed_uids}

    # -- life

    def start(self) -> None:
        """Adopt what the keeper has, then accept."""
        lost_everything = self._settings.marker.exists() and not self._kept.records
        self._settings.marker.touch()
        readers, seats = self._expect_clients()
        refill_from_s = self._loop.time() + DONATION_S if lost_everything else None
        self.weights.adopt(readers, refill_from_s)
        self.pool.adopt(seats)
        self._note(f"vault {self.id} serves {self._settings.device}: {len(self._kept.records)} records")
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._rearm()

    def _expect_clients(self) -> tuple[list[Reader], list[Seat]]:
        """Clients of the vault before this one whose processes live keep their seats; the others are over."""
        readers: list[Reader] = []
        seats: list[Seat] = []
        for key, kept in list(self._kept.records.items()):
            if not key.startswith(PREFIX):
                continue
            record: ClientRecord = decode_client(kept.blob)
            if _is_over(kept.fds[0]):
                self._kept.drop(key)
                continue
            session = Session(
                record.number, Hello(VERSION, record.client, record.engine_id, record.pid), kept.fds[0], self._kept
            )
            session.generation, session.maps, session.epoch = record.generation, record.maps, record.epoch
            self.sessions[record.number] = session
            self._watch_process(record.number, kept.fds[0])
            if record.generation is not None:
                readers.append(Reader(record.number, record.generation))
            if record.maps:
                seats.append(Seat(record.number, record.number, record.epoch))
        self._numbers = itertools.count(max(self.sessions, default=0) + 1)
        return readers, seats

    def end(self) -> None:
        """A clean end: nothing is to come back."""
        self._settings.marker.unlink(missing_ok=True)
        self._loop.remove_reader(self._listener.fileno())
        self._kept.close()
        for session in list(self.sessions.values()):
            if session.connection is not None:
                session.connection.close("the vault has ended")

    # -- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        guest = Guest(self)
        guest.connection = FdConnection(sock, guest.take, guest.lost)
        if guest.connection.peer_uid() not in self._uids:
            guest.refuse("forbidden", f"uid {guest.connection.peer_uid()} may not use this vault")
        elif len(self.sessions) >= SESSIONS_MAX:
            guest.refuse("too_many", f"{SESSIONS_MAX} clients are here already")

    def greet(self, hello: Hello, pidfd: int, connection: FdConnection) -> Session:
        """A client has said who it is; one that was here before the vault's restart gets its seat back."""
        session = next((s for s in self.sessions.values() if s.client == hello.client and s.connection is None), None)
        resumed = False
        if session is not None and hello.resume is not None:
            os.close(pidfd)
            resumed = self._still_true(session, hello)
        else:
            number = next(self._numbers)
            session = self.sessions[number] = Session(number, hello, pidfd, self._kept)
            self._watch_process(number, pidfd)
        session.connection = connection
        session.reply(Welcome(VERSION, self._settings.device, self.id, resumed))
        return session

    def _still_true(self, session: Session, hello: Hello) -> bool:
        assert hello.resume is not None
        layout = self.weights.layouts.get(session.generation or 0)
        same_weights = hello.resume.layout_hash == (layout.hash() if layout is not None else None)
        return same_weights and hello.resume.epoch == session.epoch

    def session_lost(self, session: Session, why: str) -> None:
        """End of file: no thread of that process queues work any more (the CPU fence's evidence)."""
        if session.connection is None:
            return
        session.connection = None
        self._note(f"{session!r}: {why}")
        self._end_session(session)

    def _end_session(self, session: Session) -> None:
        self.weights.gone(session)
        self.pool.gone(session)
        self.sessions.pop(session.number, None)
        if session.number not in self._processes or not session.epoch:
            session.forget()
        else:  # its queued GPU work is not over: a restarted vault must know of it
            session.generation = None
            session.remember()
        self._rearm()

    # -- processes

    def _watch_process(self, number: int, pidfd: int) -> None:
        own = os.dup(pidfd)
        self._processes[number] = _Process(own)
        self._loop.add_reader(own, self._process_over, number)

    def _process_over(self, number: int) -> None:
        process = self._processes.pop(number, None)
        if process is None:
            return
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        session = self.sessions.get(number)
        if session is not None and session.connection is None:
            self._end_session(session)  # it was expected back, and will not come
        self.pool.process_over(number)
        self._kept.drop(f"{PREFIX}{number}")
        self._rearm()

    # -- calls

    def take(self, session: Session, message: object, fds: list[int]) -> None:
        """One call of a client's. Descriptors belong to whoever takes them; the rest are closed by the caller."""
        match message:
            case AskWeights():
                self.weights.ask(session, message)
            case AddSlabs():
                self.weights.add_slabs(session, message, fds)
            case CommitWeights():
                self.weights.commit(session, message)
            case ReleaseWeights():
                self.weights.release(session, message.call)
            case FetchSlabs():
                self.weights.fetch(session, message.call)
            case Donate():
                self.weights.donate(session, message, fds)
            case Mapping():
                self.pool.join(session, message)
            case AcquirePool():
                self.pool.acquire(session, message)
            case AddPoolSlabs():
                self.pool.add_slabs(session, message, fds)
            case FetchPool():
                self.pool.fetch(session, message.call)
            case Quiesced():
                self.pool.quiesce(session, message)
            case CancelCall():
                self._cancel(session, message)
            case GetStatus():
                session.reply(Status(message.call, msgspec.json.encode(self.facts())))
            case _:
                session.fail(0, "bad_request", "a Hello comes once")
        self._rearm()

    def _cancel(self, session: Session, message: CancelCall) -> None:
        if message.waiting and message.waiting == session.weights_call:
            self.weights.release(session, message.call)
        elif message.waiting and message.waiting == session.pool_call:
            self.pool.cancel(session)
            session.reply(Done(message.call))
        else:
            session.reply(Done(message.call))  # its answer has crossed this on the way

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
        self.history.append((time.time(), text))
        log.info("%s", text)

    def facts(self) -> dict[str, Any]:
        """What `holdfast memory status` shows."""
        current = self.weights.state.current
        layout = self.weights.layouts.get(current.number) if current is not None else None
        return {
            "device": self._settings.device,
            "vault": self.id,
            "pid": os.getpid(),
            "weights": self.weights.state.phase,
            "layout_hash": current.layout_hash if current is not None else None,
            "identity": layout.identity if layout is not None else None,
            "tensors": len(layout.tensors) if layout is not None else 0,
            "readers": len(self.weights.state.readers),
            "waiting": len(self.weights.state.waiters) + len(self.pool.state.waiters),
            "weights_bytes": self.weights.kept_bytes(),
            "pool": self.pool.state.phase,
            "pool_bytes": self.pool.kept_bytes(),
            "clients": [repr(session) for session in self.sessions.values()],
            "history": [{"at": at, "what": what} for at, what in list(self.history)[-50:]],
        }


def _is_over(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


async def serve(settings: VaultSettings, fds: VaultFds, command: list[str]) -> None:
    """Run a vault until the lifeline closes or SIGTERM comes."""
    ignore_children()
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    stop: Callable[[], None] = over.set
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_reader(fds.lifeline, stop)
    kept = KeptRecords(fds, command)
    await kept.load()
    vault = Vault(settings, kept, socket.socket(fileno=fds.listener))
    vault.start()
    await over.wait()
    loop.remove_reader(fds.lifeline)
    vault.end()


def main(argv: list[str]) -> int:
    """`python -m holdfast.memory.server JSON LISTENER LINK LIFELINE`"""
    logging.basicConfig(level="INFO", format="%(asctime)s vault %(levelname)s %(message)s", stream=sys.stderr)
    settings = msgspec.json.decode(argv[0], type=VaultSettings)
    fds = VaultFds(*(int(text) for text in argv[1:4]))
    asyncio.run(serve(settings, fds, [sys.executable, "-m", "holdfast.memory.server", argv[0]]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
