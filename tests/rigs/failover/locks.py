"""Real locks for tests: one rig per kind, and engines as real processes that can be killed and frozen.

A rig makes one election that no engine takes part in yet. `KINDS` names all of them; test_failover_locks.py holds each
to the same contract.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.core.address import parse_address
from holdfast.failover.lock import FailoverLock
from holdfast.failover.lock_server.client import ServerLock
from holdfast.failover.lock_server.messages import AskOwner, Owner
from holdfast.testing.deployment import etcd_command
from holdfast.testing.processes import freeze
from holdfast.testing.rig import free_port
from holdfast.testing.waiting import BOUND_S, in_thread, until
from holdfast.wire.net import real_world
from tests.rigs.failover.lock_agent import opened

AGENT = Path(__file__).with_name("lock_agent.py")
UNKNOWN = -1  # waiters, by a server that has not answered yet


class LockRig:
    """Makes one election. `start` before use, `stop` after; between them `url` and `token` open it from any process."""

    url: str
    token: str = ""
    # Whether an inherited descriptor keeps the lock. If not, the vault's registry of processes must (facts 2, 4d).
    ranks_keep_it = False
    # Whether its file or key can be taken away under the holder, and made again by others.
    can_be_recreated = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def start(self) -> None:
        """Start what keeps the lock, if it needs anybody."""

    async def stop(self) -> None:
        """Stop it, and everything left of it."""

    async def waiting(self) -> int:
        """Return how many leases have no key on them."""
        return 0

    async def take_away(self) -> None:
        """Remove the file or key under its holder."""
        raise NotImplementedError

    def lock(self, who: str) -> FailoverLock:
        return opened(self.url, who, self.token)

    @contextlib.asynccontextmanager
    async def engine(self, who: str) -> AsyncIterator[Engine]:
        """An engine process that takes part."""
        engine = Engine(self, who)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.kill()


class FileRig(LockRig):
    ranks_keep_it = True
    can_be_recreated = True

    async def start(self) -> None:
        self.path = self.directory / "run" / "engine.lock"
        self.url = f"flock://{self.path}"

    async def take_away(self) -> None:
        self.path.unlink()


class EtcdServer:
    """One etcd for all elections of a test run; each has a key of its own."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="lock-etcd-")
        self.port, self.peer_port = free_port(), free_port()
        command = etcd_command(Path(self.folder.name), self.port, self.peer_port)
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def ready(self) -> None:
        await until(self._answers, "etcd answers")

    async def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            await self.ask("kv/range", {"key": "AA=="})
            return True
        return False

    async def ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/v3/{path}"
        opening = asyncio.to_thread(urllib.request.urlopen, url, json.dumps(request).encode(), BOUND_S)
        with await opening as answer:
            return json.loads(answer.read())  # type: ignore[no-any-return]

    def freeze(self) -> None:
        freeze(self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(BOUND_S)
        self.folder.cleanup()


class EtcdRig(LockRig):
    """`own`: an etcd for this election alone, to be killed or frozen."""

    can_be_recreated = True
    _shared: EtcdServer | None = None
    _numbers = itertools.count(1)

    # For engines, which are killed: a pause of a busy machine is shorter.
    lease_s = 4
    # For locks in the test's own process: long enough to tell what was given up from what ran out.
    long_lease_s = 20

    def __init__(self, directory: Path, *, own: bool = False) -> None:
        super().__init__(directory)
        self._own = own

    async def start(self) -> None:
        if self._own:
            self.server = EtcdServer()
        else:
            if EtcdRig._shared is None:
                EtcdRig._shared = EtcdServer()
                atexit.register(EtcdRig._shared.kill)
            self.server = EtcdRig._shared
        self.key = f"locks/{os.getpid()}/{next(self._numbers)}"
        self.url = f"etcd://127.0.0.1:{self.server.port}/{self.key}?lease_s={self.lease_s}"
        await self.server.ready()

    async def stop(self) -> None:
        if self._own:
            self.server.kill()

    async def waiting(self) -> int:
        """Return how many leases have no key on them."""
        leases = (await self.server.ask("lease/leases", {})).get("leases", [])
        empty = 0
        for lease in leases:
            with contextlib.suppress(OSError):  # gone meanwhile
                empty += not (await self.server.ask("lease/timetolive", {**lease, "keys": True})).get("keys")
        return empty

    def lock(self, who: str) -> FailoverLock:
        return opened(self.url.replace(f"={self.lease_s}", f"={self.long_lease_s}"), who, self.token)

    async def take_away(self) -> None:
        await self.server.ask("kv/deleterange", {"key": base64.b64encode(self.key.encode()).decode()})


class ServerRig(LockRig):
    """A lock server in a process of its own, to be killed, frozen and started again; its log is a file."""

    def __init__(self, directory: Path, *, tcp: bool = False, window_s: float = 30.0) -> None:
        super().__init__(directory)
        self.window_s = window_s
        self.record, self.log = directory / "lock.record", directory / "server.log"
        self._address = f"tcp://127.0.0.1:{free_port()}" if tcp else f"unix://{directory}/lock.sock"
        self.url = f"lock+{self._address}"
        self.token = "a token of the tests" if tcp else ""

    async def start(self) -> None:
        (self.directory / "token").write_text(self.token)
        command = [sys.executable, "-m", "holdfast", "lock", "serve", "--address", self._address]
        command += ["--state-file", str(self.record), "--window-s", str(self.window_s)]
        command += ["--token-file", str(self.directory / "token")] if self.token else []
        with self.log.open("ab") as log:
            pipe = asyncio.subprocess.PIPE
            self.process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=log)
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), BOUND_S)
        assert line.startswith(b"ready"), self.log.read_text()

    async def stop(self) -> None:
        await self.end(signal.SIGKILL)

    async def end(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        await asyncio.wait_for(self.process.wait(), BOUND_S)

    async def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        await in_thread(freeze, self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def waiting(self) -> int:
        try:
            link, _ = await ServerLock(parse_address(self._address), "a look", real_world(), self.token)._connect()
        except TimeoutError:
            return UNKNOWN
        try:
            return (await link.ask(Owner, AskOwner())).waiting
        finally:
            link.abort()


# Every kind of lock there is; the contract test runs over all of them.
KINDS: dict[str, Callable[[Path], LockRig]] = {
    "flock": FileRig,
    "etcd": EtcdRig,
    "server-unix": ServerRig,
    "server-tcp": partial(ServerRig, tcp=True),
}


class Engine:
    """A child process that takes orders, one line each, and answers each with one line (lock_agent.py)."""

    def __init__(self, rig: LockRig, who: str) -> None:
        self._command = [sys.executable, str(AGENT), rig.url, who, rig.token, str(rig.directory)]
        self.who = who
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe)
        assert await self.answer() == "ready"

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def order(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(words.encode() + b"\n")

    async def answer(self, bound_s: float = BOUND_S) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(bound_s):
            return (await self.process.stdout.readline()).decode().strip()

    async def do(self, words: str) -> str:
        self.order(words)
        return await self.answer()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def freeze(self) -> None:
        """Return once it has stopped; the signal alone takes a moment."""
        await in_thread(freeze, self.pid)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
