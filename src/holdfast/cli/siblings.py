"""The other frontends of one port on this machine, found by their records and asked on their own sockets."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from holdfast.core.address import parse_address
from holdfast.core.ports import Network
from holdfast.supervise.asking import ask_page
from holdfast.supervise.records import read_record, read_records

ANSWER_S = 0.5  # a live frontend answers in milliseconds; a scrape waits for seconds


async def other_pages(state_dir: Path, name: str, network: Network) -> dict[str, bytes | None]:
    """Metrics of those who share `name`'s port, by name; None for one that does not answer."""
    own = read_record(state_dir, name)
    if own is None:
        return {}
    sharing = [r for r in read_records(state_dir) if (r.role, r.address) == ("frontend", own.address)]
    # One without a socket of its own cannot be told from those it shares the port with.
    others = [r for r in sharing if r.pid != os.getpid() and r.alive and r.status != r.address]
    asked = (ask_page(parse_address(record.status), network, ANSWER_S, "/metrics") for record in others)
    return dict(zip((record.name for record in others), await asyncio.gather(*asked), strict=True))
