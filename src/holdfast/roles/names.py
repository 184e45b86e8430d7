"""The names of `holdfast run worker`, `frontend` and `store` in a state directory, each claimed before it is used.

Sockets, records and logs are called by it, so two processes of one name would take each other's. Always true: whoever
claims a name holds a lock on `run/NAME.claim` until its process ends, however it ends; the file is never removed (one
made anew would be a second lock, facts 18).
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.core import flock
from holdfast.core.errors import UserError
from holdfast.supervise.records import launch_path, read_record, run_dir

NAMES_MAX = 1024  # processes of one role in one state directory


def claim_name(state_dir: Path, role: str, name: str) -> str:
    """`name`, now this process's; without one, the first of role-1, role-2, … that is nobody's. UserError says who
    has it."""
    if not name:
        for candidate in (f"{role}-{place}" for place in range(1, NAMES_MAX)):
            if _claim(state_dir, candidate) is None:
                return candidate
        raise UserError(f"{NAMES_MAX - 1} processes of this role are in {state_dir}; choose a --name, or stop some")
    whose = _claim(state_dir, name)
    if whose is not None:
        raise UserError(f"the name {name} is taken in {state_dir}: {whose}; stop that, or choose another --name")
    return name


def _claim(state_dir: Path, name: str) -> str | None:
    """None: it is this process's until it ends. Else who has it, in words."""
    path = run_dir(state_dir) / f"{name}.claim"
    try:
        descriptor = flock.open_lock_file(path)
    except OSError as error:
        raise UserError(f"cannot claim the name {name}: {error}") from error
    if not flock.try_flock(descriptor):
        signed = os.pread(descriptor, flock.SIGNATURE_BYTES, 0).decode(errors="replace").strip()
        os.close(descriptor)
        return _running(state_dir, name) or f"{signed or 'a process'} is starting"
    whose = _running(state_dir, name)
    if whose is None and launch_path(state_dir, name).exists():
        whose = "it belongs to `holdfast up`"
    if whose is not None:
        os.close(descriptor)
        return whose
    flock.sign(descriptor, f"pid {os.getpid()}".encode())
    return None  # the descriptor stays open: the lock ends with this process


def _running(state_dir: Path, name: str) -> str | None:
    """The process that wrote itself down under this name, if it lives."""
    record = read_record(state_dir, name)
    if record is None or not record.alive:
        return None
    where = f" at {record.address}" if record.address else ""
    return f"pid {record.pid} runs{where}"
