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
from holdfast.health.history import WorkerError
from holdfast.supervise.records import Record, read_records
from holdfast.supervise.status_client import get_facts

ANSWER_S = 1.0  # a live process answers in milliseconds; a person waits at most this long

_ORDER = {"store": 0, "vault": 1, "server": 1, "keeper": 1, "worker": 2, "frontend": 3, "control": 4}


class Status(msgspec.Struct, frozen=True):
    """One line of `holdfast status`."""

    role: str
    name: str
    pid: int
    # starting, ready, no_worker, not_admitted, draining, stopped, silent, backing off, crash loop, refused, unkillable,
    # dead;
    # of an engine in a group also its lifecycle: standby, waking, active; and asleep: it takes no part
    state: str
    address: str
    streams: int
    note: str = ""
    failures: int = 0  # in a row
    retry_in_s: float | None = None  # until the next try, if it waits for one
    group: str = ""  # the engines of which one is active and the others stand by
    engine_id: int | None = None
    lifecycle: str = ""  # init, standby, waking, active, draining
    epoch: int | None = None
    entered_unix_s: float | None = None  # when it came into its state
    failover: dict[str, Any] | None = None  # how this active took over, in milliseconds since the other's death
    metrics: str = ""  # where a scrape finds its metrics
    seams: list[dict[str, Any]] | None = None  # of a frontend: what workers' failures were to its streams
    health: str = ""  # of a worker, as control decided: a word, its share of traffic, and why it is not all
    weight: float | None = None
    health_reason: str = ""
    instance: str = ""  # of a worker: which of those that had its name it is
    errors: list[WorkerError] | None = None  # of a worker: its last ones, the oldest first; None: no control says


Page = tuple[Status, dict[str, Any]]  # of one process: its line, and all that its status page says


async def look(state_dir: Path, network: Network, bound_s: float = ANSWER_S) -> list[Status]:
    """Everything that runs, or should. All are asked at once."""
    return [status for status, _ in await look_closely(state_dir, network, bound_s)]


async def look_closely(state_dir: Path, network: Network, bound_s: float = ANSWER_S) -> list[Page]:
    """As `look`, with every page."""
    records = sorted(read_records(state_dir), key=_place)
    return list(await asyncio.gather(*(_look_at(record, network, bound_s) for record in records)))


def _place(record: Record) -> tuple[int, int, str]:
    return _ORDER.get(record.role, len(_ORDER)), len(record.name), record.name


async def _look_at(record: Record, network: Network, bound_s: float) -> Page:
    state = kernel_state(record)
    facts: dict[str, Any] = {}
    if state == "ready" and record.status:
        found = await get_facts(parse_address(record.status), network, bound_s)
        # Who just left closes its page a moment before it ends.
        facts = found if found is not None else {"status": "silent" if record.alive else "dead"}
        state = shown_state(facts)
    # Event loops of one machine share the kernel's monotonic clock.
    retry_in_s = max(0.0, record.retry_s - asyncio.get_running_loop().time()) if record.retry_s else None
    status = Status(
        record.role,
        record.name,
        record.pid,
        state,
        record.address,
        count(facts.get("streams")) or 0,
        _note(record, facts),
        record.failures,
        retry_in_s,
        str(facts.get("group") or ""),
        facts.get("engine_id") if facts.get("group") else None,
        str(facts.get("state") or ""),
        facts.get("epoch") or None,
        facts.get("entered_unix_s"),
        facts.get("failover") or None,
        metrics_address(record),
        seams_of(facts.get("seams")),
        instance=record.instance,
    )
    return status, facts


def count(value: object) -> int | None:
    """A count, as a page says it; None: it says none, or is of a version that says something else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def seams_of(value: object) -> list[dict[str, Any]] | None:
    """What a frontend's page says of failures, as far as it can be counted; None: it says nothing."""
    if not isinstance(value, list):
        return None
    numbers = ("streams", "lost", "replayed", "recomputed", "worst_gap_ms")
    return [
        row
        for row in value
        if isinstance(row, dict) and all(isinstance(row.get(number, 0), int | float) for number in numbers)
    ]


def _note(record: Record, facts: dict[str, Any]) -> str:
    notes = [record.note or ("" if facts.get("ready") is True else str(facts.get("reason") or ""))]
    notes.append(str(facts.get("unwritten") or ""))
    return "; ".join(note for note in notes if note)


def metrics_address(record: Record) -> str:
    """A scrape's URL; a frontend's metrics are at its own address, whatever page it keeps for this machine."""
    where = record.address if record.role == "frontend" else record.status
    url = web_address(where) if where else ""
    return f"{url}/metrics" if url.startswith("http://") else ""


def shown_state(facts: dict[str, Any]) -> str:
    """The word a process has for itself; for an engine of a group its place in the lifecycle, if it says no more."""
    status, lifecycle = str(facts.get("status", "ready")), str(facts.get("state") or "")
    if facts.get("asleep") is True and lifecycle == "standby" and status in ("ready", "standby"):
        return "asleep"
    return lifecycle if lifecycle and facts.get("group") and status == "ready" else status


def kernel_state(record: Record) -> str:
    """What can be known without asking the process."""
    if record.pid == 0:
        return record.state
    stat = read_process(record.pid)
    if stat is None or not record.alive:
        return "dead"
    return "stopped" if stat.state in "Tt" else record.state


def is_reachable(address: str) -> bool:
    """Return whether other machines may reach what listens at the address."""
    parsed = parse_address(address)
    if not isinstance(parsed, TcpAddress):
        return False
    return not (parsed.host in ("localhost", "::1") or parsed.host.startswith("127."))


def web_address(address: str, host: str = "", *, bound: bool = False) -> str:
    """A frontend's address as people type it; one that listens everywhere is reached at this machine. `bound`: as it
    listens, so that it is seen who may reach it."""
    parsed = parse_address(address)
    if not isinstance(parsed, TcpAddress):
        return address
    everywhere = {} if bound else {"0.0.0.0": "127.0.0.1", "::": "::1"}
    shown = host or everywhere.get(parsed.host, parsed.host)
    return str(TcpAddress(shown, parsed.port)).replace("tcp://", "http://")
