"""An engine of the lock tests, from inside: `python lock_agent.py URL WHO TOKEN DIRECTORY`.

It takes one order per line and answers each with one line; orders run side by side. The holder of the lock proves
that it is alone by a marker file that only one can make.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec

from holdfast.failover.lock import FailoverLock
from holdfast.failover.lock_server.client import ServerLock
from holdfast.failover.opening import open_lock
from holdfast.wire.net import real_world

PATIENCE_S = 600.0


def opened(url: str, who: str, token: str) -> FailoverLock:
    """The lock that the URL names. One of a lock server is given up by the server's window, and not after the two
    seconds of a holder in a hurry: a busy machine needs as long to start a server again."""
    lock = open_lock(url, who, real_world(), token)
    if isinstance(lock, ServerLock):
        lock._give_up_s = PATIENCE_S
    return lock


class Agent:
    """One method per order; what it returns is the answer."""

    def __init__(self, url: str, who: str, token: str, directory: Path) -> None:
        self._lock = opened(url, who, token)
        self._marker = directory / "inside"
        self._journal = directory / f"{who}.journal"
        self._lost: asyncio.Event | None = None

    async def acquire(self) -> str:
        self._lost = await self._lock.acquire()
        return "acquired"

    async def enter(self) -> str:
        """Acquire, and find no other inside."""
        await self.acquire()
        try:
            os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return "another is inside"
        return "inside"

    async def leave(self) -> str:
        os.unlink(self._marker)
        await self._lock.release()
        return "left"

    async def release(self) -> str:
        await self._lock.release()
        return "released"

    async def owner(self) -> str:
        return msgspec.json.encode(await self._lock.owner()).decode()

    async def rank(self) -> str:
        """A process of the same engine; it ends when it is killed, or after a minute."""
        fds, nothing = self._lock.pass_fds(), asyncio.subprocess.DEVNULL
        self._rank = await asyncio.create_subprocess_exec("sleep", "60", pass_fds=fds, stdin=nothing, stdout=nothing)
        return str(self._rank.pid)

    async def emit(self) -> str:
        """Emit every millisecond as long as the lock is not lost; a stamp of each emission goes to the journal.

        Straight from a timer: after a freeze it has its turn before the timers that were to come later."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def emit() -> None:
            assert self._lost is not None
            now_s = time.monotonic()
            lost = self._lost.is_set()
            journal.write(f"{'lost' if lost else 'emit'} {now_s}\n")
            if lost:
                done.set()
            else:
                loop.call_later(0.001, emit)

        with self._journal.open("w", buffering=1) as journal:
            emit()
            await done.wait()
        return "lost"


async def main() -> None:
    agent = Agent(*sys.argv[1:4], Path(sys.argv[4]))
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def carry_out(name: str) -> None:
        print(await getattr(agent, name)(), flush=True)

    print("ready", flush=True)
    async with asyncio.TaskGroup() as orders:
        while line := await reader.readline():
            orders.create_task(carry_out(line.decode().strip()))
        sys.exit()


if __name__ == "__main__":
    asyncio.run(main())
