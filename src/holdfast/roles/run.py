"""One process of a deployment, from its launch settings to its exit status."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
from pathlib import Path
from typing import Any

import uvloop

from holdfast.core.errors import REFUSED, Refused, UserError
from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.log_files import UNWRITTEN, log_to_own_file, say
from holdfast.roles.processes import run_role
from holdfast.roles.tied import die_with
from holdfast.spec.launch import Launch, WorkerLaunch, role_of
from holdfast.supervise.records import Record, remove_record, run_dir, write_record
from holdfast.wire.net import CannotListenError

RECORD_RETRY_S = 1.0  # a disk gets room again when somebody makes some: nothing else waits for this

log = logging.getLogger(__name__)


def run(launch: Launch) -> int:
    """Run a process until it is stopped; its exit status."""
    log_to_own_file(launch.log_level.upper(), f"%(asctime)s {launch.name} %(levelname)s %(message)s")
    if launch.parent:
        die_with(launch.parent)
    if not (isinstance(launch, WorkerLaunch) and launch.core_dumps):
        no_core_dumps()
    try:
        if not (launch.state_dir and launch.name):
            raise Refused("its settings have no state_dir or no name")
        raise_descriptor_limit()
        run_dir(Path(launch.state_dir)).mkdir(parents=True, exist_ok=True, mode=0o700)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(launch))
    except Refused as error:
        say(f"holdfast {role_of(launch)}: {' '.join(str(error).split())}")
        return REFUSED
    except (UserError, ValueError) as error:
        say(f"holdfast {role_of(launch)}: {error}")
        return 1
    return 0


def no_core_dumps() -> None:
    """Writing one keeps the lock and the GPU for seconds after a crash (fact 4c). A limit of one byte, where it may be
    had, also stops kernels that pipe cores to a program, which a limit of zero does not."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    limit = 0 if hard == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (limit, hard))


async def _serve(launch: Launch) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    state_dir = Path(launch.state_dir)

    def on_ready(facts: dict[str, Any]) -> None:
        # Start-up garbage is kept for good: a collection over it in mid-stream would stall every stream.
        gc.collect()
        gc.freeze()
        _write_down(state_dir, Record.of_process(os.getpid(), launch.name, role_of(launch), **facts))

    try:
        await run_role(launch, stop, on_ready)
    except OSError as error:
        raise UserError(_explain(error)) from error
    finally:
        remove_record(state_dir, launch.name)


def _write_down(state_dir: Path, record: Record) -> None:
    """Serving needs no record. Without room for it, it is tried again until there is."""
    try:
        write_record(state_dir, record)
    except OSError as error:
        log.warning("cannot write down that it runs: %s; trying again", error)
        UNWRITTEN.failed("record", error)
        asyncio.get_running_loop().call_later(RECORD_RETRY_S, _write_down, state_dir, record)
    else:
        UNWRITTEN.written("record")


def _explain(error: OSError) -> str:
    if not isinstance(error, CannotListenError):
        room = "; make room on that disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"cannot go on: {error}{room}"
    address = error.filename
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use; stop what uses it, or choose another address or --port"
    if error.errno == errno.EACCES:
        return f"no permission to listen on {address}; choose a port over 1023"
    return f"cannot listen on {address}: {error.strerror}"
