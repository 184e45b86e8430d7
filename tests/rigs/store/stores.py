"""Real stores for tests: a server process that can be killed, frozen and restarted, and clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from holdfast.core.address import parse_address
from holdfast.spec.names import parse_endpoints
from holdfast.store.client import EmbeddedStore
from holdfast.store.contract import Registration, Snapshot, Store, StoreUnavailable, Watch, WatchEvent
from holdfast.store.etcd_client import EtcdSettings, EtcdStore
from holdfast.testing.deployment import etcd_command
from holdfast.testing.processes import freeze
from holdfast.testing.rig import free_port
from holdfast.wire.net import SocketNetwork

ETCD_TTL_S = 6  # longer than a busy machine's pauses
BOUND_S = 60.0  # far above what any answer takes, on a busy machine too


def _spawn(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


class Rig:
    """A server's process, and clients for it."""

    process: subprocess.Popen[bytes]
    url: str
    ttl_s = ETCD_TTL_S  # of a lease that is not a connection

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def command(self) -> list[str]:
        raise NotImplementedError

    def client(self, queue_events_max: int = 1024) -> Store:
        raise NotImplementedError

    async def start(self) -> None:
        self.process = _spawn(self.command())
        async with self.opened() as store:
            await store.get("ready", BOUND_S)

    @contextlib.asynccontextmanager
    async def opened(self, queue_events_max: int = 1024) -> AsyncIterator[Store]:
        """A client that is started, and closed in the end."""
        store = self.client(queue_events_max)
        await store.start()
        try:
            yield store
        finally:
            await store.close()

    def kill(self) -> None:
        end(self.process)

    def freeze(self) -> None:
        freeze(self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class EmbeddedRig(Rig):
    def __init__(self, directory: Path, *, tcp: bool = False) -> None:
        super().__init__(directory)
        self.url = f"tcp://127.0.0.1:{free_port()}" if tcp else f"unix://{directory}/store.sock"

    def command(self) -> list[str]:
        launch = {"state_dir": str(self.directory), "name": "store", "address": self.url}
        return [sys.executable, "-m", "holdfast.roles", "store", json.dumps(launch)]

    def client(self, queue_events_max: int = 1024) -> Store:
        address = parse_address(self.url)
        return EmbeddedStore(address, SocketNetwork(), random.Random(7), queue_events_max=queue_events_max)


class EtcdRig(Rig):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.port, self.peer_port = free_port(), free_port()
        self.url = f"etcd://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return etcd_command(self.directory, self.port, self.peer_port)

    def client(self, queue_events_max: int = 1024) -> Store:
        settings = EtcdSettings(lease_ttl_s=self.ttl_s, queue_events_max=queue_events_max)
        return EtcdStore(parse_endpoints(self.url), random.Random(7), settings)


def rig_for(kind: str, directory: Path) -> Rig:
    return EtcdRig(directory) if kind == "etcd" else EmbeddedRig(directory, tcp=kind == "tcp")


async def registered(store: Store, key: str, value: bytes, timeout_s: float = BOUND_S) -> Registration:
    """A registration that the store has."""
    registration = store.register(key, value)
    await has(store, key, value, timeout_s)
    return registration


async def has(store: Store, key: str, value: bytes, timeout_s: float = BOUND_S) -> None:
    """Return once the store holds that value."""
    async with asyncio.timeout(timeout_s):
        while await store.get(key, timeout_s) != value:
            await asyncio.sleep(0.005)


async def items_under(store: Store, prefix: str, timeout_s: float = BOUND_S) -> dict[str, bytes]:
    """What a new watch is told first."""
    async with contextlib.aclosing(store.watch(prefix)) as watch:
        snapshot = await upcoming(watch, timeout_s)
    assert isinstance(snapshot, Snapshot)
    return snapshot.items


async def registrant(rig: Rig) -> subprocess.Popen[bytes]:
    """A process of its own that registers r/1."""
    kind = "etcd" if isinstance(rig, EtcdRig) else "unix"
    return _spawn([sys.executable, __file__, kind, str(rig.directory), rig.url])


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.wait(BOUND_S)
    if process.stdout is not None:
        process.stdout.close()


async def upcoming(watch: Watch, timeout_s: float = BOUND_S) -> WatchEvent:
    return await asyncio.wait_for(anext(watch), timeout_s)


async def until(watch: Watch, wanted: Callable[[WatchEvent], bool], timeout_s: float = BOUND_S) -> list[WatchEvent]:
    """Return events up to and with the wanted one."""
    seen: list[WatchEvent] = []
    async with asyncio.timeout(timeout_s):
        async for event in watch:
            seen.append(event)
            if wanted(event):
                return seen
    raise AssertionError(f"the watch ended; seen {seen}")


async def until_snapshot(watch: Watch, items: dict[str, bytes], timeout_s: float = BOUND_S) -> list[WatchEvent]:
    """Events until what they tell adds up to `items`."""
    view: dict[str, bytes] = {}

    def adds_up(event: WatchEvent) -> bool:
        nonlocal view
        match event:
            case Snapshot(now):
                view = dict(now)
            case _ if hasattr(event, "value"):
                view[event.key] = event.value
            case _ if hasattr(event, "key"):
                view.pop(event.key, None)
        return view == items

    return await until(watch, adds_up, timeout_s)


async def unavailable(call: Awaitable[object]) -> StoreUnavailable:
    """Await a call that must fail as StoreUnavailable, whatever else happens: it has a time of its own."""
    async with asyncio.timeout(BOUND_S):
        try:
            await call
        except StoreUnavailable as error:
            return error
    raise AssertionError("the call succeeded")


async def refused(store: Store, why: str) -> None:
    """Return once calls fail for this reason: the first may be over before anything was heard of the store."""
    async with asyncio.timeout(BOUND_S):
        while why not in str(await unavailable(store.get("k", 0.5))):
            pass


async def _register(kind: str, directory: str, url: str) -> None:
    rig = rig_for(kind, Path(directory))
    rig.url = url
    async with rig.opened() as store:
        store.register("r/1", b"mine")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_register(*sys.argv[1:]))
