"""`holdfast ps`: what runs in one state directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.cli.failovers import last_failover
from holdfast.cli.screen import Screen, tilde
from holdfast.cli.supervision import supervisor_trouble
from holdfast.failover.journal import Term, read_terms
from holdfast.supervise.incidents import Incident, complete, read_incidents
from holdfast.supervise.lock import holder
from holdfast.supervise.records import journals_dir, read_launch
from holdfast.supervise.standing import groups_of, with_groups
from holdfast.supervise.status import Status, look
from holdfast.wire.net import SocketNetwork

DAY_S = 86_400.0


class _Grouped(msgspec.Struct):
    """What of a launch says where a process belongs, whether or not it can be asked."""

    group: str = ""


def run_ps(state_dir: Path, as_json: bool) -> int:
    statuses = asyncio.run(look_at_all(state_dir))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(statuses), indent=2).decode() + "\n")
        return 0
    screen = Screen()
    if not statuses:
        screen.line(f"nothing runs in {tilde(state_dir)}; start with `holdfast up`")
        return 0
    screen.table(statuses)
    incidents = incidents_by_now(state_dir, statuses)
    show_groups(screen, statuses, incidents)
    show_count(screen, incidents, time.time())
    if full := no_room(state_dir):
        screen.line(f"\n{full}", style="yellow")
    if any(status.role == "supervisor" for status in statuses):
        return 0  # it is not well, and told above
    if found := holder(state_dir):
        screen.line(f"\nsupervised by pid {found.pid}{', detached' if found.detached else ''}", style="dim")
    else:
        screen.line("\nno supervisor: nothing is restarted until `holdfast up` adopts these", style="yellow")
    return 0


def no_room(state_dir: Path) -> str:
    """What it means that nothing can be written here, if that is so."""
    disk = os.statvfs(state_dir)
    if disk.f_bavail and (disk.f_favail or not disk.f_files):
        return ""
    return f"no room on the disk of {tilde(state_dir)}: logs have gaps, and what is shown here may be out of date"


async def look_at_all(state_dir: Path) -> list[Status]:
    """Every process, engines with the group they belong to and what became of it; and their supervisor, if it does
    not look after them."""
    statuses = await look(state_dir, SocketNetwork())
    trouble = supervisor_trouble(state_dir, time.time()) if statuses else None
    grouped = with_groups(statuses, {status.name: _group_of(state_dir, status.name) for status in statuses})
    return [*grouped, trouble] if trouble is not None else grouped


def _group_of(state_dir: Path, name: str) -> str:
    try:
        return msgspec.json.decode(read_launch(state_dir, name) or b"{}", type=_Grouped).group
    except msgspec.DecodeError:
        return ""


def incidents_by_now(state_dir: Path, statuses: Sequence[Status]) -> list[Incident]:
    """What the supervisor wrote down, and what has become known since it last looked."""
    terms: dict[str, list[Term]] = {}
    incidents = read_incidents(state_dir)
    for group in {incident.group for incident in incidents if incident.group}:
        with contextlib.suppress(OSError):
            terms[group] = read_terms(journals_dir(state_dir, group))
    return [complete(incident, statuses, terms.get(incident.group, [])) for incident in incidents]


def show_groups(screen: Screen, statuses: Sequence[Status], incidents: Sequence[Incident]) -> None:
    """Below the table: who leads each group, and its last failover."""
    groups = groups_of(statuses)
    if groups:
        screen.line()
    for group in groups:
        screen.line(str(group))
        if told := last_failover(group, incidents):
            screen.line(f"  {told.line}")
            screen.steps(told.facts, "    ", "; ")
            screen.steps(told.steps, "    ")


def show_count(screen: Screen, incidents: Sequence[Incident], now_s: float) -> None:
    """Whether there is more to be read."""
    if lately := sum(incident.unix_s > now_s - DAY_S for incident in incidents):
        noun = "incident" if lately == 1 else "incidents"
        screen.line(f"\n{lately} {noun} in the last 24 hours: `holdfast incidents`", style="yellow")
