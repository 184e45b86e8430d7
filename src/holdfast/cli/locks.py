"""`holdfast lock`: a lock server in the foreground, for engines that are elected over more than one machine.

Always true: a token is read from a file or the environment, never from a command line, which everybody can read; a
server that is stopped leaves its record, so that whoever holds the lock keeps it over a restart.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import Annotated

from holdfast.cli.arguments import Asked
from holdfast.cli.checks import own
from holdfast.cli.terminal import Terminal
from holdfast.core.errors import UserError
from holdfast.core.tasks import done_before
from holdfast.roles.small_files import read_small
from holdfast.settings import Environment
from holdfast.spec.settings import about


class Serve(Asked, frozen=True):
    """`holdfast lock serve`."""

    address: Annotated[
        str, about("Listen address, unix:///path or tcp://host:port (default: a socket in the state directory).")
    ] = ""
    state_file: Annotated[
        Path | None, about("File that records the lock's holder (default: in the state directory).")
    ] = None
    window_s: Annotated[
        float, about("Time after a restart during which only the last holder can take the lock again.", "s")
    ] = 3.0
    token_file: Annotated[
        Path | None, about("File with the token that clients must send (default: $HOLDFAST_LOCK_TOKEN).")
    ] = None

    def run(self, env: Environment) -> int:
        run = env.state_dir / "run"
        if not (self.address and self.state_file):
            own(env.state_dir)
            run.mkdir(exist_ok=True, mode=0o700)
        logging.basicConfig(level=env.log_level.upper(), format="%(asctime)s lock %(levelname)s %(message)s")
        where = self.address or f"unix://{run}/lock.sock"
        file = (self.state_file or run / "lock.state").absolute()
        try:
            asyncio.run(_serve(where, file, self.window_s, read_token(self.token_file, env.lock_token)))
        except ValueError as error:
            raise UserError(str(error)) from error
        return 0


async def _serve(where: str, state_file: Path, window_s: float, token: str) -> None:
    from holdfast.core.address import TcpAddress, parse_address
    from holdfast.failover.lock_server.serve import serve_lock
    from holdfast.wire.world import real_world

    address = parse_address(where)
    if isinstance(address, TcpAddress) and not token:
        raise UserError(f"anyone who can reach {where} could take the lock: give --token-file or $HOLDFAST_LOCK_TOKEN")
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = serve_lock(
        address,
        state_file,
        window_s=window_s,
        token=token,
        world=real_world(),
        on_ready=lambda bound: Terminal().line(f"ready: --lock lock+{bound} (Ctrl-C ends it)"),
    )
    if not await done_before(stop, serving, "lock server"):
        print("stopped; the holder keeps the lock if the server is back within the window", file=sys.stderr)


def read_token(path: Path | None, default: str = "") -> str:
    """What the file holds, without the line's end; UserError if there is nothing in it."""
    if path is None:
        return default
    try:
        token = read_small(path).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the token file {path} cannot be read: {error}") from error
    if not token:
        raise UserError(f"the token file {path} is empty")
    return token
