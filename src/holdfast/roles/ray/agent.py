"""The agent of one Ray node, as an actor there: the same `Hosting` as of a machine without Ray, over Ray's actors.

Always true: of one node there is one agent; one that finds an earlier one's process alive ends it first. Replicas are
not the agent's to lose: they live on when it dies, and the next one adopts them.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

from msgspec import Struct

from holdfast.core.errors import UserError
from holdfast.core.log_files import say
from holdfast.core.tasks import Tasks
from holdfast.fleet.room import HOST
from holdfast.memory.devices.host_room import free_host_bytes
from holdfast.roles.devices import look, sizes_of
from holdfast.roles.model_names import named
from holdfast.roles.ray import cluster
from holdfast.roles.ray.backend import RayBackend
from holdfast.roles.ray.cluster import RayNode
from holdfast.roles.tied import die_with
from holdfast.spec.manifest.local import Machine
from holdfast.store.opening import open_store
from holdfast.supervise.hosting import Hosting
from holdfast.supervise.incident_recorder import BEAT_S
from holdfast.supervise.lock import Holder, beat, sign, take_lock
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import Record, read_record, write_record
from holdfast.supervise.secrets import SecretFiles
from holdfast.wire.net import SocketNetwork

NAME = "agent"  # of its record
END_S = 5.0  # for an earlier one that was killed
HOST_S = 2.0  # for Ray to say whether it has the host memory that was asked for
HOST_AGAIN_S = 5.0  # between two looks whether Ray has the host memory that was asked for
GIB = 2**30


class AgentSite(Struct, frozen=True, kw_only=True):
    """What an agent is told of its node and its fleet."""

    deployment: str
    node: RayNode
    state_dir: str  # of this node, on its machine
    store: str
    environ: dict[str, str]
    device_bytes: int = 0  # of each device in host memory; 0: half of what is free
    host_bytes: int = 0  # for weights of WARM replicas
    reach: str = ""  # where frontends on other machines reach its engines


class HoldfastAgent:
    """One node of a fleet."""

    def __init__(self, site: AgentSite) -> None:
        die_with(os.getppid())  # its raylet: without it nothing can be started here, and Ray does not always end it
        self._site = site
        self._tasks = Tasks(f"agent of {site.node.name}", failed=self._failed)
        self._over: asyncio.Future[None] | None = None
        self._backend: RayBackend | None = None

    async def begin(self) -> tuple[int, AgentSite]:
        """Look after this node, unless it does; its pid, and what it was told when it was made."""
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
            self._tasks.spawn(self._run(), "hosting")
        return os.getpid(), self._site

    async def ping(self) -> int:
        return os.getpid()

    async def over(self) -> None:
        """Returns when it was stopped; raises what it failed by."""
        assert self._over is not None, "it has begun"
        await self._over  # unbounded on purpose: its death ends it

    async def stop(self) -> None:
        """Leave the fleet, with all replicas of this node."""
        await self._tasks.stop()
        if self._backend is not None:
            await self._backend.stop()
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _failed(self, error: BaseException) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)

    async def _run(self) -> None:
        site, state_dir = self._site, Path(self._site.state_dir)
        await self._follow(state_dir)
        self._tasks.spawn(self._look_on(state_dir), "signs that it looks")
        totals = await asyncio.to_thread(totals_of, site)
        backend = RayBackend(site.deployment, site.node, state_dir, totals, site.environ, self._tell)
        await backend.adopt()
        self._backend = backend
        if not await self._has_host(backend):
            self._tasks.spawn(self._wait_for_host(backend), "host memory")
        source = SecretFiles(state_dir)
        machine = Machine(state_dir, site.environ, site.store, reach=site.reach, secret_source=source)
        machine.vaults.mkdir(parents=True, exist_ok=True, mode=0o700)
        store = open_store(site.store, SocketNetwork(), random.Random())
        await store.start()
        try:
            node, network = site.node.name, SocketNetwork()
            hosting = Hosting(site.deployment, node, store, backend, machine, named, tell=self._tell, network=network)
            await hosting.run()
        finally:
            await store.close()

    async def _has_host(self, backend: RayBackend) -> bool:
        """Have so much of this node's memory in Ray, all of it or none; whether Ray has given it yet."""
        site = self._site
        name, bundle = cluster.host_group(site.deployment, site.node.name), {cluster.MEMORY: site.host_bytes}
        try:
            if not await cluster.asked(cluster.is_group_of, name, bundle):  # an earlier `up` wanted another size
                await cluster.asked(cluster.remove_group, name)
            if site.host_bytes:
                group = await cluster.asked(cluster.make_group, name, [bundle], site.node.id)
                if not await cluster.asked(cluster.is_placed, group, HOST_S):
                    return False
        except (ValueError, TimeoutError):  # Ray's control store is away
            return False
        backend.totals[HOST] = site.host_bytes
        return True

    async def _wait_for_host(self, backend: RayBackend) -> None:
        """Others have it, or this node never had it: nobody is WARM here until Ray gives it."""
        name, size = self._site.node.name, f"{self._site.host_bytes / GIB:.2f} GiB"
        self._tell(f"Ray has not {size} of memory free on {name}: nobody is WARM there yet; `ray status` shows who has")
        while True:
            await asyncio.sleep(HOST_AGAIN_S)
            if await self._has_host(backend):
                break
        self._tell(f"{name} has {size} of host memory for WARM replicas")

    async def _follow(self, state_dir: Path) -> None:
        """An earlier agent that Ray was told to kill may only be stopped."""
        earlier = read_record(state_dir, NAME)
        if earlier is not None and earlier.pid != os.getpid():
            process = LocalProcesses(state_dir).adopt(earlier)
            if process is not None:
                ended = asyncio.Event()
                process.on_exit(lambda _status: ended.set())
                process.send(signal.SIGKILL)
                await asyncio.wait_for(ended.wait(), END_S)
        if (lock := take_lock(state_dir)) is None:
            raise UserError(f"{state_dir} is looked after by another process; stop that one")
        sign(lock, Holder(os.getpid(), detached=True, up=True))  # until its end: nobody else is to look after this node
        write_record(state_dir, Record.of_process(os.getpid(), NAME, NAME))

    async def _look_on(self, state_dir: Path) -> None:
        """For `holdfast status` of this node."""
        while True:
            beat(state_dir)
            await asyncio.sleep(BEAT_S)

    def _tell(self, line: str) -> None:
        say(line)


def totals_of(site: AgentSite) -> dict[str, int]:
    """What replicas may have together of each device of this node."""
    if site.node.resource == cluster.GPU:
        from holdfast.engines.torch.memory_plan import usable_bytes  # loads numpy

        found = look()
        gpus = found.gpus[: site.node.devices]
        if len(gpus) < site.node.devices or not all(sizes_of(gpus)):
            raise UserError(f"Ray counts {site.node.devices} GPUs on {site.node.name}, and {found.why or len(gpus)}")
        return {gpu: usable_bytes(size) for gpu, size in zip(gpus, sizes_of(gpus), strict=True)}
    each = site.device_bytes or free_host_bytes() // 2 // site.node.devices
    return {f"host-{number + 1}": each for number in range(site.node.devices)}
