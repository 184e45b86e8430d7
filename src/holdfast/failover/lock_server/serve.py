"""Run a lock server until stopped: `serve_lock`, or `python -m holdfast.failover.lock_server.serve ADDRESS FILE`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from holdfast.core.address import Address, TcpAddress, parse_address
from holdfast.core.errors import UserError
from holdfast.core.ports import World
from holdfast.failover.lock_server.record import LockRecord
from holdfast.failover.lock_server.server import LockServer
from holdfast.wire.world import real_world

# A restarted server is back in well under a second; engines give up after two thirds of it at most.
WINDOW_S = 3.0
# Below it two thirds leave no room for a ping or two and a late scheduler.
WINDOW_S_MIN = 0.2


async def serve_lock(
    address: Address,
    state_path: Path,
    window_s: float,
    token: str,
    world: World,
    on_ready: Callable[[Address], None] | None = None,
) -> None:
    """Serve one lock until cancelled. `on_ready` is told the bound address once clients can connect.

    A cancelled server leaves its record: a holder comes back to the next one within `window_s`."""
    if not window_s >= WINDOW_S_MIN:
        raise UserError(f"a lock server's window must be {WINDOW_S_MIN:g} s or more, not {window_s:g} s")
    if isinstance(address, TcpAddress) and not token:
        raise UserError(f"a lock server on {address} needs a token: anyone who can connect could take the lock")
    record, unix_s = LockRecord(state_path), world.clock.unix_s
    server = LockServer(address, world.network, record, window_s=window_s, token=token, unix_s=unix_s)
    try:
        bound = await server.start()
    except OSError as error:
        server.close()
        raise UserError(f"the lock server cannot serve {address} with {state_path}: {error}") from error
    except BaseException:
        server.close()
        raise
    if on_ready is not None:
        on_ready(bound)
    await server.run()


async def _main(arguments: argparse.Namespace) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serve_lock(
            parse_address(arguments.address),
            arguments.file,
            arguments.window_s,
            arguments.token_file.read_text().strip() if arguments.token_file else "",
            real_world(),
            on_ready=lambda bound: print(f"ready {bound}", flush=True),
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m holdfast.failover.lock_server.serve")
    parser.add_argument("address", help="unix:///path or tcp://host:port")
    parser.add_argument("file", type=Path, help="where the server remembers who holds the lock")
    parser.add_argument("--window-s", type=float, default=WINDOW_S)
    # In a file: everybody can read a command line.
    parser.add_argument("--token-file", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        asyncio.run(_main(_arguments()))
    except (UserError, ValueError, OSError) as error:
        sys.exit(str(error))
