"""Runs a deployment for `holdfast up`: in the foreground until Ctrl-C, or in a background process.

Always true: once `up` reports the deployment as up, it can be used; Ctrl-C before that stops all its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from holdfast.cli.checks import check_leftovers
from holdfast.cli.screen import Screen
from holdfast.core.errors import REFUSED, Refused, UserError
from holdfast.roles.joined import Joined
from holdfast.roles.planned import Planned
from holdfast.roles.rolled import Rolled
from holdfast.roles.running import keep_up, log_dir
from holdfast.roles.starting import Doing, log_since, log_size
from holdfast.supervise.lock import Holder, holder, sign, signed, take_lock
from holdfast.supervise.processes import LocalProcesses, exit_words

CALLED_OFF_S = 15.0  # a stop takes ten seconds at most; after this `holdfast down` is needed
INTERRUPTED = 130  # exit status in shells of a command ended by Ctrl-C
WATCH_GRACE_S = 15.0  # added to the limit: time for a detached supervisor to stop everything again


class StartUp(Protocol):
    """A deployment that `up` starts, and what `up` shows of it."""

    @property
    def screen(self) -> Screen: ...

    @property
    def kept(self) -> Planned | Rolled | Joined: ...

    @property
    def wait_s(self) -> float:
        """Return the time limit until it serves."""

    @property
    def starting(self) -> str:
        """Return the line to show first."""

    async def follow(self, show: Callable[[Doing], None]) -> None:
        """Show the progress of the start until cancelled."""

    async def show(self, lack: str = "") -> None:
        """Show what runs; `lack`: why it does not serve."""


def taken_lock(state_dir: Path, deployment: str, already: Callable[[], str]) -> int:
    """Take the state directory's lock and return it. Raise UserError if another process holds it or another deployment
    runs there."""
    free = holder(state_dir) is None
    if free:
        check_leftovers(state_dir, deployment)
    lock = take_lock(state_dir) if free else None
    if lock is None:
        raise UserError(already())
    return lock


def keep(start_up: StartUp, lock: int, *, detach: bool, tied: bool) -> int:
    """Run the deployment and return the exit status. Raise UserError if it did not start; then no process is left."""
    return _detached(start_up, lock) if detach else asyncio.run(_foreground(start_up, lock, tied))


async def _foreground(start_up: StartUp, lock: int, tied: bool) -> int:
    with contextlib.ExitStack() as spinner:
        busy = spinner.enter_context(start_up.screen.busy(start_up.starting))
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(start_up.follow(busy.show))

            async def shown(lack: str) -> None:
                following.cancel()
                spinner.close()
                sign(lock, replace(signed(lock), up=not lack, lack=lack))
                await start_up.show(lack)

            def stopping() -> None:
                following.cancel()
                busy.say("stopping …")

            trouble = await keep_up(
                start_up.kept, lock=lock, tied=tied, tell=start_up.screen.event, shown=shown, stopping=stopping
            )
            following.cancel()
    if trouble is not None:
        raise type(trouble)(f"{trouble} (logs in {log_dir(start_up.kept.state_dir)})")
    start_up.screen.line("everything has stopped")
    return 0


def _detached(start_up: StartUp, lock: int) -> int:
    log = LocalProcesses(log_dir(start_up.kept.state_dir)).path("up")
    mark = log_size(log)
    child = _spawn_background(start_up.kept, lock)
    try:
        lack = asyncio.run(_watch_background(start_up, child))
        if lack is None:
            kind = Refused if child.returncode == REFUSED else UserError
            why = _why_ended(child, signed(lock), log_since(log, mark)) + _if_full(start_up.kept.state_dir)
            raise kind(f"{why} (logs in {log.parent})")
        return 1 if lack else 0
    except KeyboardInterrupt:
        # `up` has not reported it as up, so Ctrl-C stops all its processes.
        start_up.screen.line("stopping …")
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(CALLED_OFF_S)
        return INTERRUPTED


def _why_ended(child: subprocess.Popen[bytes], said: Holder, logged: Sequence[str]) -> str:
    """Return why a supervisor ended before the deployment was up: the reason it recorded, else its exit status.
    Pure."""
    if said.pid == child.pid and said.trouble:
        return said.trouble
    if child.returncode == 0:
        return "it was told to stop before it was up"
    last_line = next((line.strip() for line in reversed(logged) if line.strip()), "")
    return f"its supervisor ended before it was up: {exit_words(child.returncode, last_line)}"


def _if_full(state_dir: Path) -> str:
    """Return a note if the disk is full: then the logs have no reason."""
    return f"; the disk of {state_dir} is full" if os.statvfs(state_dir).f_bavail == 0 else ""


def _spawn_background(kept: Planned | Rolled | Joined, lock: int) -> subprocess.Popen[bytes]:
    """Start the supervisor in a new session and pass it the lock."""
    logs = log_dir(kept.state_dir)
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    with LocalProcesses(logs).path("up").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "holdfast.roles.background", str(lock), kept.kind],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
            cwd=kept.state_dir,
        )
    # The parent writes the child's pid at once, because `holdfast down` reads here which process to stop.
    sign(lock, replace(signed(lock), pid=child.pid, detached=True))
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the child has ended; the caller reports why
        child.stdin.write(kept.encoded())
        child.stdin.close()
    return child


async def _watch_background(start_up: StartUp, child: subprocess.Popen[bytes]) -> str | None:
    """Return why the deployment does not serve ("": it serves), or None if the supervisor ended."""
    with start_up.screen.busy(start_up.starting) as busy:
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(start_up.follow(busy.show))
            lack = await _wait_until_up(start_up.kept.state_dir, child, start_up.wait_s + WATCH_GRACE_S)
            following.cancel()
    if child.poll() is not None:
        return None
    await start_up.show(lack)
    return lack


async def _wait_until_up(state_dir: Path, child: subprocess.Popen[bytes], bound_s: float) -> str:
    """Wait for the new supervisor. Return "" if the deployment is up, else why it does not serve."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + bound_s
    while loop.time() < until_s and child.poll() is None:
        found = holder(state_dir)
        if found is not None and found.pid == child.pid and (found.up or found.lack):
            return found.lack
        await asyncio.sleep(0.05)  # polling a file; 50 ms are not noticeable
    return f"its supervisor (pid {child.pid}) has not reported within {bound_s:g} s that it serves"
