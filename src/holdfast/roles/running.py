"""A deployment kept running until it is told to stop, in the foreground (`up`) or detached (`roles.background`).

Always true: the first signal stops everything in order, the second kills everything; a deployment that cannot be
started from scratch is taken down again and says why, one that was adopted is never taken down for that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from holdfast.core.errors import UserError
from holdfast.core.ports import SystemClock
from holdfast.spec.jobs import Job
from holdfast.supervise.lock import Keeping
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import Record
from holdfast.supervise.watching import Watching
from holdfast.wire.net import SocketNetwork

Tell = Callable[[str], None]
Shown = Callable[[str], Awaitable[None]]


def child_command(parent: int) -> Callable[[Job, Path], Sequence[str]]:
    """How a job is started. `-P`: a file in the directory one happens to stand in must never be imported."""
    end = [str(parent)] if parent else []
    return lambda job, settings: [sys.executable, "-P", "-m", "holdfast.roles", job.role, f"@{settings}", *end]


def log_dir(state_dir: Path) -> Path:
    return state_dir / "logs"


class Kept(Protocol):
    """What is kept up: processes that stay the same (`roles.planned`), a manifest (`roles.rolled`), or one more node
    of a fleet (`roles.joined`)."""

    @property
    def state_dir(self) -> Path: ...

    def jobs(self) -> list[Job]:
        """Those to begin with."""

    async def run(self, supervisor: Supervisor, *, tied: bool, shown: Shown, tell: Tell) -> None:
        """Bring it up, call `shown` once, and stay with it until it is cancelled, or there is nothing left to keep.
        UserError: it cannot be, and is to be taken down again."""


async def keep_up(
    kept: Kept, *, lock: int, tied: bool, tell: Tell, shown: Shown, stopping: Callable[[], None] = lambda: None
) -> UserError | None:
    """Run until stopped; what went wrong at the start, if anything did. `tied`: nothing may outlive this process.
    `shown` is called once everything serves, or does not though it was adopted, with what it waits for; `stopping` once
    it is told to stop."""
    state_dir = kept.state_dir
    command, logs = child_command(os.getpid() if tied else 0), LocalProcesses(log_dir(state_dir))
    supervisor = Supervisor(state_dir, kept.jobs(), logs, command, tell=tell, clock=SystemClock())
    watching = Watching(supervisor, SocketNetwork())
    keeping = Keeping(lock, state_dir, supervisor.put_back, tell)
    stop = asyncio.Event()
    trouble: list[UserError] = []

    def asked() -> None:
        if stop.is_set():
            tell("killing everything")
            supervisor.kill()
        else:
            stopping()
            tell("stopping; answers under way may finish first, ask again to kill at once")
            stop.set()

    async def run() -> None:
        try:
            await kept.run(supervisor, tied=tied, shown=shown, tell=tell)
        except UserError as error:
            trouble.append(error)
        stopping()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, asked)
    async with asyncio.TaskGroup() as tasks:
        looked_after = tasks.create_task(keeping.run())
        running = [tasks.create_task(run()), tasks.create_task(watching.run())]
        await stop.wait()
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await supervisor.stop()
        looked_after.cancel()
    return trouble[0] if trouble else None


async def begin(supervisor: Supervisor, *, tied: bool) -> None:
    """Adopt what runs and start the rest; what was adopted is tied, too."""
    await supervisor.start()
    if tied and supervisor.adopted:
        _guard(supervisor.adopted)


def _guard(adopted: Sequence[Record]) -> None:
    marks = [f"{record.pid}:{record.start_ticks}" for record in adopted]
    subprocess.Popen(
        [sys.executable, "-P", "-m", "holdfast.supervise.guard", str(os.getpid()), *marks],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
