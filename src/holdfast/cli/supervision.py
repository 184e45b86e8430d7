"""Whether the supervisor of one state directory looks after it, for `holdfast ps`; where it does not, since when what
stands in its records is old, and the mend.

Always true: the kernel's word goes first (the lock, a stopped process); silence alone is called silence, not death.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.cli.failovers import when
from holdfast.core.procfs import is_frozen, read_process
from holdfast.supervise.lock import Holder, heard_unix_s, holder
from holdfast.supervise.status import Status

# It says every second that it looks; a starved machine may keep it from that for a few.
SILENT_S = 5.0
RESTARTED = "nothing is written down or restarted"


def supervisor_trouble(state_dir: Path, now_unix_s: float) -> Status | None:
    """The supervisor's line, if it does not look after what runs; None: it does, or there never was one."""
    found, heard_s = holder(state_dir), heard_unix_s(state_dir)
    if heard_s is None:
        return None
    since = f"since {when(heard_s)}"
    if found is None:
        return _line(0, "dead", heard_s, f"no supervisor {since}: {RESTARTED} until `holdfast up` adopts these")
    if found.pid and _is_stopped(found.pid):
        told = f"it is stopped and has not looked {since}: {RESTARTED} until it runs on; `kill -CONT {found.pid}`"
        return _line(found.pid, "stopped", heard_s, told)
    # Before it is up it may be busy with what nobody can do in pieces, such as a look at a model.
    if (found.up or found.lack) and now_unix_s - heard_s > SILENT_S:
        told = f"it runs and has not looked {since}: {RESTARTED}; if it stays so, {_mend(found)}"
        return _line(found.pid, "silent", heard_s, told)
    return None


def _mend(found: Holder) -> str:
    if found.detached:
        return f"`kill -9 {found.pid}` and `holdfast up` give what runs another"
    return "`holdfast down` and `holdfast up` begin anew"


def _is_stopped(pid: int) -> bool:
    stat = read_process(pid)
    return stat is not None and (stat.state in "Tt" or is_frozen(pid))


def _line(pid: int, state: str, heard_s: float, note: str) -> Status:
    return Status("supervisor", "supervisor", pid, state, "", 0, note, entered_unix_s=heard_s)
