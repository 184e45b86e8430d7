"""How `holdfast up` keeps what it was asked for, whatever that is: here until Ctrl-C, or by a process of its own.

Always true: who is told that it is up can use it; whoever calls it off before that means all of it.
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

CALLED_OFF_S = 15.0  # a whole Ctrl-C takes ten seconds at most; past this `holdfast down` is needed
INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended
WATCH_GRACE_S = 15.0  # on top of the bound, for a detached supervisor to take everything down again


class Wish(Protocol):
    """What `up` was asked for, and what it shows of it."""

    @property
    def screen(self) -> Screen: ...

    @property
    def kept(self) -> Planned | Rolled | Joined: ...

    @property
    def wait_s(self) -> float:
        """Until it serves."""

    @property
    def starting(self) -> str:
        """What is said at first."""

    async def follow(self, show: Callable[[Doing], None]) -> None:
        """Show what it is doing, until cancelled."""

    async def show(self, lack: str = "") -> None:
        """The screen that says what runs; `lack`: what keeps it from serving."""


def taken_lock(state_dir: Path, deployment: str, already: Callable[[], str]) -> int:
    """The state directory's lock, for what is to be kept there; UserError: somebody has it, or something else runs."""
    free = holder(state_dir) is None
    if free:
        check_leftovers(state_dir, deployment)
    lock = take_lock(state_dir) if free else None
    if lock is None:
        raise UserError(already())
    return lock


def keep(wish: Wish, lock: int, *, detach: bool, tied: bool) -> int:
    """The exit status; UserError says why it is not up, and then nothing runs."""
    return _detached(wish, lock) if detach else asyncio.run(_foreground(wish, lock, tied))


async def _foreground(wish: Wish, lock: int, tied: bool) -> int:
    with contextlib.ExitStack() as spinner:
        busy = spinner.enter_context(wish.screen.busy(wish.starting))
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(wish.follow(busy.show))

            async def shown(lack: str) -> None:
                following.cancel()
                spinner.close()
                sign(lock, replace(signed(lock), up=not lack, lack=lack))
                await wish.show(lack)

            def stopping() -> None:
                following.cancel()
                busy.say("stopping …")

            trouble = await keep_up(
                wish.kept, lock=lock, tied=tied, tell=wish.screen.event, shown=shown, stopping=stopping
            )
            following.cancel()
    if trouble is not None:
        raise type(trouble)(f"{trouble} (logs in {log_dir(wish.kept.state_dir)})")
    wish.screen.line("everything has stopped")
    return 0


def _detached(wish: Wish, lock: int) -> int:
    log = LocalProcesses(log_dir(wish.kept.state_dir)).path("up")
    mark = log_size(log)
    child = _spawn_background(wish.kept, lock)
    try:
        lack = asyncio.run(_watch_background(wish, child))
        if lack is None:
            kind = Refused if child.returncode == REFUSED else UserError
            why = _why_ended(child, signed(lock), log_since(log, mark)) + _if_full(wish.kept.state_dir)
            raise kind(f"{why} (logs in {log.parent})")
        return 1 if lack else 0
    except KeyboardInterrupt:
        # Nobody has been told yet that it runs: whoever calls it off means all of it.
        wish.screen.line("stopping …")
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(CALLED_OFF_S)
        return INTERRUPTED


def _why_ended(child: subprocess.Popen[bytes], said: Holder, logged: Sequence[str]) -> str:
    """Why a supervisor ended before all was up: by its own word if it had one, else by the kernel's. Pure."""
    if said.pid == child.pid and said.trouble:
        return said.trouble
    if child.returncode == 0:
        return "it was told to stop before it was up"
    last_line = next((line.strip() for line in reversed(logged) if line.strip()), "")
    return f"its supervisor ended before it was up: {exit_words(child.returncode, last_line)}"


def _if_full(state_dir: Path) -> str:
    """That there is no room for a word of why, if so."""
    return f"; the disk of {state_dir} is full" if os.statvfs(state_dir).f_bavail == 0 else ""


def _spawn_background(kept: Planned | Rolled | Joined, lock: int) -> subprocess.Popen[bytes]:
    """Start the supervisor in a session of its own, with the lock in its hands."""
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
    # Not only once it can itself: `holdfast down` asks whom to stop. And before it can say more.
    sign(lock, replace(signed(lock), pid=child.pid, detached=True))
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, and whoever watches says why
        child.stdin.write(kept.encoded())
        child.stdin.close()
    return child


async def _watch_background(wish: Wish, child: subprocess.Popen[bytes]) -> str | None:
    """What keeps it from serving, "": nothing; None: it ended."""
    with wish.screen.busy(wish.starting) as busy:
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(wish.follow(busy.show))
            lack = await _wait_until_up(wish.kept.state_dir, child, wish.wait_s + WATCH_GRACE_S)
            following.cancel()
    if child.poll() is not None:
        return None
    await wish.show(lack)
    return lack


async def _wait_until_up(state_dir: Path, child: subprocess.Popen[bytes], bound_s: float) -> str:
    """Until the new supervisor says that all is up: ""; or that it is not, or the bound passed: why. Or it ended."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + bound_s
    while loop.time() < until_s and child.poll() is None:
        found = holder(state_dir)
        if found is not None and found.pid == child.pid and (found.up or found.lack):
            return found.lack
        await asyncio.sleep(0.05)  # files cannot be waited on without inotify; a person does not see 50 ms
    return f"its supervisor (pid {child.pid}) has not reported within {bound_s:g} s that it serves"
