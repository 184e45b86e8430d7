"""`holdfast status` and `holdfast get incidents` show which processes run in one state directory, which died there,
why, and what that cost.

Always true: what the kernel reports about the supervisor (its lock, a stopped process) overrides other sources; a
supervisor that only does not report is called silent, not dead.
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

from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.screen import Screen, tilde
from holdfast.cli.terminal import write_out
from holdfast.core.procfs import is_frozen, read_process
from holdfast.failover.journal import Term, read_terms
from holdfast.health.status_page import ControlPage, LevelShown, VerdictShown
from holdfast.settings import Environment
from holdfast.spec.launch import RecordedLaunch
from holdfast.spec.settings import about
from holdfast.supervise.engine_groups import EngineGroup, groups_of, timeline, with_groups
from holdfast.supervise.incidents import Incident, complete, read_incidents
from holdfast.supervise.lock import Holder, heard_unix_s, holder, last_holder
from holdfast.supervise.records import journals_dir, read_launch
from holdfast.supervise.status import Status, look_closely
from holdfast.supervise.verdicts import decided, followed, remembered, with_verdicts
from holdfast.wire.net import SocketNetwork

DAY_S = 86_400.0
# A supervisor reports every second that it checks its processes; on an overloaded machine reports may be late.
SILENT_S = 5.0
RESTARTED = "nothing is recorded or restarted"


def show_json(found: Any) -> int:
    write_out(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    return 0


def show_processes(state_dir: Path, looked: LocalState) -> int:
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
        return 0  # the table above shows its problem
    if found := holder(state_dir):
        screen.line(f"\nsupervised by pid {found.pid}{', detached' if found.detached else ''}", style="dim")
    else:
        screen.line(f"\nno supervisor: nothing is restarted {adopts(state_dir)}", style="yellow")
    return 0


def no_room(state_dir: Path) -> str:
    """Return the consequences of a full disk; "" if it is not full."""
    disk = os.statvfs(state_dir)
    if disk.f_bavail and (disk.f_favail or not disk.f_files):
        return ""
    return f"the disk of {tilde(state_dir)} is full: logs have gaps, and this output may be out of date"


@dataclass(frozen=True, slots=True)
class LocalState:
    """The processes of a state directory at one moment."""

    statuses: list[Status]  # includes the supervisor if it does not check its processes
    pages: dict[str, dict[str, Any]]  # the processes' status pages, by name
    control: ControlPage | None  # page of the leading control; None: none runs here
    verdicts: list[VerdictShown]  # control's, or the last ones that frontends know

    @property
    def level(self) -> LevelShown | None:
        """Return the degradation level that control decided, or else the last one that frontends know."""
        decided_level = self.control.level if self.control is not None else None
        return decided_level or followed(list(self.pages.values()))


async def look_around(state_dir: Path) -> LocalState:
    """Return every process with its group, its state, and control's verdict about it."""
    found = await look_closely(state_dir, SocketNetwork())
    pages = {status.name: facts for status, facts in found}
    groups = {name: RecordedLaunch.of(read_launch(state_dir, name)).group for name in pages}
    statuses = with_groups([status for status, _ in found], groups)
    trouble = supervisor_trouble(state_dir, time.time()) if statuses else None
    control = decided(list(pages.values()))
    verdicts = control.verdicts if control is not None else remembered(list(pages.values()))
    shown = with_verdicts(statuses, verdicts)
    return LocalState([*shown, trouble] if trouble is not None else shown, pages, control, verdicts)


async def look_at_all(state_dir: Path) -> list[Status]:
    return (await look_around(state_dir)).statuses


def level_line(level: LevelShown | None) -> str:
    """Return a line about the degradation level; "" if the service is not degraded."""
    if level is None or not level.level:
        return ""
    return f"degradation level {level.level}: {level.reason}; `holdfast status --watch` shows more"


def incidents_by_now(state_dir: Path, statuses: Sequence[Status]) -> list[Incident]:
    """Return the incidents that the supervisor recorded, completed with later facts."""
    terms: dict[str, list[Term]] = {}
    incidents = read_incidents(state_dir)
    for group in {incident.group for incident in incidents if incident.group}:
        with contextlib.suppress(OSError):
            terms[group] = read_terms(journals_dir(state_dir, group))
    return [complete(incident, statuses, terms.get(incident.group, [])) for incident in incidents]


def show_groups(screen: Screen, statuses: Sequence[Status], incidents: Sequence[Incident]) -> None:
    """Show, below the table, the leader of each group and its last failover."""
    groups = groups_of(statuses)
    if groups:
        screen.line()
    for group in groups:
        screen.line(str(group))
        if failover := last_failover(group, incidents):
            screen.line(f"  {failover.line}")
            screen.steps(failover.facts, "    ", "; ")
            screen.steps(failover.steps, "    ")


def show_count(screen: Screen, incidents: Sequence[Incident], now_s: float) -> None:
    if lately := sum(incident.unix_s > now_s - DAY_S for incident in incidents):
        noun = "incident" if lately == 1 else "incidents"
        screen.line(f"\n{lately} {noun} in the last 24 hours: `holdfast get incidents`", style="yellow")


# -- what died


class IncidentsCommand(CommandOptions, frozen=True):
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


# -- whether the supervisor checks its processes


def adopts(state_dir: Path) -> str:
    """Return "until …" with the command that adopts a dead supervisor's processes."""
    return f"until `{start_command(state_dir)}` adopts these processes"


def start_command(state_dir: Path) -> str:
    """Return the command that restarts the last deployment of this directory."""
    last = last_holder(state_dir)
    return "holdfast up -f FILE" if last is not None and last.deployment else "holdfast up"


def supervisor_trouble(state_dir: Path, now_unix_s: float) -> Status | None:
    """Return the supervisor's line if it does not check its processes; None if it does, or none ever ran."""
    found, heard_s = holder(state_dir), heard_unix_s(state_dir)
    if heard_s is None:
        return None
    since = f"since {when(heard_s)}"
    if found is None:
        return _line(0, "dead", heard_s, f"no supervisor {since}: {RESTARTED} {adopts(state_dir)}")
    stat = read_process(found.pid) if found.pid else None
    if stat is not None and (stat.state in "Tt" or is_frozen(found.pid)):
        note = f"it is stopped and has not checked its processes {since}: {RESTARTED}; resume: `kill -CONT {found.pid}`"
        return _line(found.pid, "stopped", heard_s, note)
    # During its start it may be busy with work that cannot be interrupted, such as examining a model.
    if (found.up or found.lack) and now_unix_s - heard_s > SILENT_S:
        note = f"it runs but has not checked its processes {since}: {RESTARTED}; if that lasts, {_mend(found)}"
        return _line(found.pid, "silent", heard_s, note)
    return None


def _mend(found: Holder) -> str:
    if found.detached:
        return f"`kill -9 {found.pid}` and `holdfast up` replace it and keep the processes"
    return "restart it with `holdfast down` and `holdfast up`"


def _line(pid: int, state: str, heard_s: float, note: str) -> Status:
    return Status("supervisor", "supervisor", pid, state, "", 0, note, entered_unix_s=heard_s)


# -- failovers and other incidents as text

_TAKEN = {"wrong-answer": "was quarantined", "crawling": "was drained", "device-sick": "was drained"}
_ZEROS = {
    "last token": "from its last token",
    "successor's lock": "from its successor's lock",
    "woken": "from when it was woken",
}


@dataclass(frozen=True, slots=True)
class FailoverText:
    """A failover as text: a summary line, its outcome, and its steps."""

    line: str
    facts: list[str]
    steps: list[str]


def last_failover(group: EngineGroup, incidents: Sequence[Incident]) -> FailoverText | None:
    """Return how the current active engine became active: by a failover or from sleep; None if it was the first."""
    ours = [i for i in incidents if i.group == group.name and i.epoch and (i.successor or group.active is None)]
    seen, shown = ours[-1] if ours else None, group.failover
    is_newer = shown is not None and (seen is None or float(shown.get("unix_s") or 0.0) > seen.process_ended_s)
    if shown is not None and is_newer and (seen is None or shown.get("from_pid") != seen.pid):
        if shown.get("woke") is True:
            assert group.active is not None, "its page said this"
            return FailoverText(f"woke {_when(shown.get('unix_s'))}: {group.active.name} leads", [], steps(shown, 0))
        line = f"last failover {_when(shown.get('unix_s'))}: {_unseen(shown, group)}"
        return FailoverText(line, _kv(shown), steps(shown))
    if seen is None or _started_again(group, seen):
        return None
    timed = seen.failover or {}
    line = f"last failover {_when(seen.process_ended_s)}: {headline(seen)}"
    return FailoverText(line, [*cost(seen), *_kv(timed)], steps(timed, seen.streams))


def headline(incident: Incident) -> str:
    """Return which process ended, and why."""
    if incident.verdict:
        also = f" (and {', '.join(incident.also)})" if incident.also else ""
        return f"{incident.name}{also} {_TAKEN.get(incident.verdict, 'lost its traffic')}: {incident.why}"
    part = f" ({incident.part})" if incident.part else ""
    times = f", {incident.times} times in a row" if incident.times > 1 else ""
    how = {"exited with 0": "exited by itself", "ended": "ended; how is not known"}.get(incident.why)
    how = how or f"died: {incident.why}"
    return f"{incident.name}{part} {how}{times}"


def cost(incident: Incident) -> list[str]:
    """Return the outcome: what happened to its streams, which engine took over, and when the process was back."""
    said = [f"{incident.successor} took over"] if incident.successor else []
    if incident.streams:
        gap = f", worst gap {span(incident.gap_ms)}" if incident.gap_ms is not None else ""
        said.append(f"{_count(incident.streams, 'stream')} went on{_targets(incident.to)}{gap}")
    if incident.lost:
        said.append(f"{_count(incident.lost, 'stream')} lost")
    if incident.streams == 0 and not incident.lost:
        said.append("no stream was on it")
    if incident.replayed:
        said.append(f"{_count(incident.replayed, 'token')} replayed")
    if incident.recomputed:
        said.append(f"{_count(incident.recomputed, 'token')} computed again")
    if incident.back_after_s is not None:
        said.append(f"{incident.name} back after {span(incident.back_after_s * 1000)}")
    return said


def _targets(to: dict[str, int]) -> str:
    """Return where streams continued, the worker with the most of them first."""
    most = sorted(to.items(), key=lambda one: (-one[1], one[0]))
    return " at " + ", ".join(f"{name} ({streams})" if len(most) > 1 else name for name, streams in most) if to else ""


def steps(failover: dict[str, Any], streams: int | None = None) -> list[str]:
    """Return the steps of a failover with their times. Leave out the first token if no stream waited: it then came with
    the next request."""
    happened = [(words, at_ms) for words, at_ms in timeline(failover) if words != "died"]
    if streams == 0:
        happened = [(words, at_ms) for words, at_ms in happened if words != "first token"]
    zero = next((words for part, words in _ZEROS.items() if part in str(failover.get("zero"))), "from its end")
    spans = [f"{words} {span(at_ms)}" for words, at_ms in happened]
    return [f"{zero}: {spans[0]}", *spans[1:]] if spans else []


def when(unix_s: float) -> str:
    """Return the time in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def span(at_ms: float) -> str:
    """Return the duration in milliseconds, or in seconds if it is a second or more."""
    if at_ms == 0.0:
        return "0"
    return f"{at_ms:.1f} ms" if at_ms < 1000.0 else f"{at_ms / 1000.0:.2f} s"


def _started_again(group: EngineGroup, seen: Incident) -> bool:
    """Return True if the deployment was stopped and started after the incident."""
    active = group.active
    if active is None or group.failover is not None or active.failover is None:
        return False
    return float(active.failover.get("unix_s") or 0.0) > seen.process_ended_s and seen.successor != active.name


def _unseen(failover: dict[str, Any], group: EngineGroup) -> str:
    """Return the text for a change of leader that no supervisor recorded: a handover if the old leader is alive."""
    engine, pid = str(failover.get("from_engine") or "another"), failover.get("from_pid")
    if any(member.pid == pid and member.state != "dead" for member in group.members):
        return f"{engine} handed over"
    return f"{engine} ended; no supervisor saw why"


def _kv(failover: dict[str, Any]) -> list[str]:
    if failover.get("why_empty"):
        return [f"no KV kept: {failover['why_empty']}"]
    blocks = failover.get("blocks")
    return [f"{_count(blocks, 'block')} of KV kept"] if isinstance(blocks, int) else []


def _when(unix_s: object) -> str:
    return when(float(unix_s)) if isinstance(unix_s, int | float) else "at a time not known"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
