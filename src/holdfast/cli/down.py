"""`holdfast down`: stop everything of one state directory, whether or not its supervisor lives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import Annotated

import msgspec

from holdfast.cli.arguments import Asked
from holdfast.cli.checks import readable
from holdfast.cli.screen import Screen
from holdfast.core.clock import SystemClock
from holdfast.core.errors import UserError
from holdfast.roles.ray.clearing import left_in, take_away
from holdfast.roles.running import child_command, log_dir
from holdfast.settings import Environment
from holdfast.spec.jobs import Job
from holdfast.spec.names import node_dir
from holdfast.spec.roles import ROLES
from holdfast.spec.settings import about
from holdfast.supervise.lock import holder, take_lock
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import Record, read_launch, read_records

# Its stages are bounded below this, but for answers that may finish; past both it hangs, and is killed.
SUPERVISOR_S = 20.0
KERNEL_S = 5.0  # from SIGKILL to its end
# One after the other: `up --detach` hands the lock to another process. More than this is somebody who starts them.
SUPERVISORS_MAX = 5
LOOK_S = 0.05


class Down(Asked, frozen=True):
    """`holdfast down`."""

    node: Annotated[str, about("Stop only this node, which `holdfast node` started here.")] = ""

    def run(self, env: Environment) -> int:
        state_dir = readable(env.state_dir)
        if self.node:
            return run_down(joined(state_dir, self.node))
        for name in nodes_in(state_dir):  # before the store that they are told by
            Screen().line(f"node {name}:")
            run_down(node_dir(state_dir, name))
        return run_down(state_dir)


def nodes_in(state_dir: Path) -> list[str]:
    """Nodes of this machine of which something runs, by name."""
    found = sorted(path.name for path in node_dir(state_dir, "").glob("*/") if path.is_dir())
    return [name for name in found if _runs(node_dir(state_dir, name))]


def _runs(state_dir: Path) -> bool:
    return holder(state_dir) is not None or any(record.alive for record in read_records(state_dir))


def joined(state_dir: Path, node: str) -> Path:
    """The state directory of a node that was started here; UserError, if none of that name was."""
    if not node_dir(state_dir, node).is_dir() or "/" in node:
        known = ", ".join(nodes_in(state_dir))
        raise UserError(f"no node {node!r} was started here" + (f"; there is {known}" if known else ""))
    return node_dir(state_dir, node)


def run_down(state_dir: Path) -> int:
    """Stop all of one directory and say what was stopped. That nothing runs is no error."""
    screen = Screen()
    if not state_dir.exists() and holder(state_dir) is None:
        screen.line(f"nothing runs in {state_dir}")
        return 0
    running = [record for record in read_records(state_dir) if record.alive]
    with screen.busy("stopping …") if running else contextlib.nullcontext():
        jobs = _jobs(state_dir)
        patience_s = SUPERVISOR_S + max((job.stop_bound_s for job in jobs), default=0.0)
        lock, supervisors = _stop_supervisors(state_dir, screen, patience_s)
        try:
            _say_gone(running, screen)
            left = asyncio.run(_stop_records(state_dir, jobs, screen))
        finally:
            os.close(lock)
    on_ray = left_in(state_dir)
    for one in on_ray:
        asyncio.run(take_away(one, state_dir, screen.line))
    if not (running or left or supervisors or on_ray):
        screen.line(f"nothing runs in {state_dir}")
    else:
        screen.line("everything has stopped")
    return 0


def _jobs(state_dir: Path) -> list[Job]:
    """What runs, as its supervisor started it: each may take its own time to leave."""
    jobs = []
    for record in read_records(state_dir):
        if record.role in ROLES and (settings := read_launch(state_dir, record.name)) is not None:
            with contextlib.suppress(msgspec.DecodeError):  # of another version: it has the time that anybody has
                jobs.append(Job.of(msgspec.json.decode(settings, type=ROLES[record.role])))
    return jobs


def _say_gone(running: list[Record], screen: Screen) -> None:
    order = ["control", "frontend", "worker", "vault"]
    for record in sorted(running, key=lambda r: order.index(r.role) if r.role in order else len(order)):
        if not record.alive:
            screen.line(f"{record.name} stopped, pid {record.pid}")


def _stop_supervisors(state_dir: Path, screen: Screen, patience_s: float) -> tuple[int, int]:
    """Ask who holds the lock to stop everything, and wait for its end, until the lock is ours: nobody starts anything
    from then on. The lock, and how many held it."""
    stopped: set[int] = set()
    until_s = time.monotonic() + patience_s
    while (lock := take_lock(state_dir)) is None:
        found = holder(state_dir)
        pid = found.pid if found is not None else 0
        # Who was stopped may be named for a while yet: its heir has the lock, and has not signed it.
        pidfd = _open(pid) if pid not in stopped else None
        if pidfd is not None:
            try:
                _stop_one(pidfd, pid, screen, patience_s)
            finally:
                os.close(pidfd)
            stopped.add(pid)
            until_s = time.monotonic() + patience_s
        elif time.monotonic() > until_s:
            raise UserError(f"{state_dir}/up.lock is held by a process that cannot be seen from here; stop it there")
        if len(stopped) == SUPERVISORS_MAX:
            raise UserError(f"something keeps starting `holdfast up` in {state_dir}; stop that first")
        time.sleep(LOOK_S)
    return lock, len(stopped)


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:
        return None


def _stop_one(pidfd: int, pid: int, screen: Screen, patience_s: float) -> None:
    for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped supervisor hears SIGTERM only once it runs again
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)
    if not select.select([pidfd], [], [], patience_s)[0]:
        screen.line(f"the supervisor, pid {pid}, did not stop within {patience_s:g} s; killing it")
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], KERNEL_S)


async def _stop_records(state_dir: Path, jobs: list[Job], screen: Screen) -> int:
    """Stop what no supervisor stopped: its own died, or it was started by hand. How many that were."""

    def tell(text: str) -> None:
        if " adopted" not in text:  # how it is done here, not what was asked for
            screen.line(text)

    logs = LocalProcesses(log_dir(state_dir))
    supervisor = Supervisor(state_dir, jobs, logs, child_command(0), tell=tell, clock=SystemClock())
    supervisor.adopt_everything()
    await supervisor.stop()
    return len(supervisor.adopted)
