"""A deployment kept running until it is told to stop, in the foreground (`up`) or detached (`cli.background`).

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

from holdfast.core.address import parse_address
from holdfast.supervise.asking import ask
from holdfast.supervise.jobs import Job
from holdfast.supervise.life import Phase
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import Record, read_record
from holdfast.supervise.watching import Watching
from holdfast.wire.net import SocketNetwork

# A process that ended this often without ever being ready will not be ready the next time either.
START_FAILURES_MAX = 3
# Workers are found by the frontend within milliseconds of being ready; then the shown `curl` works at once.
ROUTABLE_WAIT_S = 10.0

Tell = Callable[[str], None]


def child_command(parent: int) -> Callable[[Job, Path], Sequence[str]]:
    """How a job is started. `-P`: a file in the directory one happens to stand in must never be imported."""
    end = [str(parent)] if parent else []
    return lambda job, settings: [sys.executable, "-P", "-m", "holdfast.cli.child", job.role, f"@{settings}", *end]


def log_dir(state_dir: Path) -> Path:
    return state_dir / "logs"


async def keep_up(
    state_dir: Path,
    jobs: Sequence[Job],
    *,
    tied: bool,
    tell: Tell,
    shown: Callable[[], Awaitable[None]],
    stopping: Callable[[], None] = lambda: None,
) -> str:
    """Run until stopped; what went wrong at the start, or "". `tied`: nothing may outlive this process. `shown` is
    called once all is ready, `stopping` once it is told to stop."""
    command = child_command(os.getpid() if tied else 0)
    supervisor = Supervisor(state_dir, jobs, LocalProcesses(log_dir(state_dir)), command, tell)
    watching = Watching(supervisor, SocketNetwork())
    stop = asyncio.Event()
    trouble: list[str] = []

    def asked() -> None:
        if stop.is_set():
            tell("killing everything")
            supervisor.kill()
        else:
            stopping()
            tell("stopping; answers under way may finish first, ask again to kill at once")
            stop.set()

    async def start() -> None:
        trouble.append(await _start(supervisor, state_dir, tied))
        if trouble[0]:
            stop.set()
        else:
            await shown()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, asked)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(start()), tasks.create_task(watching.run())]
        await stop.wait()
        for task in running:
            task.cancel()
    await supervisor.stop()
    return "".join(trouble)


async def _start(supervisor: Supervisor, state_dir: Path, tied: bool) -> str:
    """Bring everything up; why that cannot be, or ""."""
    await supervisor.start()
    adopted = supervisor.adopted
    if tied and adopted:
        _guard(adopted)
    await supervisor.wait(lambda: supervisor.all_ready() or bool(not adopted and _hopeless(supervisor)))
    if not adopted and (reason := _hopeless(supervisor)):
        return reason
    await _routable(supervisor, state_dir)
    return ""


def _hopeless(supervisor: Supervisor) -> str:
    for slot in supervisor.slots.values():
        if slot.life.phase is Phase.REFUSED:
            return f"{slot.job.name} cannot be started: {slot.life.note}"
        if not slot.life.was_ready and slot.life.failures >= START_FAILURES_MAX:
            return f"{slot.job.name} cannot be started: {slot.life.note.partition(', ')[2]}"
    return ""


def _guard(adopted: Sequence[Record]) -> None:
    marks = [f"{record.pid}:{record.start_ticks}" for record in adopted]
    subprocess.Popen(
        [sys.executable, "-P", "-m", "holdfast.supervise.guard", str(os.getpid()), *marks],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


async def _routable(supervisor: Supervisor, state_dir: Path) -> None:
    """Wait, within a bound, until a frontend has found a worker."""
    jobs = [slot.job for slot in supervisor.slots.values()]
    frontends = [job.name for job in jobs if job.role == "frontend"]
    if not frontends or not any(job.role == "worker" for job in jobs):
        return
    network = SocketNetwork()
    loop = asyncio.get_running_loop()
    until_s = loop.time() + ROUTABLE_WAIT_S
    while loop.time() < until_s:
        record = read_record(state_dir, frontends[0])
        facts = await ask(parse_address(record.status), network, 1.0) if record and record.status else None
        if facts and facts.get("status") == "ready":
            return
        await asyncio.sleep(0.05)
