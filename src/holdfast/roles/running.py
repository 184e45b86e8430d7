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

from holdfast.core.clock import SystemClock
from holdfast.core.errors import Refused, UserError
from holdfast.roles.starting import Start, in_words, unfinished
from holdfast.spec.jobs import AT_LEISURE, Job
from holdfast.supervise.lock import Keeping
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.machine import Phase
from holdfast.supervise.notes import Slot
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import Record
from holdfast.supervise.watching import Watching
from holdfast.wire.net import SocketNetwork

# A process that ended this often without ever being ready will not be ready the next time either.
START_FAILURES_MAX = 3
# Then those are started too whom serving does not need: a large model takes minutes, and what loads may be watched.
LATE_S = 10.0
LOOK_S = 0.05  # between two looks at whether it serves: a person does not see that

Tell = Callable[[str], None]


def child_command(parent: int) -> Callable[[Job, Path], Sequence[str]]:
    """How a job is started. `-P`: a file in the directory one happens to stand in must never be imported."""
    end = [str(parent)] if parent else []
    return lambda job, settings: [sys.executable, "-P", "-m", "holdfast.roles", job.role, f"@{settings}", *end]


def log_dir(state_dir: Path) -> Path:
    return state_dir / "logs"


async def keep_up(
    start: Start,
    *,
    lock: int,
    tied: bool,
    wait_s: float,
    tell: Tell,
    shown: Callable[[str], Awaitable[None]],
    stopping: Callable[[], None] = lambda: None,
) -> UserError | None:
    """Run until stopped; what went wrong at the start, if anything did. `tied`: nothing may outlive this process.
    `shown` is called once everything serves, or does not though it was adopted, with what it waits for; `stopping` once
    it is told to stop."""
    command, logs = child_command(os.getpid() if tied else 0), LocalProcesses(log_dir(start.state_dir))
    jobs = [Job.of(launch) for launch in start.launches]
    supervisor = Supervisor(start.state_dir, jobs, logs, command, tell=tell, clock=SystemClock())
    watching = Watching(supervisor, SocketNetwork())
    keeping = Keeping(lock, start.state_dir, supervisor.put_back, tell)
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

    async def begin() -> None:
        lack = await _start(supervisor, start, tied, wait_s)
        if lack and not supervisor.adopted:
            trouble.append(Refused(lack) if _is_refused(supervisor) else UserError(lack))
            stopping()
            stop.set()
        else:
            await shown(lack)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, asked)
    async with asyncio.TaskGroup() as tasks:
        kept = tasks.create_task(keeping.run())
        running = [tasks.create_task(begin()), tasks.create_task(watching.run())]
        await stop.wait()
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await supervisor.stop()
        kept.cancel()
    return trouble[0] if trouble else None


async def _start(supervisor: Supervisor, start: Start, tied: bool, wait_s: float) -> str:
    """Bring everything up until it serves; why that cannot be, or is not so within `wait_s`, or ""."""
    logs, network = LocalProcesses(log_dir(start.state_dir)), SocketNetwork()
    try:
        async with asyncio.timeout(wait_s):
            await supervisor.start()
            if tied and supervisor.adopted:
                _guard(supervisor.adopted)
            await supervisor.wait(lambda: supervisor.all_ready() or bool(_hopeless(supervisor)), LATE_S)
            supervisor.start_late()
            await supervisor.wait(lambda: supervisor.all_ready() or bool(_hopeless(supervisor)))
            while True:
                lack = _hopeless(supervisor)
                if lack or not await unfinished(start, logs, network):
                    return lack
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        return f"nobody serves after {wait_s:g} s: {in_words(await unfinished(start, logs, network))}"


def _needed(supervisor: Supervisor) -> list[Slot]:
    """Those without whom nobody is served: a control that cannot start is shown by `ps`, and stops nothing."""
    return [slot for slot in supervisor.slots.values() if slot.job.role not in AT_LEISURE]


def _hopeless(supervisor: Supervisor) -> str:
    for slot in _needed(supervisor):
        if slot.life.phase is Phase.REFUSED:
            return f"{slot.job.name} cannot be started: {slot.life.note}"
        if not slot.life.was_ready and slot.life.failures >= START_FAILURES_MAX:
            return f"{slot.job.name} cannot be started: {slot.life.note.partition(', ')[2]}"
    return ""


def _is_refused(supervisor: Supervisor) -> bool:
    """Whether a second try would end the same."""
    return any(slot.life.phase is Phase.REFUSED for slot in _needed(supervisor))


def _guard(adopted: Sequence[Record]) -> None:
    marks = [f"{record.pid}:{record.start_ticks}" for record in adopted]
    subprocess.Popen(
        [sys.executable, "-P", "-m", "holdfast.supervise.guard", str(os.getpid()), *marks],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
