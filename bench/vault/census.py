"""What a vault and its keeper have: their processes, descriptors and the memory they keep, read from /proc.

Always true: counted only with no client connected, so that two counts can be compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from dataclasses import dataclass

from holdfast.core.procfs import read_text
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.testing.processes import vault_pair, vault_processes
from holdfast.testing.waiting import until, wait_until


@dataclass(frozen=True, slots=True)
class Census:
    """Counts what there is while no client is connected."""

    processes: int
    vault_fds: int  # slabs not counted
    keeper_fds: int
    memfds: int  # distinct ones, in either
    memfds_wanted: int  # those of the committed weights and the pool

    def more_than(self, before: Census) -> list[str]:
        """What there is more of than there was, or than there should be."""
        found = [
            f"{name}: {getattr(self, name)}, before {getattr(before, name)}"
            for name in ("processes", "vault_fds", "keeper_fds")
            if getattr(self, name) > getattr(before, name)
        ]
        if self.memfds != self.memfds_wanted:
            found.append(f"{self.memfds} memfds are kept, weights and pool have {self.memfds_wanted}")
        return found


def census(path: str, within_s: float) -> Census:
    """Once everyone has left and the vault has noticed: it hears of our own leaving a moment later, drops what it kept
    for us, and then its keeper does. What is too much after a while is counted as it is."""
    slabs = asyncio.run(_slabs_at_rest(path, within_s))
    counts: list[Census] = []

    def left() -> bool:
        forgotten = not _known_to(vault_pair(path, within_s))
        counts.append(_count(path, slabs, within_s))
        return forgotten and counts[-1].memfds == slabs

    with contextlib.suppress(TimeoutError):
        wait_until(left, "what was kept for us to be dropped", within_s)
    return counts[-1]


async def _slabs_at_rest(path: str, within_s: float) -> int:
    """Return how many slabs the committed weights and the pool have, asked when no other client is connected."""
    client = MemoryClient(path, open_device("host-0"), 0)
    await client.connect(within_s)

    async def alone() -> bool:
        return len(json.loads(await client.status())["clients"]) == 1

    try:
        await until(alone, "the vault to forget all other clients", within_s)
        assert await client.acquire("ro", int(within_s * 1000)) == "ro"
        assert client.mapped is not None
        facts = json.loads(await client.status())
        return len(client.mapped.layout.slab_sizes) + (2 if facts["pool_bytes"] else 0)
    finally:
        await client.close()


def _known_to(pids: tuple[int, int]) -> bool:
    """Whether one of them still has a pidfd of this process: the last thing each lets go of after a client has left."""
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            lines = (read_text(f"/proc/{pid}/fdinfo/{fd}") or "").splitlines()
            if f"Pid:\t{os.getpid()}" in lines:
                return True
    return False


def _count(path: str, slabs: int, within_s: float) -> Census:
    vault, keeper = vault_pair(path, within_s)
    memfds: set[tuple[int, int]] = set()
    others = {vault: 0, keeper: 0}
    for pid in others:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                link = f"/proc/{pid}/fd/{fd}"
                if os.readlink(link).startswith("/memfd:"):
                    memfds.add((os.stat(link).st_dev, os.stat(link).st_ino))
                else:
                    others[pid] += 1
    return Census(len(vault_processes(path)), others[vault], others[keeper], len(memfds), slabs)
