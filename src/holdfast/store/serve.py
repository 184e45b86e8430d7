"""Run the embedded store until stopped: `python -m holdfast.store.serve ADDRESS FILE`, or `serve` from elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from holdfast.core.address import Address, parse_address
from holdfast.core.errors import UserError
from holdfast.core.ports import Network
from holdfast.store.durable import DurableFile
from holdfast.store.server import CONNECTIONS_MAX, DEFAULT_SETTINGS, ServerSettings, StoreServer
from holdfast.wire.net import SocketNetwork


async def serve(
    address: Address,
    durable_path: Path,
    network: Network,
    *,
    settings: ServerSettings = DEFAULT_SETTINGS,
    on_ready: Callable[[Address], None] | None = None,
) -> None:
    """Serve until cancelled. `on_ready` is told the bound address once clients can connect."""
    _raise_descriptor_limit()
    server = StoreServer(address, network, DurableFile(durable_path), settings)
    try:
        bound = await server.start()
    except OSError as error:
        raise UserError(
            f"the store cannot listen on {address}: {error}; stop what uses it or choose another"
        ) from error
    if on_ready is not None:
        on_ready(bound)
    await server.run()


def _raise_descriptor_limit() -> None:
    """Each client is a descriptor; the usual soft limit of 1,024 is below what we promise to hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * CONNECTIONS_MAX if hard == resource.RLIM_INFINITY else min(2 * CONNECTIONS_MAX, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _main(address: str, durable_path: str) -> None:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serve(
            parse_address(address),
            Path(durable_path),
            SocketNetwork(),
            on_ready=lambda bound: print(f"ready {bound}", flush=True),
        )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m holdfast.store.serve ADDRESS FILE")
    try:
        asyncio.run(_main(sys.argv[1], sys.argv[2]))
    except (UserError, ValueError) as error:
        sys.exit(str(error))
