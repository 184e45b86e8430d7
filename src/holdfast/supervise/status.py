"""What runs in one state directory, as a person should see it: records, the kernel's word and the status pages.

Always true: a status is derived at the moment of asking and never stored; a process that does not answer within the
bound is shown as what the kernel says of it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.address import TcpAddress, parse_address
from holdfast.core.ports import Network
from holdfast.core.procfs import read_process
from holdfast.supervise.asking import ask
from holdfast.supervise.records import Record, read_records

ANSWER_S = 1.0  # a live process answers in milliseconds; a person waits at most this long

_ORDER = {"store": 0, "worker": 1, "frontend": 2}


class Status(msgspec.Struct, frozen=True):
    """One line of `holdfast ps`."""

    role: str
    name: str
    pid: int
    state: str  # starting, ready, no_worker, not_admitted, draining, stopped, silent, backing off, dead
    address: str
    streams: int
    note: str = ""


async def look(state_dir: Path, network: Network, bound_s: float = ANSWER_S) -> list[Status]:
    """Everything that runs, or should. All are asked at once."""
    records = sorted(read_records(state_dir), key=_place)
    return list(await asyncio.gather(*(_look_at(record, network, bound_s) for record in records)))


def _place(record: Record) -> tuple[int, int, str]:
    return _ORDER.get(record.role, len(_ORDER)), len(record.name), record.name


async def _look_at(record: Record, network: Network, bound_s: float) -> Status:
    state = kernel_state(record)
    facts: dict[str, Any] = {}
    if state == "ready" and record.status:
        found = await ask(parse_address(record.status), network, bound_s)
        facts = found if found is not None else {"status": "silent"}
        state = str(facts.get("status", state))
    note = record.note or str(facts.get("reason") or "")
    return Status(record.role, record.name, record.pid, state, record.address, int(facts.get("streams", 0)), note)


def kernel_state(record: Record) -> str:
    """What can be known without asking the process."""
    if record.pid == 0:
        return record.state
    stat = read_process(record.pid)
    if stat is None or not record.alive:
        return "dead"
    return "stopped" if stat.state in "Tt" else record.state


def web_address(address: str, host: str = "") -> str:
    """A frontend's address as people type it; one that listens everywhere is reached at this machine."""
    parsed = parse_address(address)
    if not isinstance(parsed, TcpAddress):
        return address
    shown = host or {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(parsed.host, parsed.host)
    return str(TcpAddress(shown, parsed.port)).replace("tcp://", "http://")
