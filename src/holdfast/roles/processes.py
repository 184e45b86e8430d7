"""What each kind of process does, from its launch settings: rooms are wired together here, and imported only as needed.

Always true: `on_ready` is called once, when others may rely on the process; when `stop` is set it leaves in order.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast.core.address import parse_address
from holdfast.core.errors import UserError, refuse_user_errors
from holdfast.core.ports import Network
from holdfast.core.tasks import beside, done_before, first
from holdfast.spec.health import HealthSettings
from holdfast.spec.launch import (
    ControlLaunch,
    FrontendLaunch,
    Launch,
    RayLaunch,
    StoreLaunch,
    VaultLaunch,
    WorkerLaunch,
)
from holdfast.supervise.records import journals_dir, read_record, read_records
from holdfast.supervise.status_client import get_page

if TYPE_CHECKING:
    from holdfast.core.ports import World
    from holdfast.engines.contract import FailoverEngine
    from holdfast.health.device_faults import Source
    from holdfast.worker.failover_worker import FailoverWorker
    from holdfast.worker.process import Worker

# A vault starts in 0.2 s; where every process waits long for a CPU, in a quarter of a minute.
VAULT_READY_S = 60.0
ANSWER_S = 0.5  # a live frontend answers in milliseconds; a scrape waits for seconds

OnReady = Callable[[dict[str, Any]], None]


async def run_role(launch: Launch, stop: asyncio.Event, on_ready: OnReady) -> None:
    match launch:
        case StoreLaunch():
            await _run_store(launch, stop, on_ready)
        case VaultLaunch():
            await _run_vault(launch, stop, on_ready)
        case WorkerLaunch():
            await _run_worker(launch, stop, on_ready)
        case FrontendLaunch():
            await _run_frontend(launch, stop, on_ready)
        case ControlLaunch():
            await _run_control(launch, stop, on_ready)
        case RayLaunch():
            from holdfast.roles.ray.watcher import run_watcher

            await run_watcher(launch, stop, on_ready)


async def _run_store(launch: StoreLaunch, stop: asyncio.Event, on_ready: OnReady) -> None:
    from holdfast.store.server import serve
    from holdfast.wire.net import SocketNetwork

    durable = Path(launch.state_dir) / "store.db"
    ready = lambda bound: on_ready({"address": str(bound)})  # noqa: E731
    serving = serve(parse_address(launch.address), durable, SocketNetwork(), ready)
    await done_before(stop, serving, "store")


async def _run_vault(launch: VaultLaunch, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Keeper and vault, started again when both died, until asked to stop."""
    from holdfast.memory.client.calls import open_connection
    from holdfast.memory.vault.launch import VaultProcesses
    from holdfast.memory.vault.settings import VaultSettings
    from holdfast.supervise.records import forget_parts, write_parts

    budgets = launch.budget_bytes, launch.host_budget_bytes
    settings = VaultSettings(launch.device, launch.socket_path, *budgets, leased=launch.leased)
    vault = VaultProcesses(settings, on_members=lambda pids: write_parts(Path(launch.state_dir), launch.name, pids))
    vault.start()
    try:
        async with beside(vault.watch(), "watch") as watching:
            name = f"{launch.name}-{time.monotonic_ns()}"
            connection, _ = await open_connection(launch.socket_path, name, -1, VAULT_READY_S)
            connection.close()
            on_ready({"address": f"unix://{launch.socket_path}"})
            await first((stop.wait(),), (watching,))
            if not stop.is_set():
                raise UserError(f"the vault of {launch.device} ended; its log says why")
    finally:
        vault.stop()
        forget_parts(Path(launch.state_dir), launch.name)


async def _run_worker(launch: WorkerLaunch, stop: asyncio.Event, on_ready: OnReady) -> None:
    from holdfast.roles.devices import gpus_of
    from holdfast.roles.engines import make_engine
    from holdfast.store.opening import open_store
    from holdfast.wire.net import real_world
    from holdfast.worker.beat import BeatThread
    from holdfast.worker.process import Worker

    world = real_world()
    with refuse_user_errors():
        launch.check()
        store = open_store(launch.store, world.network, world.rng)
        made = await asyncio.to_thread(make_engine, launch, world.rng)
    launch = replace(launch, gpus=launch.gpus or await asyncio.to_thread(gpus_of, launch.failover))
    await store.start()
    try:
        worker = Worker(made.engine, made.card, made.tokenizer, launch, store=store, world=world, make_beats=BeatThread)
        async with made.chaos(worker.sessions.reset_connections, worker.delay_beats):
            leads = _failover_worker(launch, worker, made.failover_engine(), world) if launch.lock else worker
            await leads.run(stop, on_ready)
    finally:
        await store.close()


def _failover_worker(launch: WorkerLaunch, worker: Worker, engine: FailoverEngine, world: World) -> FailoverWorker:
    from holdfast.failover.opening import open_lock
    from holdfast.worker.failover_worker import FailoverWorker

    if not launch.group:
        raise UserError("--lock needs --group: the name that this engine and its standbys share")
    journals = journals_dir(Path(launch.state_dir), launch.group)
    lock = open_lock(launch.lock, launch.name, world, launch.lock_token)
    return FailoverWorker(worker, engine, lock, journals)


async def _run_frontend(launch: FrontendLaunch, stop: asyncio.Event, on_ready: OnReady) -> None:
    from holdfast.frontend.process import run_frontend
    from holdfast.roles.ports import await_port
    from holdfast.store.opening import open_store
    from holdfast.wire.net import real_world

    world = real_world()
    with refuse_user_errors():
        launch.check()
        store = open_store(launch.store, world.network, world.rng)
    await await_port(launch)
    await store.start()
    try:
        others = partial(other_pages, Path(launch.state_dir), launch.name, world.network)
        await run_frontend(launch, store, world, stop, on_ready, others=others)
    finally:
        await store.close()


async def _run_control(launch: ControlLaunch, stop: asyncio.Event, on_ready: OnReady) -> None:
    from holdfast.control.process import Control
    from holdfast.control.redis_stream import check_redis
    from holdfast.failover.opening import open_lock
    from holdfast.store.opening import open_store
    from holdfast.wire.net import real_world

    world = real_world()
    with refuse_user_errors():
        launch.check()
        check_redis(launch.events.redis)
        store = open_store(launch.store, world.network, world.rng)
        lock = open_lock(launch.elected_by(), launch.name, world, launch.lock_token)
    await store.start()
    try:
        await Control(launch, store, lock, world, fault_sources(launch.health)).run(stop, on_ready)
    finally:
        await store.close()


def fault_sources(settings: HealthSettings) -> list[Source]:
    """What tells of the faults of this machine's GPUs."""
    from holdfast.health.fault_sources import KernelLog, NvmlWatch

    nvml = [NvmlWatch(settings.nvml)] if settings.nvml else []
    return [*nvml, *([KernelLog(settings.kernel_log)] if settings.kernel_log else [])]


async def other_pages(state_dir: Path, name: str, network: Network) -> dict[str, bytes | None]:
    """Metrics of those who share `name`'s port, by name; None for one that does not answer."""
    own = read_record(state_dir, name)
    if own is None:
        return {}
    sharing = [r for r in read_records(state_dir) if (r.role, r.address) == ("frontend", own.address)]
    # One without a socket of its own cannot be told from those it shares the port with.
    others = [r for r in sharing if r.pid != os.getpid() and r.alive and r.status != r.address]
    asked = (get_page(parse_address(record.status), network, ANSWER_S, "/metrics") for record in others)
    return dict(zip((record.name for record in others), await asyncio.gather(*asked), strict=True))
