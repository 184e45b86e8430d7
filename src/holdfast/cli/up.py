"""`holdfast up`: start, or adopt, one deployment on this machine and keep it running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from holdfast import __version__
from holdfast.cli.checks import check_engine, check_machine, check_store, made, own, settle_port
from holdfast.cli.models import prepare
from holdfast.cli.ps import look_at_all
from holdfast.cli.screen import Screen, chat_command, show_up
from holdfast.core.address import TcpAddress
from holdfast.core.errors import REFUSED, Refused, UserError, settled
from holdfast.core.tiers import split_key
from holdfast.memory.devices.host_room import free_host_bytes
from holdfast.roles.devices import choose, exact_note
from holdfast.roles.running import keep_up, log_dir
from holdfast.roles.starting import Start, follow, log_since, log_size
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.launch import Launch, encode_launches
from holdfast.spec.plan import plan
from holdfast.supervise.lock import Holder, holder, sign, signed, take_lock
from holdfast.supervise.processes import LocalProcesses, exit_words
from holdfast.supervise.records import read_records
from holdfast.supervise.status import web_address

CALLED_OFF_S = 15.0  # a whole Ctrl-C takes ten seconds at most; past this `holdfast down` is needed
INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended
WATCH_GRACE_S = 15.0  # on top of the bound, for a detached supervisor to take everything down again


def run_up(state_dir: Path, spec: DeploymentSpec, detach: bool, tied: bool = True) -> int:
    """Run it; the exit status. UserError before anything is started. `tied`: in the foreground nothing outlives it."""
    with settled():
        check_machine()
        check_store(spec.store)
        spec.check(state_dir)  # every wish is checked before anything is touched
        check_engine(spec.worker.engine)
        own(state_dir)
        if spec.standbys and spec.vault_dir:
            made(Path(spec.vault_dir), "GMS_SOCKET_DIR")
    lock = take_lock(state_dir)
    if lock is None:
        raise UserError(_already(state_dir))
    try:
        sign(lock, Holder(os.getpid()))
        spec = structs.replace(spec, port=settle_port(spec.host, spec.port, state_dir))
        spec = _prepare(state_dir, spec)  # minutes, maybe: after all that is quick
        view = UpView(Screen(), state_dir, spec, detach)
        launches = plan(state_dir, spec)
        if detach:
            return _detached(state_dir, launches, lock, view)
        return asyncio.run(_foreground(state_dir, launches, lock, view, tied))
    finally:
        os.close(lock)


def _prepare(state_dir: Path, spec: DeploymentSpec) -> DeploymentSpec:
    """Memory that our own processes have, which may be adopted, is not counted as somebody else's."""
    ours = any(record.alive for record in read_records(state_dir))
    with settled():
        return prepare(spec, None if ours else free_host_bytes())


def choose_and_tell(engine: str, text: str, needed: int, exact: bool) -> tuple[str, ...]:
    """The GPUs that `--device` means here; on the screen what was left to us, and what `--exact` costs there."""
    chosen = choose(engine, text, needed)
    for note in filter(None, (chosen.note, exact_note(exact, chosen))):
        Screen().line(note, style="dim")
    return chosen.gpus


def _already(state_dir: Path) -> str:
    found = holder(state_dir)
    who = f" (pid {found.pid})" if found is not None and found.pid else ""
    return (
        f"already running{who} in {state_dir}: see `holdfast ps`, stop it with `holdfast down`, "
        "or set HOLDFAST_STATE_DIR to run another beside it"
    )


@dataclass(frozen=True, slots=True)
class UpView:
    """What `up` shows, in the foreground and detached alike."""

    screen: Screen
    state_dir: Path
    spec: DeploymentSpec
    detached: bool

    async def show(self, lack: str = "") -> None:
        """`lack`: what keeps it from serving."""
        spec, model, keys = self.spec, self.spec.worker.model, self.spec.frontend.api_keys
        statuses = await look_at_all(self.state_dir)
        what = f"model {model}" if spec.workers else "frontends only, no worker was asked for"
        title = f"Holdfast {__version__} is up: {what}, deployment {spec.name}"
        if lack:
            title = f"Holdfast {__version__} runs, but {lack}"
        url = web_address(str(TcpAddress(spec.host, spec.port)))
        chat = chat_command(url, model, split_key(keys[0])[0] if keys else "")
        show_up(self.screen, title, statuses, chat=chat, state_dir=self.state_dir, detached=self.detached)


def _starting_text(launches: Sequence[Launch]) -> str:
    return f"starting {', '.join(launch.name for launch in launches)} …"


async def _foreground(state_dir: Path, launches: list[Launch], lock: int, view: UpView, tied: bool) -> int:
    logs = LocalProcesses(log_dir(state_dir))
    start = Start.of(state_dir, logs, launches)
    with contextlib.ExitStack() as spinner:
        busy = spinner.enter_context(view.screen.busy(_starting_text(launches)))
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(follow(start, logs, busy.show))

            async def shown(lack: str) -> None:
                following.cancel()
                spinner.close()
                sign(lock, Holder(os.getpid(), up=not lack, lack=lack))
                await view.show(lack)

            def stopping() -> None:
                following.cancel()
                busy.say("stopping …")

            trouble = await keep_up(
                start,
                lock=lock,
                tied=tied,
                wait_s=view.spec.wait_s,
                tell=view.screen.event,
                shown=shown,
                stopping=stopping,
            )
            following.cancel()
    if trouble is not None:
        raise type(trouble)(f"{trouble} (logs in {log_dir(state_dir)})")
    view.screen.line("everything has stopped")
    return 0


def _detached(state_dir: Path, launches: list[Launch], lock: int, view: UpView) -> int:
    logs = LocalProcesses(log_dir(state_dir))
    start, mark = Start.of(state_dir, logs, launches), log_size(logs.path("up"))
    child = _spawn_background(state_dir, launches, lock, view.spec.wait_s)
    try:
        lack = asyncio.run(_watch_background(state_dir, child, launches, start, view))
        if lack is None:
            kind = Refused if child.returncode == REFUSED else UserError
            why = _why_ended(child, signed(lock), log_since(logs.path("up"), mark))
            raise kind(f"{why} (logs in {log_dir(state_dir)})")
        return 1 if lack else 0
    except KeyboardInterrupt:
        # Nobody has been told yet that it runs: whoever calls it off means all of it.
        view.screen.line("stopping …")
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


def _spawn_background(state_dir: Path, launches: list[Launch], lock: int, wait_s: float) -> subprocess.Popen[bytes]:
    """Start the supervisor in a session of its own, with the lock in its hands."""
    log_dir(state_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
    with LocalProcesses(log_dir(state_dir)).path("up").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "holdfast.roles.background", str(lock), str(state_dir), repr(wait_s)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
            cwd=state_dir,
        )
    # Not only once it can itself: `holdfast down` asks whom to stop. And before it can say more.
    sign(lock, Holder(child.pid, detached=True))
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, and whoever watches says why
        child.stdin.write(encode_launches(launches))
        child.stdin.close()
    return child


async def _watch_background(
    state_dir: Path, child: subprocess.Popen[bytes], launches: Sequence[Launch], start: Start, view: UpView
) -> str | None:
    """What keeps it from serving, "": nothing; None: it ended."""
    with view.screen.busy(_starting_text(launches)) as busy:
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(follow(start, LocalProcesses(log_dir(state_dir)), busy.show))
            lack = await _wait_until_up(state_dir, child, view.spec.wait_s + WATCH_GRACE_S)
            following.cancel()
    if child.poll() is not None:
        return None
    await view.show(lack)
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
    return f"its supervisor (pid {child.pid}) has not said within {bound_s:g} s that it serves"
