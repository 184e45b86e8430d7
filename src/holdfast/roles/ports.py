"""The port of a frontend: free, or that of others of its deployment, who share it.

Always true: a frontend never listens where a stranger does. The kernel would let it, of the same user, and each of the
two would get half of the other's requests.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from holdfast.core.address import TcpAddress, parse_address
from holdfast.core.errors import UserError
from holdfast.core.procfs import listens
from holdfast.spec.launch import FrontendLaunch
from holdfast.supervise.records import Record, read_records
from holdfast.wire.net import is_free

# Two frontends that start together find each other's port taken before they find each other written down.
LOOKS = 50
LOOK_S = 0.1


async def await_port(launch: FrontendLaunch) -> None:
    """Returns when it may listen there; UserError, if a stranger does."""
    address = parse_address(launch.address)
    if not isinstance(address, TcpAddress) or not address.port:
        return
    for _ in range(LOOKS):
        if await asyncio.to_thread(_may_listen, launch, address):
            return
        await asyncio.sleep(LOOK_S)
    whose = f"{address} is in use by another than {launch.deployment}"
    raise UserError(f"{whose}; stop what uses it, or choose another --port")


def _may_listen(launch: FrontendLaunch, address: TcpAddress) -> bool:
    if is_free(address):
        return True
    records = read_records(Path(launch.state_dir))
    return any(listens(record.pid, address.port) for record in records if _is_sibling(record, launch))


def _is_sibling(record: Record, launch: FrontendLaunch) -> bool:
    """One that is not ready, or cannot write, has not said whose it is; but it is in our directory."""
    ours = record.role == "frontend" and record.deployment in ("", launch.deployment)
    return ours and record.alive and record.pid != os.getpid()
