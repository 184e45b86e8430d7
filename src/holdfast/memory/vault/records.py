"""The vault's side of the keeper: puts, drops and lists records, and starts a new keeper when the old one dies.

Always true:
- What the vault has acknowledged to a client is in a keeper: `put` calls back only then.
- After a keeper's death the vault sends all records to the next keeper before any new call is acknowledged. The last
  one is a mark. A vault that finds records without the mark knows that some are missing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.core.backoff import RestartBackoff
from holdfast.memory.fdsocket import FdConnection, Frame, close_all
from holdfast.memory.protocol import READ_ERRORS, Drop, End, ListAll, Put, encode, from_keeper
from holdfast.memory.vault.keeper import (
    KEEPER,
    RESTART_S_FIRST,
    RESTART_S_MAX,
    KeeperRecord,
    PartialRecords,
    announce,
    parts,
    spawn,
)

log = logging.getLogger("holdfast.vault")

Then = Callable[[], None]
# The key of the mark that the keeper has all records.
WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class VaultFds:
    """The descriptors that a vault is started with."""

    listener: int
    link: int
    lifeline: int


class VaultRecords:
    """All records of this vault, in memory and in the keeper."""

    def __init__(self, fds: VaultFds, vault_command: list[str]) -> None:
        self._fds = fds
        self._vault_command = vault_command
        self._loop = asyncio.get_running_loop()
        self._calls = itertools.count(1)
        self._waiting: dict[int, Then] = {}
        self._listed: asyncio.Future[None] = self._loop.create_future()
        self._partial = PartialRecords()
        self.by_key: dict[str, KeeperRecord] = {}
        self.whole = False  # whether the keeper had everything when this vault began
        self._marked = False
        self._ending = False
        self._restarts = RestartBackoff(RESTART_S_FIRST, RESTART_S_MAX)
        self._link = FdConnection(socket.socket(fileno=fds.link), self._on_frame, self._keeper_lost)

    async def load(self) -> None:
        """Load all records from the keeper; a new keeper has none."""
        self._link.send(encode(ListAll(0)))
        await self._listed
        self.whole = self.by_key.pop(WHOLE, None) is not None

    def mark_whole(self) -> None:
        """Mark the keeper's records as complete."""
        self._marked = True
        self._send(WHOLE, KeeperRecord())

    def put(self, key: str, blob: bytes, fds: list[int], then: Then | None = None) -> None:
        """Store a record, take ownership of its descriptors, and call `then` once the keeper has it."""
        old = self.by_key.get(key)
        self.by_key[key] = KeeperRecord(blob, fds)
        if old is not None:
            close_all([fd for fd in old.fds if fd not in fds])
        self._send(key, self.by_key[key], then)

    def drop(self, key: str, then: Then | None = None) -> None:
        """Remove a record, and call `then` once the keeper has removed it too."""
        record = self.by_key.pop(key, None)
        if record is not None:
            record.close()
            self._link.send(encode(Drop(self._next_call(then), key)))

    def _next_call(self, then: Then | None) -> int:
        call = next(self._calls)
        if then is not None:
            self._waiting[call] = then
        return call

    def _send(self, key: str, record: KeeperRecord, then: Then | None = None) -> None:
        call, link = self._next_call(then), self._link
        # If the link breaks here, it sends nothing more; the next keeper has been sent the whole record.
        for message, fds in parts(call, key, record):
            link.send(encode(message), fds)

    def _on_frame(self, frame: Frame) -> None:
        try:
            message = from_keeper.decode(frame.body)
        except READ_ERRORS:
            frame.close_fds()
            return
        if isinstance(message, Put):
            if (record := self._partial.add(message, frame.fds)) is not None:
                self.by_key[message.key] = record
            return
        if message.call == 0 and not self._listed.done():
            self._listed.set_result(None)
        if (then := self._waiting.pop(message.call, None)) is not None:
            then()

    # -- the keeper's death

    def _keeper_lost(self, why: str) -> None:
        if self._ending:
            return
        if not self._listed.done():
            self._listed.set_result(None)  # it died before the list was complete: use what was received
        log.warning("the keeper is gone (%s): starting another", why)
        self._start_keeper_later()

    def _start_keeper_later(self) -> None:
        wait_s = self._restarts.next_s(self._loop.time())
        if wait_s:
            self._loop.call_later(wait_s, self._start_keeper)
        else:
            self._start_keeper()

    def _start_keeper(self) -> None:
        if self._ending:
            return
        try:
            mine = self._spawn_keeper()
        except OSError as error:  # no processes, memory or descriptors left: acknowledge nothing until a keeper starts
            log.error("cannot start a keeper: %s", error)
            self._start_keeper_later()
            return
        self._link = FdConnection(mine, self._on_frame, self._keeper_lost)
        self._put_everything_again()

    def _spawn_keeper(self) -> socket.socket:
        """Start a keeper; return the vault's end of the link to it."""
        own = os.pidfd_open(os.getpid())
        try:
            mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with its:
                fds = (self._fds.listener, self._fds.lifeline, its.fileno(), own)
                module = "holdfast.memory.vault.keeper"
                try:
                    pid = spawn([sys.executable, "-m", module, *map(str, fds), "--", *self._vault_command], fds)
                except OSError:
                    mine.close()
                    raise
        finally:
            os.close(own)
        announce(self._fds.lifeline, KEEPER, pid)
        return mine

    def _put_everything_again(self) -> None:
        """Send all records to a new keeper. Callers that wait for the old one's acknowledgement get the new one's."""
        waiting, self._waiting = list(self._waiting.values()), {}
        for key, record in self.by_key.items():
            self._send(key, record)
        if self._marked:
            self.mark_whole()

        def call_waiting() -> None:
            for then in waiting:
                then()

        # No record has this key: the acknowledgement only shows that all calls before it are done.
        self._link.send(encode(Drop(self._next_call(call_waiting), "")))

    def close(self) -> None:
        """End the keeper too, so that it does not start another vault."""
        self._ending = True
        self._link.send(encode(End()))
        self._link.close()
