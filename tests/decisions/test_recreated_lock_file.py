"""Decision: a lock elects, the vault admits. Two lock files do not make two leaders (facts 4d, 18)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.testing.processes import freeze
from tests.rigs.children import Child

pytestmark = pytest.mark.processes
BOUND_S = 60.0

# An engine that is elected by the file, asks the vault for the pool, and leaves when it hears that the lock is lost.
ENGINE = """
import asyncio, sys
from pathlib import Path
from holdfast.core.ports import SystemClock
from holdfast.failover.file_lock import FileLock
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.client.pool import PoolClient

async def main(number, path, socket):
    lock = FileLock(Path(path), f"engine {number}", SystemClock())
    client = MemoryClient(socket, open_device("host-0"), int(number))
    await client.connect(60)
    pool = PoolClient(client, open_device("host-0"))
    lost = await lock.acquire()
    print('"elected"', flush=True)
    leaving = asyncio.create_task(lost.wait())
    loop, orders = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while not lost.is_set():
        order = asyncio.create_task(orders.readline())
        await asyncio.wait([order, leaving], return_when=asyncio.FIRST_COMPLETED)
        if order.done():
            if not (words := order.result().split()):
                return
            try:
                await pool.acquire(int(words[0]), "geometry", int(words[1]))
                print('"leads"', flush=True)
            except TimeoutError:
                print('"refused"', flush=True)
    print('"lost"', flush=True)
    await client.close()

asyncio.run(main(*sys.argv[1:]))
"""


def test_recreated_lock_file_does_not_make_two_leaders(tmp_path: Path) -> None:
    """Two are elected by two files at one path; the vault lets one lead, until the other has noticed and is gone."""
    path, vault = tmp_path / "engine.lock", str(tmp_path / "gms_host-0.sock")
    processes = VaultProcesses(VaultSettings("host-0", vault), tmp_path / "vault.log")
    processes.start()
    try:
        with Child("-c", ENGINE, "0", str(path), vault) as first:
            assert first.next(BOUND_S) == "elected"
            assert first.ask("10 60000", BOUND_S) == "leads"
            freeze(first.process.pid)  # it cannot notice anything now
            path.unlink()
            with Child("-c", ENGINE, "1", str(path), vault) as second:
                assert second.next(BOUND_S) == "elected", "the file alone would have made a second leader"
                assert second.ask("11 300", BOUND_S) == "refused"
                first.process.send_signal(signal.SIGCONT)
                assert first.next(BOUND_S) == "lost"
                first.process.wait(BOUND_S)
                assert second.ask("12 60000", BOUND_S) == "leads"
    finally:
        processes.stop()
