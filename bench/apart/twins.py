"""Deployments that are as alike as they can be, kept by supervisors in this process, and what their clients are told.

Each has a model of its own and one that all call `same`, with other weights: a frontend that knew another's workers
would mix them, and its clients see other tokens. What is right is what each deployment answers alone, with a store of
its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from holdfast.core.ports import SystemClock
from holdfast.core.tasks import beside
from holdfast.roles.rolled import Rolled, Site
from holdfast.roles.running import child_command, log_dir
from holdfast.rollout.machine import NOTHING, RolloutPhase
from holdfast.spec.launch import StoreLaunch
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.processes import LocalProcesses
from holdfast.testing.clients import StreamClient, open_client
from holdfast.testing.rig import DeploymentRig
from holdfast.testing.waiting import in_thread, until

WAIT_S = 240.0  # for a deployment to come up on a machine that others use too
TOKENS = 8
PROMPTS = 25  # of each model: each is asked again and again
PATH = "/v1/chat/completions"
SHORT, LONG = "twin", "twin-more"
SAME = "same"

HEAD = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: NAME}
spec:
"""
FRONTEND = "    Frontend: {componentType: frontend}\n"
WORKERS = """\
    Worker: {componentType: worker, modelName: of-NAME, extraPodSpec: {mainContainer: {args: [ARGS]}}}
    Other: {componentType: worker, modelName: same, extraPodSpec: {mainContainer: {args: [ARGS]}}}
"""
SIM = '--engine, sim, --sim-ttft-ms, "0", --sim-tpot-ms, "0", --sim-revision, "REVISION"'

Words = dict[tuple[str, int], list[int]]  # an answer's tokens, by model and prompt


def manifest(name: str, *, frontend: bool = True) -> str:
    """One of the two; of both the services have the same names."""
    args = SIM.replace("REVISION", "2" if name == LONG else "1")
    services = (FRONTEND if frontend else "") + WORKERS.replace("ARGS", args)
    return f"{HEAD}  services:\n{services}".replace("NAME", name)


def door(name: str, *shares: str) -> str:
    """Return the manifest of frontends alone, for the deployments that they share."""
    return f"{HEAD}  shares: [{', '.join(shares)}]\n  services:\n{FRONTEND}".replace("NAME", name)


def request(model: str, prompt: int) -> bytes:
    asked = {"role": "user", "content": f"Tell me story number {prompt}."}
    more = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    return json.dumps({"model": model, "messages": [asked], **more}).encode()


@dataclass
class Twin:
    """One of the two, kept by a supervisor in this process."""

    name: str
    manifest: str
    rig: DeploymentRig = field(default_factory=DeploymentRig)
    told: list[str] = field(default_factory=list)
    rolled: Rolled | None = None  # once it is kept

    @property
    def models(self) -> tuple[str, str]:
        return (f"of-{self.name}", SAME)

    @contextlib.asynccontextmanager
    async def kept(self, store: str = "") -> AsyncIterator[asyncio.Task[None]]:
        """In place, until the block's end; without a `store` it has one of its own. What keeps it is its task."""
        folder = self.rig.folder
        site = Site(state_dir=str(folder), manifest=self.manifest, environ=self.rig.env, port=self.rig.port)
        rolled = self.rolled = Rolled(msgspec.structs.replace(site, store=store))
        logs, command = LocalProcesses(log_dir(folder)), child_command(os.getpid())
        supervisor = Supervisor(folder, rolled.jobs(), logs, command, tell=self.told.append, clock=SystemClock())
        keeping = rolled.run(supervisor, tied=True, shown=self._shown, tell=self.told.append)
        try:
            async with beside(keeping, self.name) as task:
                await until(lambda: task.done() or self._is_in_place(rolled), f"{self.name} to be in place", WAIT_S)
                assert not task.done(), (task, self.told, self.rig.logs())
                yield task
        finally:
            supervisor.kill()
            await supervisor.stop()

    async def _shown(self, lack: str) -> None:
        self.told.append(lack or "it serves")

    def _is_in_place(self, rolled: Rolled) -> bool:
        memory = rolled.rolling.state if rolled.rolling is not None else NOTHING
        return memory.phase is RolloutPhase.STEADY and memory.target.number > 0

    async def words(self) -> Words:
        """What it answers, each prompt once."""
        client = await open_client(self.rig.port)
        try:
            asked = [(model, prompt) for model in self.models for prompt in range(PROMPTS)]
            return {one: await answer(client, *one) for one in asked}
        finally:
            client.close()

    def processes(self) -> dict[str, int]:
        """Its pids, by name, without what a supervisor starts for itself."""
        return {name: record["pid"] for name, record in self.rig.records().items() if record["role"] != "store"}

    def seen(self) -> set[str]:
        """The names of all workers that its frontend knows."""
        return {worker["name"] for worker in self.rig.health().get("workers", [])}


async def answer(client: StreamClient, model: str, prompt: int) -> list[int]:
    """Return the tokens of a whole answer, or [-status] of a refusal."""
    received = await client.request(PATH, request(model, prompt))
    if received.status != 200:
        return [-received.status]
    return list(json.loads(received.body())["choices"][0]["token_ids"])


@contextlib.asynccontextmanager
async def one_store(rig: DeploymentRig) -> AsyncIterator[str]:
    """Start a store of no deployment: it outlives both."""
    url = f"unix://{rig.folder}/run/store.sock"
    launch = StoreLaunch(state_dir=str(rig.folder), name="store", address=url, parent=os.getpid())
    words = ["-P", "-m", "holdfast.roles", "store", msgspec.json.encode(launch).decode()]
    rig.start("store", [sys.executable, *words])
    await in_thread(rig.wait_until, lambda: rig.record("store").get("address"), "the store")
    yield url


async def alone(name: str) -> Words:
    """Return what a deployment answers where no other one is."""
    twin = Twin(name, manifest(name))
    try:
        async with twin.kept():
            return await twin.words()
    finally:
        await in_thread(twin.rig.close)
