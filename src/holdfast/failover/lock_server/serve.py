"""Run a lock server until stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.core.address import Address, TcpAddress
from holdfast.core.errors import UserError
from holdfast.core.ports import World
from holdfast.failover.lock_server.record import LockRecord
from holdfast.failover.lock_server.server import LockServer

# Below it two thirds leave no room for a ping or two and a late scheduler.
WINDOW_S_MIN = 0.2


async def serve_lock(
    address: Address,
    state_path: Path,
    *,
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
