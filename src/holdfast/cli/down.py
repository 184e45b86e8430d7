"""`holdfast down` stops all processes of one state directory, even if their supervisor is dead."""

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

from holdfast.cli.arguments import CommandOptions
from holdfast.cli.checks import readable
from holdfast.cli.screen import Screen
from holdfast.core.errors import UserError
from holdfast.core.ports import SystemClock
from holdfast.roles.ray.clearing import left_in, take_away
from holdfast.roles.running import child_command, log_dir
from holdfast.settings import Environment
from holdfast.spec.jobs import Job
from holdfast.spec.launch import ROLES
from holdfast.spec.names import node_dir
from holdfast.spec.settings import about
from holdfast.supervise.lock import holder, take_lock
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import read_launch, read_records

# A supervisor stops everything in less time, plus the time that running answers have to finish. After both it is
# killed.
SUPERVISOR_S = 20.0
KERNEL_S = 5.0  # from SIGKILL to the end of the process
# `up --detach` hands the lock to a second process. More supervisors than this means that a script keeps starting them.
SUPERVISORS_MAX = 5
LOOK_S = 0.05


class DownCommand(CommandOptions, frozen=True):
    node: Annotated[str, about("Stop only this node, which `holdfast node join` started here.")] = ""

    def run(self, env: Environment) -> int:
        state_dir = readable(env.state_dir)
        if self.node:
            return run_down(joined(state_dir, self.node))
        for name in nodes_in(state_dir):  # before the store, from which nodes read their actions
            Screen().line(f"node {name}:")
            run_down(node_dir(state_dir, name))
        return run_down(state_dir)


def nodes_in(state_dir: Path) -> list[str]:
    """Return the names of this machine's nodes that have a running process."""
    found = sorted(path.name for path in node_dir(state_dir, "").glob("*/") if path.is_dir())
    return [name for name in found if _runs(node_dir(state_dir, name))]


def _runs(state_dir: Path) -> bool:
    return holder(state_dir) is not None or any(record.alive for record in read_records(state_dir))


def joined(state_dir: Path, node: str) -> Path:
    """Return the state directory of a node that was started here. Raise UserError if there is no node of that name."""
    if not node_dir(state_dir, node).is_dir() or "/" in node:
        known = ", ".join(nodes_in(state_dir))
        raise UserError(f"no node {node!r} was started here" + (f"; there is {known}" if known else ""))
    return node_dir(state_dir, node)


def run_down(state_dir: Path) -> int:
    """Stop all processes of one state directory and show which were stopped. If none runs, this is no error."""
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
            order = ["control", "frontend", "worker", "vault"]
            for record in sorted(running, key=lambda r: order.index(r.role) if r.role in order else len(order)):
                if not record.alive:
                    screen.line(f"{record.name} stopped, pid {record.pid}")
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
    """Return the running processes as jobs: each has its own time limit to stop."""
    jobs = []
    for record in read_records(state_dir):
        if record.role in ROLES and (settings := read_launch(state_dir, record.name)) is not None:
            with contextlib.suppress(msgspec.DecodeError):  # written by another version: the default limit applies
                jobs.append(Job.of(msgspec.json.decode(settings, type=ROLES[record.role])))
    return jobs


def _stop_supervisors(state_dir: Path, screen: Screen, patience_s: float) -> tuple[int, int]:
    """Stop the supervisor that holds the lock, then take the lock, so that no process is started any more. Return the
    lock and the number of supervisors stopped."""
    stopped: set[int] = set()
    until_s = time.monotonic() + patience_s
    while (lock := take_lock(state_dir)) is None:
        found = holder(state_dir)
        pid = found.pid if found is not None else 0
        # For a while the lock file may name a stopped supervisor: its successor holds the lock but has not written its
        # pid.
        pidfd = None
        if pid and pid not in stopped:
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
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


def _stop_one(pidfd: int, pid: int, screen: Screen, patience_s: float) -> None:
    for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process handles SIGTERM only after SIGCONT
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)
    if not select.select([pidfd], [], [], patience_s)[0]:
        screen.line(f"the supervisor, pid {pid}, did not stop within {patience_s:g} s; killing it")
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], KERNEL_S)


async def _stop_records(state_dir: Path, jobs: list[Job], screen: Screen) -> int:
    """Stop processes that no supervisor stopped (it died, or they were started by hand); return how many."""

    def tell(text: str) -> None:
        if " adopted" not in text:  # adoption is only how this command stops them
            screen.line(text)

    logs = LocalProcesses(log_dir(state_dir))
    supervisor = Supervisor(state_dir, jobs, logs, child_command(0), tell=tell, clock=SystemClock())
    supervisor.adopt_everything()
    await supervisor.stop()
    return len(supervisor.adopted)
