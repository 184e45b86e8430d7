"""What each kind of process does, from its launch settings: rooms are wired together here, and imported only as needed.

Always true: `on_ready` is called once, when others may rely on the process; when `stop` is set it leaves in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.launch import FrontendLaunch, Launch, StoreLaunch, VaultLaunch, WorkerLaunch
from holdfast.core.address import parse_address
from holdfast.core.errors import UserError, settled
from holdfast.core.tasks import beside, done_before, first
from holdfast.supervise.records import journals_dir

if TYPE_CHECKING:
    from holdfast.core.ports import World
    from holdfast.engines.contract import ShadowEngine
    from holdfast.worker.process import Worker
    from holdfast.worker.shadow import Shadow

# A vault starts in 0.2 s; on a swamped machine in a few.
VAULT_READY_S = 30.0

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


async def _run_store(launch: StoreLaunch, stop: asyncio.Event, on_ready: OnReady) -> None:
    from holdfast.store.serve import serve
    from holdfast.wire.net import SocketNetwork

    durable = Path(launch.state_dir) / "store.db"
    ready = lambda bound: on_ready({"address": str(bound)})  # noqa: E731
    serving = serve(parse_address(launch.address), durable, SocketNetwork(), on_ready=ready)
    await done_before(stop, serving, "store")


async def _run_vault(launch: VaultLaunch, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Keeper and vault, started again when both died, until asked to stop."""
    from holdfast.memory.client.calls import open_connection
    from holdfast.memory.vault.launch import VaultProcesses
    from holdfast.memory.vault.settings import VaultSettings
    from holdfast.supervise.records import forget_parts, write_parts

    settings = VaultSettings(launch.device, launch.socket_path, launch.budget_bytes)
    vault = VaultProcesses(settings, on_members=lambda pids: write_parts(Path(launch.state_dir), launch.name, pids))
    vault.start()
    try:
        async with beside(vault.watch(), "watch") as watching:
            connection, _ = await open_connection(
                launch.socket_path, f"{launch.name}-{time.monotonic_ns()}", -1, VAULT_READY_S, _ignore, _ignore
            )
            connection.close()
            on_ready({"address": f"unix://{launch.socket_path}"})
            await first((stop.wait(),), (watching,))
            if not stop.is_set():
                raise UserError(f"the vault of {launch.device} ended; its log says why")
    finally:
        vault.stop()
        forget_parts(Path(launch.state_dir), launch.name)


def _ignore(_: object) -> None:
    """News for a connection that only asks whether anybody is there."""


async def _run_worker(launch: WorkerLaunch, stop: asyncio.Event, on_ready: OnReady) -> None:
    from holdfast.cli.engines import make_engine
    from holdfast.store.opening import open_store
    from holdfast.wire.world import real_world
    from holdfast.worker.beat import BeatThread
    from holdfast.worker.process import Worker, WorkerSettings
    from holdfast.worker.status import ProbeSettings

    world = real_world()
    with settled():
        settings = WorkerSettings(
            launch.namespace(),
            parse_address(launch.address),
            parse_address(launch.beat_address),
            parse_address(launch.status_address) if launch.status_address else None,
            launch.drain_s,
            launch.group if launch.lock else "",
            launch.engine_id,
            launch.wake_s,
            ProbeSettings(launch.starting_ready, launch.health_endpoints, launch.engine_token),
            launch.name,
            launch.status_any,
            launch.advertise,
        )
        store = open_store(launch.store, world.network, world.rng)
        made = await asyncio.to_thread(make_engine, launch, world.rng)
    await store.start()
    try:
        worker = Worker(made.engine, made.card, made.tokenizer, settings, store, world, BeatThread)
        async with made.chaos(worker.sessions.reset_connections):
            await (_shadow(launch, worker, made.shadow(), world) if launch.lock else worker).run(stop, on_ready)
    finally:
        await store.close()


def _shadow(launch: WorkerLaunch, worker: Worker, engine: ShadowEngine, world: World) -> Shadow:
    from holdfast.failover.opening import open_lock
    from holdfast.worker.shadow import Shadow, ShadowSettings

    if not launch.group:
        raise UserError("--lock needs --group: the name that this engine and its standbys share")
    journals = journals_dir(Path(launch.state_dir), launch.group)
    lock = open_lock(launch.lock, launch.name, world, launch.lock_token)
    return Shadow(worker, engine, lock, ShadowSettings(journals, launch.name, launch.load_s))


async def _run_frontend(launch: FrontendLaunch, stop: asyncio.Event, on_ready: OnReady) -> None:
    from holdfast.cli.siblings import other_pages
    from holdfast.frontend.gate import Gate
    from holdfast.frontend.process import FrontendSettings, run_frontend
    from holdfast.store.opening import open_store
    from holdfast.streams.directory import KnownSettings
    from holdfast.streams.patience import HoldSettings
    from holdfast.wire.http.request import HttpLimits
    from holdfast.wire.http.server import HttpPatience
    from holdfast.wire.world import real_world

    world = real_world()
    with settled():
        settings = FrontendSettings(
            deployment=launch.deployment,
            address=parse_address(launch.address),
            status_address=parse_address(launch.status_address) if launch.status_address else None,
            gate=Gate(frozenset(launch.api_keys), frozenset(launch.cors_origins)),
            holds=HoldSettings(hold_s=launch.hold_s, queue_s=launch.queue_s, stand_in_after_s=launch.stand_in_after_s),
            known=KnownSettings(frozenset(launch.models), launch.known_s),
            limits=HttpLimits(body_bytes_max=launch.body_bytes_max),
            patience=HttpPatience(request_s=launch.request_s, unread_s=launch.unread_s),
            drain_s=launch.drain_s,
            access_log=launch.access_log,
            name=launch.name,
        )
        store = open_store(launch.store, world.network, world.rng)
    await store.start()
    try:
        others = partial(other_pages, Path(launch.state_dir), launch.name, world.network)
        await run_frontend(settings, store, world, stop, on_ready, others=others)
    finally:
        await store.close()
