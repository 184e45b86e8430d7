"""Starts the further processes (ranks) of an engine and sends them orders and steps; the engine ends when one of them
ends.

The leader is the engine's own process and rank 0; it alone decides. Ranks with their own vaults wake together with it,
since all must agree on the blocks they found. Ranks at the leader's vault join its epoch after the vault granted it.

Always true:
- An order is complete when every rank has answered it.
- The end of a rank is reported once; waits for its answers raise ConnectionError.
- `stop` leaves no process behind.
- Blocks that a step published are published on every rank before its tokens are shown.
- Without further ranks all calls return at once and do nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from holdfast.engines.ranks.follower import ORDER_BYTES_MAX, RankLaunch, Tether
from holdfast.engines.ranks.frames import (
    ANSWER_S,
    IndexChange,
    LeaderAgreement,
    RankStep,
    RecordedIndex,
    receive,
    send_step,
)
from holdfast.engines.ranks.shared_vault import SharedVaultLaunch
from holdfast.kv.pool import Pool
from holdfast.spec.engines import FailoverSettings

END_S = 5.0  # a rank ends within milliseconds of EOF; after this time it is killed
HOLD_S = 60.0  # for weights that are being mapped again; after this time the canary counts as failed


class RankEvents(Protocol):
    def fatal(self, why: str) -> None: ...

    def memory(self, why: str, rank: int) -> None: ...

    def loading(self, why: str) -> None: ...


@dataclass(slots=True, eq=False)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    gone: bool = False
    why: str = ""  # its reason, if it announced its end


@dataclass(slots=True)
class RankProcesses:
    """The processes of ranks 1, 2, … of this process's engine."""

    failover: FailoverSettings
    events: RankEvents
    share_vault: bool = False  # they use the leader's vault
    dies_with_parent: bool = True
    # A canary needs every rank's mappings unchanged, a wake may change them: never both.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _children: list[_Child] = field(default_factory=list)
    _numbers: int = 0

    @property
    def count(self) -> int:
        return len(self._children)

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    # -- started and ended

    def start_at_own_vault(self, count: int) -> None:
        self.share_vault = True
        failover = self.failover
        at = failover.vault_socket, failover.device, failover.engine_id, failover.vault_uids
        for _ in range(count):
            self.spawn(
                "holdfast.engines.ranks.shared_vault",
                lambda tether: msgspec.json.encode(SharedVaultLaunch(*at, tether)),
            )

    def start_with_vault(self, module: str, work: bytes) -> tuple[socket.socket, socket.socket]:
        """Start the next rank, with its own vault, which reads `work`. Return our ends of the sockets for its steps and
        for the agreement."""
        ours, theirs = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)), strict=True)
        memory = os.memfd_create("rank")
        try:
            with os.fdopen(os.dup(memory), "wb") as file:
                file.write(work)
            fds = theirs[0].fileno(), theirs[1].fileno(), memory
            self.spawn(module, lambda tether: msgspec.json.encode(RankLaunch(tether, *fds)), fds)
        finally:
            theirs[0].close()
            theirs[1].close()
            os.close(memory)
        steps, table = ours
        steps.settimeout(ANSWER_S)
        table.setblocking(False)
        return steps, table

    def spawn(self, module: str, launch: Callable[[Tether], bytes], pass_fds: tuple[int, ...] = ()) -> None:
        """Start the next rank: `python -m module LAUNCH`. Call it in the main thread: the rank gets its death signal
        when the thread that started it ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            tether = Tether(theirs.fileno(), os.getpid(), self.dies_with_parent)
            process = subprocess.Popen(
                [sys.executable, "-m", module, launch(tether).decode()],
                pass_fds=(tether.control, *pass_fds),
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        ours.setblocking(False)
        child = _Child(len(self._children) + 1, process, ours)
        self._children.append(child)
        asyncio.get_running_loop().add_reader(ours, self._on_readable, child)

    def stop(self) -> None:
        """End all ranks: EOF on the socket pair, then SIGKILL."""
        for child in self._children:
            child.gone = True
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(child.control)
            child.control.close()
        for child in self._children:
            try:
                child.process.wait(END_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self._children.clear()

    # -- orders

    async def order(self, do: str, timeout_s: float | None, fds: tuple[int, ...] = (), **fields: Any) -> list[Any]:
        """Send an order to every rank; return their answers, by rank. Without `timeout_s`, wait without a bound."""
        self._numbers += 1
        number, loop = self._numbers, asyncio.get_running_loop()
        text = json.dumps([number, do, fields]).encode()
        assert len(text) <= ORDER_BYTES_MAX, f"the order {do} is too long"
        try:
            async with asyncio.timeout(timeout_s):
                for child in self._children:
                    if child.gone:
                        raise ConnectionError(f"rank process {child.process.pid} is gone")
                    child.answers[number] = loop.create_future()
                    socket.send_fds(child.control, [text], fds)
                return [await child.answers[number] for child in self._children]
        finally:
            for child in self._children:
                child.answers.pop(number, None)

    async def load(self) -> None:
        await self.order("load", self.failover.load_s)

    async def wake(self, epoch: int, fds: tuple[int, ...]) -> None:
        """Have every rank join an epoch. Ranks at the leader's vault answer at once. The others first agree with the
        leader on their blocks; the caller sets the time limit."""
        await self.order("wake", self.failover.wake_s if self.share_vault else None, fds, epoch=epoch)

    async def fenced(self) -> None:
        # Unbounded, like the leader's own wait: a process stuck in the kernel keeps its GPU work, and so the fence.
        await self.order("fence", None)

    async def verify(self) -> list[str]:
        """Return what is wrong with each rank's weights ("": nothing); an empty list if they share the leader's."""
        return [] if self.share_vault else await self.order("verify", self.failover.load_s)

    async def renew(self) -> None:
        if not self.share_vault:
            await self.order("renew", self.failover.load_s)

    # -- what they report

    def _on_readable(self, child: _Child) -> None:
        try:
            text = child.control.recv(ORDER_BYTES_MAX)
        except ConnectionError:
            text = b""
        if not text:
            self._on_end(child)
            return
        match json.loads(text):
            case [0, "loading", why]:
                self.events.loading(f"rank {child.rank}: {why}")
            case [0, "end", why]:
                child.why = why
            case [0, "memory", why]:
                self.events.memory(why, child.rank)
            case [number, answer]:
                if number in child.answers and not child.answers[number].done():
                    child.answers[number].set_result(answer)

    def _on_end(self, child: _Child) -> None:
        asyncio.get_running_loop().remove_reader(child.control)
        if child.gone:
            return
        child.gone = True
        why = f"rank process {child.process.pid} is gone" + (f": {child.why}" if child.why else "")
        for answer in child.answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError(why))
                answer.exception()  # the waiting task may have been cancelled
        self.events.fatal(why)


class StepLeader:
    """Sends steps to ranks with their own vaults, and keeps their indexes equal to the leader's. All methods but
    `start` and `stop` are called in the threads that compute, one at a time."""

    def __init__(self, failover: FailoverSettings, start_s: float) -> None:
        self.count = 1 + len(failover.more_vaults)
        self.steps: list[socket.socket] = []
        self._failover, self._start_s = failover, start_s
        self._tables: list[socket.socket] = []
        self._index: RecordedIndex | None = None  # while it owns a pool

    def agreement(self, ranks: RankProcesses) -> LeaderAgreement:
        return LeaderAgreement(self._tables, self._failover.wake_s, ranks.fenced)

    async def start(self, ranks: RankProcesses, module: str, work: Callable[[int], bytes]) -> None:
        """Start every rank, and return when all have done their imports. `work(rank)`: what that rank holds."""
        for rank in range(1, self.count):
            steps, table = ranks.start_with_vault(module, work(rank))
            self.steps.append(steps)
            self._tables.append(table)
        await ranks.order("hello", self._start_s)

    def stop(self) -> None:
        for each in (*self.steps, *self._tables):
            each.close()
        self.steps.clear()
        self._tables.clear()

    # -- in the threads that compute

    def record(self, pool: Pool) -> None:
        """Have the ranks repeat all later changes of this pool's index."""
        if self.count > 1:
            pool.index = self._index = RecordedIndex(pool.index)

    def end_record(self) -> None:
        self._index = None

    @property
    def has_published(self) -> bool:
        """Return True if blocks were published that the ranks do not know of."""
        return self._index is not None and self._index.published

    def send(self, work: bytes, *, answered: bool = False, with_changes: bool = True) -> None:
        """Send a step to every rank, and do not wait for it."""
        send_step(self.steps, RankStep(self._changes() if with_changes else [], work, answered))

    def sync(self, *, drained: bool) -> None:
        """Return when every rank has repeated all index changes and, if `drained`, its device has finished."""
        if self.steps:
            send_step(self.steps, RankStep(self._changes(), drained=drained))
            self.answers()

    def answers(self) -> list[bytes]:
        """Return each rank's answer to the last step; raise ConnectionError if a rank is gone."""
        found = []
        for steps in self.steps:
            if not (answer := receive(steps)):
                raise ConnectionError("a rank is gone")
            found.append(answer)
        return found

    def _changes(self) -> list[IndexChange]:
        return self._index.take_changes() if self._index is not None else []
