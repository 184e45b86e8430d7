"""An engine of the vault's tests, from inside: `python vault_agent.py DIRECTORY ENGINE_ID`.

It takes orders as JSON lines and answers each one; orders run side by side, so that one may wait while the next comes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from holdfast.memory.client.pool import PoolClient
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.writer_lock import LoadAction, LoadLook, LoadWatch, WriterLock, plan_load
from holdfast.testing.waiting import BOUND_S
from tests.rigs.agents import obey
from tests.rigs.memory.vaults import MIB, SOON_MS, digest, facts, load


class Agent:
    """What an engine child can do; one method per order."""

    def __init__(self, directory: Path, engine_id: int) -> None:
        self._directory = directory
        self._engine_id = engine_id
        self._clients: dict[str, MemoryClient] = {}
        self._pools: dict[str, PoolClient] = {}
        self._lost: list[str] = []

    async def open(self, device: str = "host-0") -> None:
        path = str(self._directory / f"gms_{device}.sock")
        client = MemoryClient(path, open_device(device), self._engine_id, on_lost=self._lost.append)
        await client.connect(BOUND_S)
        self._clients[device] = client
        self._pools[device] = PoolClient(client, open_device("host-0"))

    async def open_as_the_dead(self) -> None:
        """Connect, but send the pidfd of a process that is over."""
        dead = pidfd_of_the_dead()
        honest, os.pidfd_open = os.pidfd_open, lambda pid: os.dup(dead)
        try:
            await self.open()
        finally:
            os.pidfd_open = honest

    async def acquire(self, mode: str, timeout_ms: int = SOON_MS, device: str = "host-0", **options: Any) -> str:
        return await self._clients[device].acquire(mode, timeout_ms, **options)

    async def load(self, seed: int = 1, device: str = "host-0") -> None:
        await load(self._clients[device], seed)

    async def commit(self, device: str = "host-0") -> str:
        return await self._clients[device].commit()

    async def digest(self, device: str = "host-0") -> str:
        return digest(self._clients[device])

    async def facts(self, device: str = "host-0") -> dict[str, Any]:
        return await facts(self._clients[device])

    async def connected(self, device: str = "host-0") -> bool:
        return self._clients[device].connected

    async def lost(self) -> list[str]:
        return self._lost

    # -- the pool

    async def own(self, epoch: int, geometry: str = "g", timeout_ms: int = SOON_MS) -> bool:
        return (await self._pools["host-0"].acquire(epoch, geometry, timeout_ms)).adopt

    async def make(self, text: str) -> None:
        mapping = await self._pools["host-0"].make(MIB, [2 * MIB, 2 * MIB])
        self._clients["host-0"].device.write(mapping.pages_address, text.encode())

    async def map_pool(self, size: int = 5, writable: bool = True) -> str:
        mapping = await self._pools["host-0"].map(writable=writable)
        return self._clients["host-0"].device.read(mapping.pages_address, size).decode()

    async def pool_text(self, size: int = 5) -> str:
        mapping = self._pools["host-0"].mapping
        assert mapping is not None
        return self._clients["host-0"].device.read(mapping.pages_address, size).decode()

    async def hang_up(self, device: str = "host-0") -> None:
        """Close the connection and live on; there is time for a vault to come back on a busy machine."""
        client = self._clients.pop(device)
        await client.close(farewell_s=BOUND_S)

    async def break_off(self, how: str) -> None:
        """Lose the connection without meaning to, as a defect or a want of descriptors would."""
        link = self._clients["host-0"].link()
        connection = link._connection
        if how == "hung_up":
            connection.close("broken here")
        elif how == "no_message":
            connection.send(b"not msgpack")
        else:
            size, count = (2**31, 0) if how == "no_frame" else (8, 3)
            connection._sock.send(size.to_bytes(4, "big") + count.to_bytes(2, "big") + bytes(8))

    async def send_descriptors(self) -> None:
        """Send a frame with one descriptor too many; that it is no message is not reached."""
        own = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._clients["host-0"].link()._connection.send(b"", [own] * 8)
        os.close(own)

    async def join(self, epoch: int | None) -> None:
        await self._clients["host-0"].register_mapping(epoch)

    async def fences(self) -> list[bool]:
        pool = self._pools["host-0"]
        return [pool.cpu_fence.is_set(), pool.gpu_fence.is_set()]

    async def quiesce(self) -> None:
        await self._pools["host-0"].quiesce()

    # -- a whole start over several devices, by roles and writer lock

    async def become_ready(self, devices: list[str], grace_s: float = 0.5, die_after: str = "") -> str:
        """Load or read every device, as writer_policy says. `die_after` a device is committed: SIGKILL. What it did."""
        for device in devices:
            await self.open(device)
        lock = WriterLock(self._directory, f"engine {self._engine_id}")
        watch, held, wrote = LoadWatch(self._engine_id, grace_s), set[str](), []
        try:
            while held != set(devices):
                owner = None if lock.held else lock.owner()
                phases = {device: (await self.facts(device))["weights"] for device in devices}
                watch, plan = plan_load(watch, LoadLook(phases, owner, lock.held), asyncio.get_running_loop().time())
                if plan.action is LoadAction.TAKE_LOCK:
                    lock.try_acquire()
                    continue
                mode = "rw_or_ro" if plan.action is LoadAction.LOAD else "ro"
                for device in [device for device in devices if device not in held]:
                    got = await self._try(mode, device)
                    if got == "rw":
                        await load(self._clients[device], seed=7)
                        await self._clients[device].commit()
                        wrote.append(device)
                    if got != "empty":
                        held.add(device)
                    if device == die_after:
                        os.kill(os.getpid(), signal.SIGKILL)
        finally:
            lock.release()
        return f"wrote {','.join(sorted(wrote))}"

    async def _try(self, mode: str, device: str) -> str:
        try:
            return await self._clients[device].acquire(mode, 100, wait_for_writer=True)
        except TimeoutError:
            return "empty"


def pidfd_of_the_dead() -> int:
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
    pidfd = os.pidfd_open(child)
    os.waitpid(child, 0)
    return pidfd


if __name__ == "__main__":
    asyncio.run(obey(Agent(Path(sys.argv[1]), int(sys.argv[2]))))
