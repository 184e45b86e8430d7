"""Keeps an agent on every node of a Ray cluster that has devices: the process `ray` of `holdfast up --backend ray`.

Which nodes there are Ray says; an agent's death Ray says too, at once. One that does not answer is replaced: that costs
no stream, since replicas live on and the next agent adopts them. What a dead node's replicas had in Ray is given back.

Always true: when this process is told to stop nothing of the deployment is left on the cluster; when it is killed
everything goes on, and the next one finds all of it by name. Where something may be is written down for as long
(`Left`), so that `holdfast down` takes it away without this process, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from pathlib import Path
from typing import Any

from holdfast.core.address import TcpAddress, parse_address
from holdfast.core.errors import Refused, UserError, refuse_user_errors
from holdfast.core.tasks import Tasks, beside, done_within, first
from holdfast.roles.ray import cluster
from holdfast.roles.ray.agent import AgentSite, HoldfastAgent
from holdfast.roles.ray.clearing import REACH_S, Left, clear
from holdfast.roles.ray.cluster import Gone, Handle, RayNode
from holdfast.spec.launch import RayLaunch
from holdfast.wire.net import SocketNetwork

log = logging.getLogger(__name__)

NODES_S = 1.0  # between two looks at which nodes there are
PING_S = 2.0  # between two questions to an agent
SILENT_S = 10.0  # past it an agent is replaced: it renews a lease that is shorter
BEGIN_S = 90.0  # for an agent's process to come up and adopt
FIRST_NODE_S = 30.0  # for a node with devices to be there: one that joins is known to Ray within seconds
FIRST_AGENT_S = BEGIN_S + FIRST_NODE_S  # for its agent: one that fails at once is made again meanwhile
GIB = 2**30
AGAIN_S = 1.0  # before an agent that died is made again


def folder_of(state_dir: str, node: str) -> str:
    """A node's state directory, on its own machine: several nodes of one machine have each their own."""
    return str(Path(state_dir) / "ray" / node)


def _host_bytes(launch: RayLaunch, node: RayNode) -> int:
    """What a node gives for WARM replicas."""
    half = node.memory_bytes // 2 if node.resource == cluster.GPU else 0
    return half if launch.host_bytes < 0 else launch.host_bytes


async def run_watcher(launch: RayLaunch, stop: asyncio.Event, on_ready: Any) -> None:
    """Until it is told to stop. Refused says why the cluster cannot be used."""
    with refuse_user_errors():
        cluster.check_installed()
    await _reach(launch.address)
    try:
        await cluster.asked(cluster.connect, launch.address, launch.deployment)
    except TimeoutError:
        which = launch.address or "of this machine"
        raise Refused(f"the Ray cluster {which} did not answer within {cluster.ASK_S:g} s") from None
    for number in (signal.SIGTERM, signal.SIGINT):  # once more: Ray puts a handler of its own before ours
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    watcher = Watcher(launch)
    left = Left(launch.deployment, await cluster.asked(cluster.address))
    try:
        left.write(Path(launch.state_dir))
        async with beside(watcher.run(), "nodes") as watching, beside(watcher.first_agent(), "agent") as coming:
            await first((stop.wait(),), (watching, coming))
            if coming.done():
                coming.result()  # Refused leaves what may be there: `holdfast down` takes it away
                on_ready({})
                await first((stop.wait(),), (watching,))
        if not stop.is_set():
            watching.result()
        await watcher.stop()
        left.path(Path(launch.state_dir)).unlink(missing_ok=True)
    finally:
        with contextlib.suppress(TimeoutError):
            await cluster.asked(cluster.leave)


async def _reach(address: str) -> None:
    """That somebody listens there; Ray would wait for minutes, and not say who for."""
    if not address or address == "auto":
        return
    try:
        where = parse_address(f"tcp://{address.removeprefix('ray://')}")
        if address.startswith("ray://") or not isinstance(where, TcpAddress):
            raise ValueError("HOST:PORT of its head is needed, as `ray start --head` says it")
        transport = await SocketNetwork().connect(where, asyncio.Protocol, REACH_S)
    except ValueError as error:
        raise Refused(f"--address {address}: {error}") from error
    except (OSError, TimeoutError) as error:
        raise Refused(f"--address {address}: no Ray cluster answers there: {error or 'nothing comes back'}") from error
    transport.close()


class Watcher:
    """The agents of one deployment."""

    def __init__(self, launch: RayLaunch) -> None:
        self._launch = launch
        self._deployment = launch.deployment
        self._kept: dict[str, asyncio.Task[None]] = {}  # by the node's id
        self._tasks = Tasks("agents")
        self._has_node, self._has_agent = asyncio.Event(), asyncio.Event()  # ever
        self._wrong = ""  # why the last agent that was tried did not come

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):  # Ray's control store is away, and what runs goes on
                await self._look()
            await asyncio.sleep(NODES_S)

    async def first_agent(self) -> None:
        """Return when an agent runs on a node of the cluster. Refused says why none does within the bound."""
        if not await done_within(self._has_node.wait(), FIRST_NODE_S):
            what = f"no node of the Ray cluster {self._launch.address} has devices".replace("  ", " ")
            mend = """start one with GPUs, or with `ray start --resources '{"holdfast_device": 1}'`"""
            raise Refused(f"{what} after {FIRST_NODE_S:g} s; {mend}")
        if not await done_within(self._has_agent.wait(), FIRST_AGENT_S):
            why = f": {self._wrong}" if self._wrong else ""
            raise Refused(f"no agent of {self._deployment} runs on the Ray cluster after {FIRST_AGENT_S:g} s{why}")

    async def _look(self) -> None:
        alive = {node.id: node for node in await cluster.asked(cluster.nodes)}
        for gone in self._kept.keys() - alive.keys():
            self._kept.pop(gone).cancel()
            log.warning("node %s is gone", gone[:8])
        for node in alive.values():
            kept = self._kept.get(node.id)
            if node.resource:
                self._has_node.set()
            if node.resource and (kept is None or kept.done()):
                self._kept[node.id] = self._tasks.spawn(self._keep(node), f"agent of {node.name}")
        names = {node.name for node in alive.values()}
        ours = cluster.groups_of(self._deployment)
        for group in await cluster.asked(cluster.groups, ours):
            if group.removeprefix(ours).partition(":")[0] not in names:  # Ray would look for room for it for ever
                await cluster.asked(cluster.remove_group, group)

    async def _keep(self, node: RayNode) -> None:
        name = cluster.agent_name(self._deployment, node.name)
        if (wanted := _host_bytes(self._launch, node)) > node.memory_bytes:
            has = f"{wanted / GIB:.2f} GiB of memory for WARM, and Ray has {node.memory_bytes / GIB:.2f} in all"
            log.warning("node %s is to have %s: nobody will be WARM there", node.name, has)
        while True:
            handle: Handle = None
            try:
                site = self._site(node)
                handle = await cluster.asked(cluster.begin, cluster.on_node(node.id), HoldfastAgent, name, site)
                pid, told = await cluster.answer(handle.begin.remote(), BEGIN_S)
                if told != site:
                    raise Gone("it was told otherwise, by an earlier `up`")
                log.info("%s runs, pid %d", name, pid)
                self._has_agent.set()
                await self._ask_on(handle)
            except (Gone, TimeoutError) as error:
                self._wrong = str(error) or type(error).__name__
                log.warning("%s is gone or silent, and is made again: %s", name, error)
                if handle is not None:
                    await cluster.asked(cluster.kill, handle)  # its name is free then
            await asyncio.sleep(AGAIN_S)

    async def _ask_on(self, handle: Handle) -> None:
        """Until it ends, Gone, or is silent, TimeoutError."""
        async with beside(cluster.answer(handle.over.remote(), None), "over") as over:
            while not over.done():
                await cluster.answer(handle.ping.remote(), SILENT_S)
                await first((asyncio.sleep(PING_S),), (over,))
            over.result()

    def _site(self, node: RayNode) -> AgentSite:
        launch = self._launch
        return AgentSite(
            deployment=launch.deployment,
            node=node,
            state_dir=folder_of(launch.state_dir, node.name),
            store=launch.store,
            environ=dict(launch.environ),
            device_bytes=launch.device_bytes,
            host_bytes=_host_bytes(launch, node),
            # Where the store is a socket, everybody is on its machine.
            reach="" if launch.store.startswith("unix://") else node.host,
        )

    async def stop(self) -> None:
        """Take everything of this deployment off the cluster."""
        await self._tasks.stop()
        try:
            await clear(self._deployment)
        except TimeoutError as error:
            raise UserError("Ray's control store does not answer: what runs on the cluster is left there") from error
