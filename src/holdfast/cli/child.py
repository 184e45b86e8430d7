"""Run one process from its launch settings: `python -m holdfast.cli.child ROLE JSON|@FILE [PARENT]`.

A file, because settings may hold API keys and everyone on the machine can read a command line.

The supervisor starts its processes this way; the `holdfast worker`, `frontend` and `store` commands end here too.
Kept free of typer and rich, so that a killed frontend is back in well under a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from holdfast.cli.launch import ROLES, FrontendLaunch, Launch, StoreLaunch, WorkerLaunch, role_of
from holdfast.core.address import parse_address
from holdfast.core.errors import UserError
from holdfast.supervise.records import Record, remove_record, run_dir, write_record

PR_SET_PDEATHSIG = 1

OnReady = Callable[[dict[str, Any]], None]


def main(argv: list[str]) -> int:
    if len(argv) not in (2, 3) or argv[0] not in ROLES:
        print(f"usage: python -m holdfast.cli.child {'|'.join(ROLES)} JSON|@FILE [PARENT]", file=sys.stderr)
        return 2
    settings = Path(argv[1][1:]).read_bytes() if argv[1].startswith("@") else argv[1]
    launch = msgspec.json.decode(settings, type=ROLES[argv[0]])
    return run(msgspec.structs.replace(launch, parent=int(argv[2])) if len(argv) == 3 else launch)


def run(launch: Launch) -> int:
    """Run a process until it is stopped; its exit status."""
    logging.basicConfig(
        level=launch.log_level.upper(), format=f"%(asctime)s {launch.name} %(levelname)s %(message)s", stream=sys.stderr
    )
    if launch.parent:
        die_with(launch.parent)
    run_dir(Path(launch.state_dir)).mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(launch))
    except (UserError, ValueError) as error:
        print(f"holdfast {role_of(launch)}: {error}", file=sys.stderr)
        return 1
    return 0


def die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent dies; exit now if it is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


async def _serve(launch: Launch) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    state_dir = Path(launch.state_dir)

    def on_ready(facts: dict[str, Any]) -> None:
        # Start-up garbage is kept for good: a collection over it in mid-stream would stall every stream.
        gc.collect()
        gc.freeze()
        write_record(state_dir, Record.of_this_process(launch.name, role_of(launch), facts))

    try:
        await _run_role(launch, stop, on_ready)
    except OSError as error:
        raise UserError(_explain(launch, error)) from error
    finally:
        remove_record(state_dir, launch.name)


async def _run_role(launch: Launch, stop: asyncio.Event, on_ready: OnReady) -> None:
    if isinstance(launch, StoreLaunch):
        await _run_store(launch, stop, on_ready)
    elif isinstance(launch, WorkerLaunch):
        await _run_worker(launch, stop, on_ready)
    else:
        await _run_frontend(launch, stop, on_ready)


async def _run_store(launch: StoreLaunch, stop: asyncio.Event, on_ready: OnReady) -> None:
    from holdfast.store.serve import serve
    from holdfast.wire.net import SocketNetwork

    durable = Path(launch.state_dir) / "store.db"
    serving = asyncio.ensure_future(
        serve(
            parse_address(launch.address),
            durable,
            SocketNetwork(),
            on_ready=lambda bound: on_ready({"address": str(bound)}),
        )
    )
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _run_worker(launch: WorkerLaunch, stop: asyncio.Event, on_ready: OnReady) -> None:
    from holdfast.cli.engines import make_engine
    from holdfast.store.opening import open_store
    from holdfast.wire.net import SocketNetwork
    from holdfast.worker.process import Worker, WorkerSettings

    rng = random.Random()
    network = SocketNetwork()
    made = make_engine(launch, rng)
    settings = WorkerSettings(
        launch.namespace(),
        parse_address(launch.address),
        parse_address(launch.beat_address),
        parse_address(launch.status_address),
        launch.drain_s,
    )
    store = open_store(launch.store, network, rng)
    await store.start()
    try:
        worker = Worker(made.engine, made.card, made.tokenizer, settings, store, network, rng)
        async with made.chaos(worker.sessions.reset_connections):
            await worker.run(stop, on_ready)
    finally:
        await store.close()


async def _run_frontend(launch: FrontendLaunch, stop: asyncio.Event, on_ready: OnReady) -> None:
    from holdfast.frontend.process import FrontendSettings, run_frontend
    from holdfast.migration.dispatcher import HoldSettings
    from holdfast.store.opening import open_store
    from holdfast.wire.http_request import HttpLimits
    from holdfast.wire.http_server import HttpPatience
    from holdfast.wire.net import SocketNetwork

    rng = random.Random()
    network = SocketNetwork()
    settings = FrontendSettings(
        deployment=launch.deployment,
        address=parse_address(launch.address),
        api_keys=frozenset(launch.api_keys),
        holds=HoldSettings(hold_s=launch.hold_s, stand_in_after_s=launch.stand_in_after_s),
        limits=HttpLimits(body_bytes_max=launch.body_bytes_max),
        patience=HttpPatience(request_s=launch.request_s, unread_s=launch.unread_s),
        drain_s=launch.drain_s,
    )
    store = open_store(launch.store, network, rng)
    await store.start()
    try:
        await run_frontend(settings, store, network, rng, stop, on_ready)
    finally:
        await store.close()


def _explain(launch: Launch, error: OSError) -> str:
    address = launch.address
    if error.errno == 98:
        return f"{address} is in use; stop what uses it, or choose another address or --port"
    if error.errno == 13:
        return f"no permission to listen on {address}; choose a port over 1023"
    return f"cannot listen on {address}: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
