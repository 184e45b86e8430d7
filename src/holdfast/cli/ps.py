"""`holdfast ps` and `holdfast incidents`: what runs in one state directory, what died there, why, and what it cost.

Always true: of the supervisor the kernel's word goes first (the lock, a stopped process); silence alone is called
silence, not death.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from holdfast.cli.arguments import Asked, Json
from holdfast.cli.checks import readable
from holdfast.cli.down import joined
from holdfast.cli.failovers import cost, headline, last_failover, steps, when
from holdfast.cli.screen import Screen, tilde
from holdfast.cli.terminal import write_out
from holdfast.core.procfs import is_frozen, read_process
from holdfast.failover.journal import Term, read_terms
from holdfast.health.shown import ControlPage, Level, Verdict
from holdfast.settings import Environment
from holdfast.spec.settings import about
from holdfast.supervise.incidents import Incident, complete, read_incidents
from holdfast.supervise.lock import Holder, heard_unix_s, holder, last_holder
from holdfast.supervise.records import journals_dir, read_launch
from holdfast.supervise.standing import groups_of, with_groups
from holdfast.supervise.status import Status, look_closely
from holdfast.supervise.verdicts import decided, followed, remembered, with_verdicts
from holdfast.wire.net import SocketNetwork

DAY_S = 86_400.0
# It says every second that it looks; a starved machine may keep it from that for a few.
SILENT_S = 5.0
RESTARTED = "nothing is recorded or restarted"


class _Grouped(msgspec.Struct):
    """What of a launch says where a process belongs, whether or not it can be asked."""

    group: str = ""


class Ps(Asked, frozen=True):
    """`holdfast ps`."""

    json: Json = False
    node: Annotated[str, about("Show only this node, which `holdfast node` started here.")] = ""

    def run(self, env: Environment) -> int:
        state_dir = readable(env.state_dir)
        if self.node:
            state_dir = joined(state_dir, self.node)
        looked = asyncio.run(look_around(state_dir))
        return show_json(looked.statuses) if self.json else _show(state_dir, looked)


def show_json(found: Any) -> int:
    write_out(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    return 0


def _show(state_dir: Path, looked: Looked) -> int:
    screen, statuses = Screen(), looked.statuses
    if not statuses:
        screen.line(f"nothing runs in {tilde(state_dir)}; start with `holdfast up`")
        return 0
    incidents = incidents_by_now(state_dir, statuses)
    if holder(state_dir) is None and all(status.state == "dead" for status in statuses):
        heard_s = heard_unix_s(state_dir)
        since = f" at {when(heard_s)}" if heard_s is not None else ""
        what = f"nothing runs in {tilde(state_dir)}: all its processes ended{since} without `holdfast down`"
        screen.line(f"{what} (a closed terminal, a reboot); `{start_command(state_dir)}` starts it again")
        show_count(screen, incidents, time.time())
        return 0
    screen.table(statuses)
    show_groups(screen, statuses, incidents)
    if level := level_line(looked.level):
        screen.line(f"\n{level}", style="yellow")
    show_count(screen, incidents, time.time())
    if full := no_room(state_dir):
        screen.line(f"\n{full}", style="yellow")
    if any(status.role == "supervisor" for status in statuses):
        return 0  # it is not well, and told above
    if found := holder(state_dir):
        screen.line(f"\nsupervised by pid {found.pid}{', detached' if found.detached else ''}", style="dim")
    else:
        screen.line(f"\nno supervisor: nothing is restarted {adopts(state_dir)}", style="yellow")
    return 0


def no_room(state_dir: Path) -> str:
    """What it means that nothing can be written here, if that is so."""
    disk = os.statvfs(state_dir)
    if disk.f_bavail and (disk.f_favail or not disk.f_files):
        return ""
    return f"the disk of {tilde(state_dir)} is full: logs have gaps, and this output may be out of date"


@dataclass(frozen=True, slots=True)
class Looked:
    """What one look around a state directory found."""

    statuses: list[Status]  # of the supervisor too, if it does not look after them
    pages: dict[str, dict[str, Any]]  # what the processes' status pages say, by name
    control: ControlPage | None  # what the control that leads says; None: none runs here
    verdicts: list[Verdict]  # its own, or those that frontends go on with

    @property
    def level(self) -> Level | None:
        """As control says, or as frontends go on with."""
        decided_level = self.control.level if self.control is not None else None
        return decided_level or followed(list(self.pages.values()))


async def look_around(state_dir: Path) -> Looked:
    """Every process, engines with the group they belong to, what became of it, and what control decided of them."""
    found = await look_closely(state_dir, SocketNetwork())
    pages = {status.name: facts for status, facts in found}
    statuses = with_groups([status for status, _ in found], {name: _group_of(state_dir, name) for name in pages})
    trouble = supervisor_trouble(state_dir, time.time()) if statuses else None
    control = decided(list(pages.values()))
    verdicts = control.verdicts if control is not None else remembered(list(pages.values()))
    shown = with_verdicts(statuses, verdicts)
    return Looked([*shown, trouble] if trouble is not None else shown, pages, control, verdicts)


async def look_at_all(state_dir: Path) -> list[Status]:
    """The lines alone."""
    return (await look_around(state_dir)).statuses


def level_line(level: Level | None) -> str:
    """That service is degraded, if it is."""
    if level is None or not level.level:
        return ""
    return f"degradation level {level.level}: {level.reason}; `holdfast top` shows more"


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


# -- what died


class Incidents(Asked, frozen=True):
    """`holdfast incidents`, oldest first."""

    json: Json = False
    last: Annotated[int, about("Number of latest incidents to show (0: all that are kept, at most 100).", min=0)] = 20

    def run(self, env: Environment) -> int:
        statuses = asyncio.run(look_at_all(env.state_dir))
        incidents = incidents_by_now(env.state_dir, statuses)[-self.last :]
        return show_json(incidents) if self.json else _show_incidents(env.state_dir, incidents, statuses)


def _show_incidents(state_dir: Path, incidents: list[Incident], statuses: list[Status]) -> int:
    screen = Screen()
    trouble = [status.note for status in statuses if status.role == "supervisor"]
    if not trouble and statuses and holder(state_dir) is None:
        trouble = [f"none: {RESTARTED} {adopts(state_dir)}"]
    if not incidents:
        why = "" if trouble else ": nothing has failed"
        screen.line(f"no incidents in {tilde(state_dir)}{why}")
    for incident in incidents:
        screen.line(f"{when(incident.unix_s)}  {headline(incident)}")
        if facts := cost(incident):
            screen.steps(facts, "  ", "; ")
        if incident.failover:
            screen.steps(steps(incident.failover, incident.streams), "    ")
    for note in trouble:
        screen.line(f"supervisor: {note}", style="yellow")
    return 0


# -- whether anybody looks after it


def adopts(state_dir: Path) -> str:
    """Until what: the command that goes on with what a dead supervisor kept."""
    return f"until `{start_command(state_dir)}` adopts these processes"


def start_command(state_dir: Path) -> str:
    """Return the command that starts again what was kept here last."""
    last = last_holder(state_dir)
    return "holdfast up -f FILE" if last is not None and last.deployment else "holdfast up"


def supervisor_trouble(state_dir: Path, now_unix_s: float) -> Status | None:
    """The supervisor's line, if it does not look after what runs; None: it does, or there never was one."""
    found, heard_s = holder(state_dir), heard_unix_s(state_dir)
    if heard_s is None:
        return None
    since = f"since {when(heard_s)}"
    if found is None:
        return _line(0, "dead", heard_s, f"no supervisor {since}: {RESTARTED} {adopts(state_dir)}")
    if found.pid and _is_stopped(found.pid):
        told = f"it is stopped and has not checked its processes {since}: {RESTARTED}; resume: `kill -CONT {found.pid}`"
        return _line(found.pid, "stopped", heard_s, told)
    # Before it is up it may be busy with what nobody can do in pieces, such as a look at a model.
    if (found.up or found.lack) and now_unix_s - heard_s > SILENT_S:
        told = f"it runs but has not checked its processes {since}: {RESTARTED}; if that lasts, {_mend(found)}"
        return _line(found.pid, "silent", heard_s, told)
    return None


def _mend(found: Holder) -> str:
    if found.detached:
        return f"`kill -9 {found.pid}` and `holdfast up` replace it and keep the processes"
    return "restart it with `holdfast down` and `holdfast up`"


def _is_stopped(pid: int) -> bool:
    stat = read_process(pid)
    return stat is not None and (stat.state in "Tt" or is_frozen(pid))


def _line(pid: int, state: str, heard_s: float, note: str) -> Status:
    return Status("supervisor", "supervisor", pid, state, "", 0, note, entered_unix_s=heard_s)
