"""`holdfast down`: stop everything of one state directory, whether or not its supervisor lives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from pathlib import Path

from holdfast.cli.running import child_command, log_dir
from holdfast.cli.screen import Screen
from holdfast.core.errors import UserError
from holdfast.supervise.lock import holder, take_lock
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import Record, read_records

SUPERVISOR_S = 20.0  # its own stages are bounded below this; past it, it hangs and is killed
LOCK_S = 5.0  # from the end of its holder to the lock; and for a new holder to sign


def run_down(state_dir: Path) -> int:
    """Stop all and say what was stopped. That nothing runs is no error."""
    screen = Screen()
    running = [record for record in read_records(state_dir) if record.alive]
    with screen.busy("stopping …") if running else contextlib.nullcontext():
        supervisor = _stop_supervisor(state_dir, screen)
        _say_gone(running, screen)
        left = _stop_rest(state_dir, screen)
    if not running and not left and not supervisor:
        screen.line(f"nothing runs in {state_dir}")
    else:
        screen.line("everything has stopped")
    return 0


def _say_gone(running: list[Record], screen: Screen) -> None:
    order = ["frontend", "worker", "vault"]
    for record in sorted(running, key=lambda r: order.index(r.role) if r.role in order else len(order)):
        if not record.alive:
            screen.line(f"{record.name} stopped, pid {record.pid}")


def _stop_supervisor(state_dir: Path, screen: Screen) -> bool:
    """Ask the supervisor to stop everything, and wait for its end; whether there was one."""
    until_s = time.monotonic() + LOCK_S
    while (found := holder(state_dir)) is not None:
        pidfd = _open(found.pid)
        if pidfd is not None:
            try:
                _stop_one(pidfd, found.pid, screen)
            finally:
                os.close(pidfd)
            return True
        if time.monotonic() > until_s:
            raise UserError(f"{state_dir}/up.lock is held by a process that cannot be seen from here; stop it there")
        time.sleep(0.05)
    return False


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:
        return None


def _stop_one(pidfd: int, pid: int, screen: Screen) -> None:
    for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped supervisor hears SIGTERM only once it runs again
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)
    if not select.select([pidfd], [], [], SUPERVISOR_S)[0]:
        screen.line(f"the supervisor, pid {pid}, did not stop within {SUPERVISOR_S:g} s; killing it")
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], LOCK_S)


def _stop_rest(state_dir: Path, screen: Screen) -> int:
    """Stop what no supervisor stopped: its own died, or it was started by hand. How many that were."""
    if not state_dir.exists():
        return 0
    lock = take_lock(state_dir)
    if lock is None:
        raise UserError(f"another `holdfast up` has just started in {state_dir}; run `holdfast down` again to stop it")
    try:
        return asyncio.run(_stop_records(state_dir, screen))
    finally:
        os.close(lock)


async def _stop_records(state_dir: Path, screen: Screen) -> int:
    def tell(text: str) -> None:
        if " adopted" not in text:  # how it is done here, not what was asked for
            screen.line(text)

    supervisor = Supervisor(state_dir, [], LocalProcesses(log_dir(state_dir)), child_command(0), tell)
    supervisor.adopt_everything()
    await supervisor.stop()
    return len(supervisor.adopted)
