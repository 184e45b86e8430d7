"""The vault's side of the keeper: records put, dropped and listed, each acknowledged; and a new keeper when it dies.

Always true: what was acknowledged to a client is in a keeper (`put` calls back only then); after a keeper's death
everything is put again into the next one before any new call is acknowledged, and last of all the mark that this is
everything: a vault that finds records without the mark knows that some are missing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from holdfast.memory.fdsocket import FdConnection, Frame, close_all
from holdfast.memory.protocol import READ_ERRORS, Drop, End, Kept, ListAll, Put, encode, from_keeper
from holdfast.memory.vault.keeper import Record, parts
from holdfast.memory.vault.members import KEEPER, announce

log = logging.getLogger("holdfast.vault")

Then = Callable[[], None]
# The key of the mark that a keeper has all there is.
WHOLE = "whole"
# A keeper that dies again at once is started more and more slowly; after a quiet minute the count is forgotten.
RESTART_S = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
QUIET_S = 60.0


@dataclass(frozen=True, slots=True)
class VaultFds:
    """What a vault is started with."""

    listener: int
    link: int
    lifeline: int


class KeptRecords:
    """All records this vault has, here and in the keeper."""

    def __init__(self, fds: VaultFds, vault_command: list[str]) -> None:
        self._fds = fds
        self._vault_command = vault_command
        self._loop = asyncio.get_running_loop()
        self._calls = itertools.count(1)
        self._waiting: dict[int, Then] = {}
        self._listed: asyncio.Future[None] | None = None
        self._partial: dict[str, Record] = {}
        self.records: dict[str, Record] = {}
        self.whole = False  # whether the keeper had everything when this vault began
        self._marked = False
        self.ending = False
        self._keeper_deaths = 0
        self._keeper_born_s = self._loop.time()
        self._link = FdConnection(socket.socket(fileno=fds.link), self._take, self._keeper_lost)

    async def load(self) -> None:
        """Ask the keeper for everything; a fresh one has nothing."""
        self._listed = self._loop.create_future()
        self._link.send(encode(ListAll(0)))
        await self._listed
        self.whole = self.records.pop(WHOLE, None) is not None

    def mark_whole(self) -> None:
        """From now on the keeper is known to have all there is."""
        self._marked = True
        self._send(WHOLE, Record(), nothing)

    def put(self, key: str, blob: bytes, fds: list[int], then: Then) -> None:
        """Keep a record (the descriptors are this object's from now on) and call `then` once the keeper has it."""
        old = self.records.get(key)
        self.records[key] = Record(blob, fds)
        if old is not None:
            close_all([fd for fd in old.fds if fd not in fds])
        self._send(key, self.records[key], then)

    def drop(self, key: str, then: Then | None = None) -> None:
        """Let go of a record, and call `then` once the keeper has let go of it too."""
        record = self.records.pop(key, None)
        if record is None:
            return
        record.close()
        call = next(self._calls)
        if then is not None:
            self._waiting[call] = then
        self._link.send(encode(Drop(call, key)))

    def _send(self, key: str, record: Record, then: Then) -> None:
        call, link = next(self._calls), self._link
        self._waiting[call] = then
        # A link that breaks meanwhile takes nothing more, and the next keeper has been given all of it.
        for message, fds in parts(call, key, record.blob, record.fds):
            link.send(encode(message), fds)

    def _take(self, frame: Frame) -> None:
        try:
            message = from_keeper.decode(frame.body)
        except READ_ERRORS:
            frame.close_fds()
            return
        if isinstance(message, Put):
            self._take_listed(message, frame.fds)
        elif isinstance(message, Kept):
            if message.call == 0 and self._listed is not None and not self._listed.done():
                self._listed.set_result(None)
            then = self._waiting.pop(message.call, None)
            if then is not None:
                then()

    def _take_listed(self, message: Put, fds: list[int]) -> None:
        partial = self._partial.setdefault(message.key, Record())
        partial.blob += message.blob
        partial.fds += fds
        if not message.more:
            self.records[message.key] = self._partial.pop(message.key)

    # -- the keeper's death

    def _keeper_lost(self, why: str) -> None:
        if self.ending:
            return
        if self._listed is not None and not self._listed.done():
            self._listed.set_result(None)  # it died before it had told all: what came is what there is
        log.warning("the keeper is gone (%s): starting another", why)
        if self._loop.time() - self._keeper_born_s > QUIET_S:
            self._keeper_deaths = 0
        self._start_keeper_later()

    def _start_keeper_later(self) -> None:
        pause_s = RESTART_S[min(self._keeper_deaths, len(RESTART_S) - 1)]
        self._keeper_deaths += 1
        if pause_s:
            self._loop.call_later(pause_s, self._start_keeper)
        else:
            self._start_keeper()

    def _start_keeper(self) -> None:
        if self.ending:
            return
        try:
            mine = self._spawn_keeper()
        except OSError as error:  # no processes, memory or descriptors left: nothing is acknowledged until there are
            log.error("cannot start a keeper: %s", error)
            self._start_keeper_later()
            return
        self._keeper_born_s = self._loop.time()
        self._link = FdConnection(mine, self._take, self._keeper_lost)
        waiting, self._waiting = list(self._waiting.values()), {}
        self._put_everything_again(waiting)

    def _spawn_keeper(self) -> socket.socket:
        """The vault's end of the link to a new one."""
        own = os.pidfd_open(os.getpid())
        try:
            mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with its:
                fds = (self._fds.listener, self._fds.lifeline, its.fileno(), own)
                module = "holdfast.memory.vault.keeper"
                command = [sys.executable, "-m", module, *map(str, fds), "--", *self._vault_command]
                try:
                    actions = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds]
                    pid = os.posix_spawn(command[0], command, os.environ, file_actions=actions)
                except OSError:
                    mine.close()
                    raise
        finally:
            os.close(own)
        announce(self._fds.lifeline, KEEPER, pid)
        return mine

    def _put_everything_again(self, waiting: list[Then]) -> None:
        """The new keeper gets all; those who waited for the old one's word get the new one's, after everything."""
        for key, record in self.records.items():
            self._send(key, record, nothing)
        if self._marked:
            self.mark_whole()
        call = next(self._calls)
        self._waiting[call] = partial(_call_all, waiting)
        self._link.send(encode(Drop(call, "")))  # nothing has this key: it is acknowledged after all before it

    def close(self) -> None:
        """A clean end: the keeper is not to start another vault."""
        self.ending = True
        self._link.send(encode(End()))
        self._link.close()


def nothing() -> None:
    """Nobody waits for it."""


def _call_all(waiting: list[Then]) -> None:
    for then in waiting:
        then()


def ignore_children() -> None:
    """Keepers a vault has started are reaped by the kernel; nobody waits for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
