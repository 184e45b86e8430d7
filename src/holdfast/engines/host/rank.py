"""One rank of an engine besides its leader, with its own vault and device and its share of every block.

It decides nothing. It has three sockets: orders go to its event loop, steps to a thread (`ranks.frames`), and the third
carries the survey of its pool.

Always true: it computes on private blocks only between `hold` and `go_on`, on pool blocks only between `wake` and
`become_standby`. Its index has the leader's changes before any client sees tokens that depend on them. Any failure
ends the process, and with it the engine.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import abstractmethod
from pathlib import Path

from holdfast.engines.host.memory import VaultMemory
from holdfast.engines.ranks.follower import LeaderLink, RankLaunch, RankOrders, end
from holdfast.engines.ranks.frames import RankAgreement, receive_step, repeat_changes, send
from holdfast.spec.engines import FailoverSettings

DONE = b"."  # the answer to a step that computed nothing


class VaultRank(RankOrders):
    """A rank with its own vault, at `failover`. It obeys every rank's orders, and those for its own memory. An engine's
    subclass defines `prepare_steps`, `compute` and `drain_device`, all called in the step thread."""

    def __init__(
        self, launch: RankLaunch, link: LeaderLink, rank: int, failover: FailoverSettings, private_bytes: int = 0
    ) -> None:
        self.rank, self.failover = rank, failover
        self._steps = socket.socket(fileno=launch.steps)
        # Ranks write their devices in parallel: each waits only for writers of its own device.
        lock_dir = Path(failover.vault_socket).parent / f"rank-{rank}"
        lock_dir.mkdir(exist_ok=True)
        self.memory = VaultMemory(failover, private_bytes, _RankHolder(link), lock_dir)
        table = socket.socket(fileno=launch.table)
        table.setblocking(False)
        self.memory.join(RankAgreement(rank, table, failover.wake_s))
        self._link = link

    async def hello(self) -> None:
        """Answer the leader: all imports are done."""

    async def sleep(self) -> None:
        await self.memory.unmap()

    async def unmap(self) -> None:
        await self.memory.unmap()

    async def remap(self) -> None:
        await self.memory.remap()

    async def hold(self) -> None:
        await self.memory.weights_ready.wait()
        await self.memory.still.acquire()

    async def go_on(self) -> None:
        self.memory.still.release()

    async def wake(self, epoch: int) -> None:
        await self.memory.own(epoch)

    async def fence(self) -> None:
        await self.memory.gpu_fence.wait()
        if self.memory.owned is not None:
            self.memory.owned.pool.gpu_fence_passed()

    async def become_standby(self) -> None:
        await self.memory.become_standby()

    async def verify(self) -> str:
        return await self.memory.verify()

    async def renew(self) -> None:
        await self.memory.renew()

    # -- steps

    def begin_steps(self) -> None:
        # A daemon: an all-reduce that waits for a dead rank must not keep the process from ending.
        threading.Thread(target=self._make_steps, name="steps", daemon=True).start()

    @abstractmethod
    def prepare_steps(self) -> None: ...

    @abstractmethod
    def compute(self, work: bytes, *, answered: bool) -> bytes:
        """Compute one step; return the answer, if the leader waits for one (`answered`)."""

    @abstractmethod
    def drain_device(self) -> None:
        """Return when the device has nothing left to do."""

    def _make_steps(self) -> None:
        try:
            self.prepare_steps()
            while (step := receive_step(self._steps)) is not None:
                if step.changes:
                    owned = self.memory.owned
                    assert owned is not None, "only an owner's index changes"
                    repeat_changes(step.changes, owned.pool.index, owned.pool.epoch)
                answer = self.compute(step.work, answered=step.answered) if step.work else b""
                if step.drained:
                    self.drain_device()
                if step.answered:
                    send((self._steps,), answer or DONE)
        except Exception as error:  # the thread's root: no later step could be trusted
            why = f"a step failed: {type(error).__name__}: {error}"
            with contextlib.suppress(OSError):  # the leader is gone too
                self._link.note("end", why)
            end(why)


class _RankHolder:
    """Sends the reports of a rank's memory to the leader, or ends the process."""

    books: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    def __init__(self, link: LeaderLink) -> None:
        self._note = link.note

    def fatal(self, why: str) -> None:
        end(why)

    def memory(self, why: str) -> None:
        self._note("memory", why)

    def loading(self, why: str) -> None:
        self._note("loading", why)

    def owner_gone(self, epoch: int) -> None:
        """Do nothing: the leader's own vault reports it."""

    def room(self) -> None:
        """Do nothing: no request waits here."""
