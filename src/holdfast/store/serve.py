"""Run the embedded store until stopped: `python -m holdfast.store.serve ADDRESS FILE`, or `serve` from elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from holdfast.core.address import Address, parse_address
from holdfast.core.errors import UserError
from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.ports import Network
from holdfast.store.durable import DurableFile
from holdfast.store.server import DEFAULT_SETTINGS, ServerSettings, StoreServer
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
    raise_descriptor_limit()
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
