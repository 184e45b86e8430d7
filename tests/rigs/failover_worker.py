"""Where one failover worker lives: a real store, a real vault, a real lock file, and peers that look from outside."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.store.contract import Snapshot, Store
from holdfast.testing.deployment import Deployment
from holdfast.testing.processes import VAULT, vault_processes
from holdfast.testing.rig import fetch, free_port
from holdfast.testing.waiting import BOUND_S, until, wait_until
from holdfast.wire.frames import FrameSplitter, encode
from holdfast.wire.messages import VERSION, Generate, Hello, Message, Step, decode_to_frontend


class Stage:
    """A store that runs, a vault that runs once it is started, a lock that another process may hold."""

    def __init__(self) -> None:
        self.deployment = Deployment(workers=0)
        self.folder = self.deployment.folder
        self.store = self.deployment.store
        self.socket = str(self.folder / "gms_host-0.sock")
        self.lock = self.folder / "lock"
        self.journals = self.folder / "run" / "journals" / "pair"
        self._vault = VaultProcesses(VaultSettings("host-0", self.socket), self.folder / "vault.log")
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Stage:
        self.deployment.start_store()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait(BOUND_S)
        with contextlib.suppress(OSError):
            self.vault(signal.SIGCONT)
        self._vault.stop()
        self.deployment.close()

    # -- the vault

    def start_vault(self) -> None:
        self._vault.start()

    def stop_vault(self) -> None:
        """End it cleanly: what is not mapped is gone."""
        self._vault.stop()

    def vault(self, number: signal.Signals, role: str = VAULT) -> None:
        """A signal to the vault's process, or to its KEEPER."""
        found = {its: pid for pid, its in vault_processes(self.socket).items()}
        if role not in found:
            raise ProcessLookupError(f"no {role} of {self.socket}")
        os.kill(found[role], number)

    # -- the lock

    def hold_lock(self) -> subprocess.Popen[bytes]:
        """Another process has it, until it is killed."""
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        holder = subprocess.Popen(["sleep", "600"], pass_fds=(descriptor,))
        os.close(descriptor)
        self._started.append(holder)
        return holder

    # -- a worker as a person starts it

    def worker(self, *options: str, failover: bool = True, **environ: str) -> WorkerProcess:
        port = free_port()
        env = {"DYN_SYSTEM_PORT": str(port)} | environ
        command = self.deployment.command("worker", "--name", "w", "--allow-chaos", *options)
        if failover:
            env.setdefault("FAILOVER_LOCK_PATH", str(self.lock))
            command += ["--vault-socket", self.socket, "--group", "pair", "--vault-gib", "0.004"]
            command += ["--sim-kv-blocks", "2048"]
        self.deployment.start("w", command, env)
        return WorkerProcess(self.deployment, port)


class WorkerProcess:
    """Runs one `holdfast run worker`, asked over HTTP."""

    def __init__(self, deployment: Deployment, port: int) -> None:
        self.process = deployment.processes["w"]
        self.port = port
        self._deployment = deployment

    def get(self, path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
        return ask(self.port, path, method)

    def probes(self) -> tuple[int, int]:
        """Return what /live and /health answer now."""
        return self.get("/live")[0], self.get("/health")[0]

    def until(self, true: Callable[[], bool], what: str, bound_s: float = BOUND_S) -> None:
        def ended() -> str:
            return "" if self.process.poll() is None else f"it ended with {self.process.poll()}"

        wait_until(true, what, bound_s, ended=ended, logs=self.log)

    def until_state(self, state: str, bound_s: float = BOUND_S) -> dict[str, Any]:
        facts: dict[str, Any] = {}

        def met() -> bool:
            facts.update(self.get("/health")[1])
            return facts.get("state") == state

        self.until(met, f"state {state}", bound_s)
        return facts

    def record(self) -> dict[str, Any]:
        return self._deployment.record("w")

    def log(self) -> str:
        return self._deployment.log("w")[-4000:]

    def terminate(self) -> tuple[int, float]:
        """SIGTERM: its exit status, and how long that took."""
        began_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(BOUND_S), time.monotonic() - began_s


def ask(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    """Return status and body; (0, {}) where none answers."""
    try:
        status, body = fetch(f"127.0.0.1:{port}", path, method, timeout_s=BOUND_S)
        return status, json.loads(body)
    except (OSError, http.client.HTTPException):
        return 0, {}


class DataPeer(asyncio.Protocol):
    """A frontend's data connection, or a canary's, that keeps everything it hears."""

    def __init__(self, purpose: str = "data") -> None:
        self._purpose = purpose
        self.heard: list[Message] = []
        self.over = False
        self._splitter = FrameSplitter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.send(Hello(VERSION, self._purpose, "test"))

    def data_received(self, data: bytes) -> None:
        self.heard += [decode_to_frontend(payload) for payload in self._splitter.feed(data)]

    def connection_lost(self, exc: Exception | None) -> None:
        self.over = True

    def send(self, message: Message) -> None:
        self._transport.write(encode(message))

    def generate(self, stream: int, tokens: int = 20) -> None:
        self.send(Generate(stream, GenerateRequest("t", [5, 6, 7], 3, Sampling(tokens, 1, ignore_eos=True))))

    def outputs(self, stream: int) -> Iterator[Any]:
        """What it was told of one stream."""
        steps = (message for message in self.heard if isinstance(message, Step))
        return (output for step in steps for output in step.outputs if output.stream == stream)

    def close(self) -> None:
        self._transport.abort()


async def connect(path: str, purpose: str = "data") -> DataPeer:
    """Connect and wait for the answer to the Hello."""
    _, peer = await asyncio.get_running_loop().create_unix_connection(lambda: DataPeer(purpose), path)
    await until(lambda: peer.heard, "an answer to the Hello")
    return peer


async def stored_keys(store: Store) -> list[str]:
    """Return every key of ours in the store now."""
    async with asyncio.timeout(BOUND_S), contextlib.aclosing(store.watch("v1/")) as watch:
        async for event in watch:
            if isinstance(event, Snapshot):
                return sorted(event.items)
    raise AssertionError("the watch ended")
