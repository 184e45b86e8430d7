"""Decision: a lock elects, the vault admits. Two lock files do not make two leaders (facts 4d, 18)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings

pytestmark = pytest.mark.processes
BOUND_S = 20.0

# An engine that is elected by the file, asks the vault for the pool, and leaves when it hears that the lock is lost.
ENGINE = """
import asyncio, sys
from pathlib import Path
from holdfast.core.clock import SystemClock
from holdfast.failover.file_lock import FileLock
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.client.pool import PoolClient

async def main(number, path, socket):
    lock = FileLock(Path(path), f"engine {number}", SystemClock())
    client = MemoryClient(socket, open_device("host-0"), int(number))
    await client.connect()
    pool = PoolClient(client, open_device("host-0"))
    lost = await lock.acquire()
    print("elected", flush=True)
    leaving = asyncio.create_task(lost.wait())
    loop, orders = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while not lost.is_set():
        order = asyncio.create_task(orders.readline())
        await asyncio.wait([order, leaving], return_when=asyncio.FIRST_COMPLETED)
        if order.done():
            try:
                await pool.acquire(int(order.result()), "geometry", 300)
                print("leads", flush=True)
            except TimeoutError:
                print("refused", flush=True)
    print("lost", flush=True)
    await client.close()

asyncio.run(main(*sys.argv[1:]))
"""


class Engine:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(BOUND_S):
            return (await self.process.stdout.readline()).decode().strip()

    async def asks_for_the_pool(self, epoch: int) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{epoch}\n".encode())
        return await self.says()


@contextlib.asynccontextmanager
async def engine(number: int, path: Path, vault: str) -> AsyncIterator[Engine]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", ENGINE, str(number), str(path), vault)
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        yield Engine(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_recreated_lock_file_does_not_make_two_leaders(tmp_path: Path) -> None:
    """Two are elected by two files at one path; the vault lets one lead, until the other has noticed and is gone."""
    path, vault = tmp_path / "engine.lock", str(tmp_path / "gms_host-0.sock")
    processes = VaultProcesses(VaultSettings("host-0", vault), tmp_path / "vault.log")
    processes.start()
    try:
        async with engine(0, path, vault) as first:
            assert await first.says() == "elected"
            assert await first.asks_for_the_pool(10) == "leads"
            first.process.send_signal(signal.SIGSTOP)  # it cannot notice anything now
            path.unlink()
            async with engine(1, path, vault) as second:
                assert await second.says() == "elected", "the file alone would have made a second leader"
                assert await second.asks_for_the_pool(11) == "refused"
                first.process.send_signal(signal.SIGCONT)
                assert await first.says() == "lost"
                await asyncio.wait_for(first.process.wait(), BOUND_S)
                assert await second.asks_for_the_pool(12) == "leads"
    finally:
        processes.stop()
