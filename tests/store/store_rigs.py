"""Real stores for tests: a server process that can be killed, frozen and restarted, and clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from holdfast.core.address import parse_address
from holdfast.spec.store_urls import parse_endpoints
from holdfast.store.client import EmbeddedStore
from holdfast.store.contract import Snapshot, Store, StoreUnavailable, Watch, WatchEvent
from holdfast.store.etcd_client import EtcdSettings, EtcdStore
from holdfast.testing.deployment import etcd_command
from holdfast.testing.place import free_port
from holdfast.testing.processes import freeze
from holdfast.wire.net import SocketNetwork

# The shortest that etcd grants with its default election timeout.
ETCD_TTL_S = 2

REGISTRANT = """
import asyncio, random, sys
from holdfast.core.address import parse_address
from holdfast.wire.net import SocketNetwork

async def main(url, key):
    if url.startswith("etcd://"):
        from holdfast.spec.store_urls import parse_endpoints
        from holdfast.store.etcd_client import EtcdSettings, EtcdStore
        store = EtcdStore(parse_endpoints(url), random.Random(1), EtcdSettings(lease_ttl_s=2))
    else:
        from holdfast.store.client import EmbeddedStore
        store = EmbeddedStore(parse_address(url), SocketNetwork(), random.Random(1))
    await store.start()
    await store.register(key, b"mine").wait_registered(10)
    print("registered", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


def _spawn(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


class _Process:
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        end(self.process)

    def freeze(self) -> None:
        freeze(self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class EmbeddedRig(_Process):
    lease_gone_s = 2.0  # how soon a killed client's keys are gone

    def __init__(self, directory: Path, *, tcp: bool = False) -> None:
        self.directory = directory
        self.url = f"tcp://127.0.0.1:{free_port()}" if tcp else f"unix://{directory}/store.sock"

    async def start(self) -> None:
        command = [sys.executable, "-m", "holdfast.store.serve", self.url, str(self.directory / "durable")]
        self.process = _spawn(command)
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), 20)
        assert line.startswith(b"ready"), line

    def client(self, queue_events_max: int = 1024) -> Store:
        address = parse_address(self.url)
        return EmbeddedStore(address, SocketNetwork(), random.Random(7), queue_events_max=queue_events_max)


class EtcdRig(_Process):
    lease_gone_s = ETCD_TTL_S + 5.0

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port, self.peer_port = free_port(), free_port()
        self.url = f"etcd://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.process = _spawn(etcd_command(self.directory, self.port, self.peer_port))
        store = self.client()
        await store.start()
        try:
            await store.get("ready", 20)
        finally:
            await store.close()

    def client(self, queue_events_max: int = 1024) -> Store:
        settings = EtcdSettings(lease_ttl_s=ETCD_TTL_S, queue_events_max=queue_events_max)
        return EtcdStore(parse_endpoints(self.url), random.Random(7), settings)


async def registrant(url: str, key: str) -> subprocess.Popen[bytes]:
    """A process of its own that has registered `key`."""
    process = _spawn([sys.executable, "-c", REGISTRANT, url, key])
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 20)
    assert line == b"registered\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    if process.stdout is not None:
        process.stdout.close()


async def upcoming(watch: Watch, timeout_s: float = 5.0) -> WatchEvent:
    return await asyncio.wait_for(anext(watch), timeout_s)


async def until(watch: Watch, wanted: Callable[[WatchEvent], bool], timeout_s: float) -> list[WatchEvent]:
    """Events up to and with the wanted one."""
    seen: list[WatchEvent] = []
    async with asyncio.timeout(timeout_s):
        async for event in watch:
            seen.append(event)
            if wanted(event):
                return seen
    raise AssertionError(f"the watch ended; seen {seen}")


async def until_snapshot(watch: Watch, items: dict[str, bytes], timeout_s: float) -> list[WatchEvent]:
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


async def unavailable_within(call: object, bound_s: float) -> StoreUnavailable:
    """Await a call that must fail as StoreUnavailable within `bound_s`."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    try:
        await call  # type: ignore[misc]
    except StoreUnavailable as error:
        assert loop.time() - started_s < bound_s
        return error
    raise AssertionError("the call succeeded")
