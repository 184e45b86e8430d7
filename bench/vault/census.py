"""What a vault and its keeper have: their processes, descriptors and the memory they keep, read from /proc.

Always true: counted only with nobody connected, so that two counts can be compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.procfs import read_text
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device

POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Pair:
    vault: int
    keeper: int


@dataclass(frozen=True, slots=True)
class Census:
    """With nobody connected."""

    processes: int
    vault_fds: int  # slabs not counted
    keeper_fds: int
    memfds: int  # distinct ones, in either
    memfds_wanted: int  # those of the committed weights and the pool
    memfd_mib: float

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


def processes_of(path: str) -> dict[int, str]:
    """pid -> "vault" or "keeper", of every process whose command line names this socket."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if any(path.encode() in word for word in words):
                module = words[2] if len(words) > 2 else b""
                if module in (b"holdfast.memory.vault.keeper", b"holdfast.memory.vault.server"):
                    found[int(entry.name)] = "keeper" if module.endswith(b"keeper") else "vault"
    return found


def pair(path: str, within_s: float) -> Pair:
    """The two, once there are exactly two."""
    deadline_s = time.monotonic() + within_s
    while True:
        found = {role: pid for pid, role in processes_of(path).items()}
        if len(found) == 2 and len(processes_of(path)) == 2:
            return Pair(found["vault"], found["keeper"])
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"there should be a vault and a keeper, there are {processes_of(path)}")
        time.sleep(POLL_S)


def census(path: str, within_s: float) -> Census:
    """Once everyone has left and the vault has noticed."""
    slabs = asyncio.run(_slabs_at_rest(path, within_s))
    deadline_s = time.monotonic() + within_s
    while True:
        # The vault hears of our own leaving a moment later, drops what it kept for us, and then its keeper does.
        left = not _known_to(pair(path, within_s))
        counted = _count(path, slabs, within_s)
        if (left and counted.memfds == slabs) or time.monotonic() > deadline_s:
            return counted
        time.sleep(POLL_S)


async def _slabs_at_rest(path: str, within_s: float) -> int:
    """How many slabs the committed weights and the pool have, asked when nobody else is connected."""
    client = MemoryClient(path, open_device("host-0"), 0)
    await client.connect()
    deadline_s = time.monotonic() + within_s
    try:
        while len(clients := json.loads(await client.status())["clients"]) > 1:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"all clients have ended, and the vault still counts {clients}")
            await asyncio.sleep(POLL_S)
        assert await client.acquire("ro", 1000) == "ro"
        assert client.mapped is not None
        facts = json.loads(await client.status())
        return len(client.mapped.layout.slab_sizes) + (2 if facts["pool_bytes"] else 0)
    finally:
        await client.close()


def _known_to(found: Pair) -> bool:
    """Whether one of them still has a pidfd of this process: the last thing each lets go of after a client has left."""
    for pid in (found.vault, found.keeper):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            lines = (read_text(f"/proc/{pid}/fdinfo/{fd}") or "").splitlines()
            if f"Pid:\t{os.getpid()}" in lines:
                return True
    return False


def _count(path: str, slabs: int, within_s: float) -> Census:
    found = pair(path, within_s)
    sizes: dict[tuple[int, int], int] = {}
    others = {found.vault: 0, found.keeper: 0}
    for pid in others:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                link = f"/proc/{pid}/fd/{fd}"
                if os.readlink(link).startswith("/memfd:"):
                    status = os.stat(link)
                    sizes[status.st_dev, status.st_ino] = status.st_size
                else:
                    others[pid] += 1
    return Census(
        processes=len(processes_of(path)),
        vault_fds=others[found.vault],
        keeper_fds=others[found.keeper],
        memfds=len(sizes),
        memfds_wanted=slabs,
        memfd_mib=sum(sizes.values()) / 1024**2,
    )
