"""Manifests for a machine with one device, and a supervisor of theirs that can be killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from msgspec import structs

from holdfast.discovery.keys import ROLLOUTS
from holdfast.roles.engines import memory_needed
from holdfast.roles.rolled import Rolled, Site
from holdfast.rollout import machine
from holdfast.rollout.machine import DesiredState, RolloutPhase, RolloutState
from holdfast.rollout.records import AskedManifest, applied, change_desired
from holdfast.spec.launch import WorkerLaunch
from holdfast.spec.manifest.checking import check
from holdfast.store.contract import StoreUnavailable
from holdfast.store.opening import open_store
from holdfast.supervise.lock import take_lock
from holdfast.testing.answers import Answer
from holdfast.testing.rig import DeploymentRig
from holdfast.wire.net import SocketNetwork

# Requests are held for as long as a loaded machine takes for a swap.
TEXT = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: swap}
spec:
  services:
    Frontend:
      componentType: frontend
      extraPodSpec: {mainContainer: {args: [--hold-s, "300"]}}
    Worker:
      componentType: worker
      failover: {enabled: FAILOVER}
      resources: {limits: {gpu: 1}}
      rollout: {inexact: INEXACT}
      extraPodSpec: {mainContainer: {args: [--engine, sim, WORDS]}}
"""
NEEDED = memory_needed(WorkerLaunch())
ONE, TWO = {"hosts": 1, "host_bytes": NEEDED * 3 // 2}, {"hosts": 1, "host_bytes": NEEDED * 2}
SLOW, FAST = '--sim-tpot-ms, "20"', '--sim-tpot-ms, "1"'
SHORT, LONG = 50, 3000  # tokens: a second, and longer than any swap waits for it to end
WAIT_S = 120.0


def text_of(words: str, *, failover: bool, inexact: bool = False) -> str:
    said = {"WORDS": words, "FAILOVER": str(failover).lower(), "INEXACT": str(inexact).lower()}
    text = TEXT
    for name, value in said.items():
        text = text.replace(name, value)
    return text


def fates(answers: list[Answer]) -> list[tuple[str, bool | None]]:
    return [(one.wrong, one.exact) for one in answers]


def wants_of(memory: RolloutState) -> list[DesiredState]:
    """What is wanted of each worker, the oldest first."""
    return [one.desired for one in memory.replicas.values() if one.service == "Worker"]


class Mortal(DeploymentRig):
    """Where a manifest is kept by a process of its own."""

    def __init__(self, text: str, **device: int) -> None:
        super().__init__()
        site = Site(state_dir=str(self.folder), manifest=text, environ=self.env, port=self.port)
        self._rolled = Rolled(structs.replace(site, **device))
        self.store = open_store(self._rolled.machine.store_url, SocketNetwork(), random.Random(1))

    def keep(self) -> subprocess.Popen[bytes]:
        """A supervisor, as `holdfast up --detach` starts one."""
        lock = take_lock(self.folder)
        assert lock is not None
        command = [sys.executable, "-P", "-m", "holdfast.roles.background", str(lock), self._rolled.kind]
        with open(self.folder / "up.log", "ab") as log:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self.env, pass_fds=(lock,)
            )
        os.close(lock)  # it is the child's alone
        assert child.stdin is not None
        child.stdin.write(self._rolled.encoded())
        child.stdin.close()
        self.processes[f"up-{child.pid}"] = child
        return child

    async def apply(self, text: str) -> None:
        manifest = check(text.encode()).manifest
        assert manifest is not None
        await change_desired(self.store, manifest.name, applied(AskedManifest.of(text, manifest), time.time()))

    async def until(self, met: Callable[[RolloutState], Any], what: str) -> RolloutState:
        """The rollout's memory, once it is so."""
        end_s = time.monotonic() + WAIT_S
        while True:
            memory = await self._memory()
            if memory is not None and met(memory):
                return memory
            assert time.monotonic() < end_s, f"waited for {what}: {memory} {self.logs()}"
            await asyncio.sleep(0.05)

    async def in_place(self, number: int) -> RolloutState:
        return await self.until(lambda it: it.phase is RolloutPhase.STEADY and it.target.number == number, f"{number}")

    async def _memory(self) -> RolloutState | None:
        try:
            data = await self.store.get(ROLLOUTS + "swap", 5.0)
        except StoreUnavailable:
            return None
        return machine.decode(data) if data else None


def kill(child: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL, of which it hears nothing."""
    child.send_signal(signal.SIGKILL)
    child.wait(60)
