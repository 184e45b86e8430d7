"""`holdfast chaos`: break a worker on purpose, through the fault socket it opened with `--allow-chaos`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError
from holdfast.engines.sim import send_fault
from holdfast.engines.sim.faults import FIELDS
from holdfast.roles.engines import chaos_path
from holdfast.supervise.records import read_record, read_records


def run_chaos(state_dir: Path, worker: str, fault: str, values: dict[str, float]) -> int:
    """Send one fault. `values` holds a value for every field some fault has; the fault takes its own."""
    fault = fault.replace("-", "_")
    command: dict[str, Any] = {"fault": fault}
    field = FIELDS.get(fault)
    if field is not None:
        command[field[0]] = int(values[field[0]]) if isinstance(field[1], int) else values[field[0]]
    answer = _send(state_dir, worker, command)
    if not answer.get("ok"):
        raise UserError(f"{worker} refused: {answer.get('error')}")
    sys.stdout.write(f"{worker} (pid {answer.get('pid')}): {' '.join(map(str, command.values()))}\n")
    return 0


def _send(state_dir: Path, worker: str, command: dict[str, Any]) -> dict[str, Any]:
    record = read_record(state_dir, worker)
    if record is None or not record.alive or record.role != "worker":
        names = [r.name for r in read_records(state_dir) if r.role == "worker" and r.alive]
        raise UserError(f"no worker {worker!r} runs in {state_dir}; there is: {', '.join(names) or 'none'}")
    path = chaos_path(str(state_dir), worker)
    try:
        return send_fault(str(path), command)
    except FileNotFoundError:
        raise UserError(f"{worker} was not started with --allow-chaos; try `holdfast up --allow-chaos`") from None
    except TimeoutError:
        raise UserError(f"{worker} does not answer; is it stopped? `kill -CONT {record.pid}` wakes it") from None
    except OSError as error:
        raise UserError(f"{worker} cannot be reached on {path}: {error}") from error
