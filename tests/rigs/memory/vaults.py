"""Real vaults and real engines for the vault's tests: vaults of a directory of their own, engines as child processes.

What is written follows from a seed: anybody can say what the bytes must be.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import random
import resource
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from holdfast.memory.client.calls import VaultConnection
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.layout import TensorSpec
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.testing.processes import KEEPER, VAULT, kill_together, vault_processes
from holdfast.testing.waiting import BOUND_S, until
from tests.rigs.agents import Agent

MIB = 1024 * 1024
AGENT = Path(__file__).with_name("vault_agent.py")
# For what is granted at once, or as soon as others have done their part: far longer than that takes anywhere.
SOON_MS = int(1000 * BOUND_S)
# For engines that live to give back what a lost vault had: also on a machine that lets them wait.
PATIENT = {"weights_donation_s": BOUND_S, "pool_donation_s": BOUND_S}


# -- vaults and engines


class Engine(Agent):
    """Runs a process with a client of the vault in it (vault_agent.py)."""

    async def owns_the_pool(self, epoch: int = 10, text: str = "pages", opening: str = "open") -> None:
        """It has come as the first, and made a pool with a text in its pages."""
        await self.do(opening)
        assert await self.do("own", epoch=epoch) is False
        await self.do("make", text=text)

    async def lost(self, times: int = 1) -> None:
        """Wait until it has noticed so many losses of its vault."""

        async def noticed() -> bool:
            return len(await self.do("lost")) >= times

        await until(noticed, "it notices")

    async def back(self) -> None:
        """Wait until it has lost its vault and found it again."""
        await self.lost()
        await until(lambda: self.do("connected"), "it is back")

    async def fenced(self) -> None:
        async def both() -> bool:
            return bool(await self.do("fences") == [True, True])

        await until(both, "both fences pass")


class Rig:
    """Runs vaults of some devices in one socket directory."""

    def __init__(self, devices: tuple[str, ...] = ("host-0",), **settings: Any) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="vault-"))
        self.log = self.directory / "log"
        self.vaults = {
            device: VaultProcesses(VaultSettings(device, self.path(device), **settings), self.log) for device in devices
        }

    def path(self, device: str = "host-0") -> str:
        return str(self.directory / f"gms_{device}.sock")

    def __enter__(self) -> Rig:
        for vault in self.vaults.values():
            vault.start()
        return self

    def __exit__(self, *_: object) -> None:
        for vault in self.vaults.values():
            vault.stop()
        text = self.log.read_text() if self.log.exists() else ""
        shutil.rmtree(self.directory)
        assert "Traceback" not in text, text[-3000:]

    def pids(self, kind: str, device: str = "host-0") -> list[int]:
        """Living processes of a vault: `kind` is "server" or "keeper"."""
        wanted = VAULT if kind == "server" else KEEPER
        return [pid for pid, role in vault_processes(self.path(device)).items() if role == wanted]

    def kill(self, *kinds: str, device: str = "host-0") -> None:
        """Send SIGKILL, all in one breath, the keeper last."""
        kill_together(pid for kind in ("server", "keeper") if kind in kinds for pid in self.pids(kind, device))

    @contextlib.asynccontextmanager
    async def client(self, engine_id: int = 0, device: str = "host-0", **options: Any) -> AsyncIterator[MemoryClient]:
        """A connected client in this process."""
        client = MemoryClient(self.path(device), open_device(device), engine_id, **options)
        await client.connect(BOUND_S)
        try:
            yield client
        finally:
            await client.close()

    async def shows(self, **wanted: Any) -> None:
        """Wait until the vault says this of itself."""

        async def said() -> bool:
            seen = await facts(looker)
            return all(seen[name] == value for name, value in wanted.items())

        async with self.client(9) as looker:
            await until(said, f"{wanted}")

    async def start_again(self, *clients: MemoryClient) -> None:
        """Kill vault and keeper in one breath; the server starts them again once the clients have noticed."""
        self.kill("keeper", "server")
        await until(self.vaults["host-0"].gone, "both are gone")
        await until(lambda: not any(client.connected for client in clients), "all notice")
        assert self.vaults["host-0"].ensure()

    @contextlib.asynccontextmanager
    async def engine(self, engine_id: int = 0) -> AsyncIterator[Engine]:
        engine = Engine(str(AGENT), str(self.directory), str(engine_id))
        await engine.start()
        try:
            yield engine
        finally:
            await engine.kill()


async def lost(client: MemoryClient, link: VaultConnection) -> None:
    """Wait until the client has lost this link; it may be back on another one by then."""
    await until(lambda: not client.connected or client.link() is not link, "it notices")


async def back(client: MemoryClient, lost_link: VaultConnection) -> None:
    """Wait until the client is back on another link: the lost one counts as connected until its end has been read."""
    await until(lambda: client.connected and client.link() is not lost_link, "it is back")


async def facts(client: MemoryClient) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(await client.status())
    return told


@contextlib.contextmanager
def descriptors_of(pid: int, count: int) -> Iterator[None]:
    """A process may have so many, for a while."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


# -- what is written


def specs(count: int = 3, size: int = MIB // 2) -> list[TensorSpec]:
    return [TensorSpec(f"t{place}", (size,), (1,), "uint8", size) for place in range(count)]


@functools.cache
def _noise() -> bytes:
    return random.Random(1).randbytes(4 * MIB)


def content(seed: int, name: str, size: int) -> bytes:
    """Return a piece of the same random bytes that begins at a place drawn by seed and name: no two are alike."""
    first = random.Random(f"{seed}/{name}").randrange(len(_noise()) - size)
    return _noise()[first : first + size]


@functools.cache
def expected(seed: int, count: int = 3, size: int = MIB // 2) -> str:
    """The digest of what `load` writes."""
    digest = hashlib.blake2b(digest_size=16)
    for spec in specs(count, size):
        digest.update(content(seed, spec.name, spec.size_bytes))
    return digest.hexdigest()


async def load(client: MemoryClient, seed: int = 1, identity: str | None = None, count: int = 3) -> None:
    """What a writer does between grant and commit."""
    addresses = await client.allocate(specs(count), identity or f"weights {seed}")
    for name, address in addresses.items():
        client.device.write(address, content(seed, name, MIB // 2))


async def write(client: MemoryClient, seed: int = 1, identity: str | None = None, count: int = 3) -> str:
    """Write weights, from the first ask to the commit, and return their hash."""
    assert await client.acquire("rw", SOON_MS) == "rw"
    await load(client, seed, identity, count)
    return await client.commit()


def digest(client: MemoryClient) -> str:
    """Hash the bytes mapped, tensor by tensor."""
    assert client.mapped is not None
    hashed = hashlib.blake2b(digest_size=16)
    addresses = client.mapped.addresses()
    for place in client.mapped.layout.tensors:
        hashed.update(client.device.read(addresses[place.name], place.size_bytes))
    return hashed.hexdigest()
