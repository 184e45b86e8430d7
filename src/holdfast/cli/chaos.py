"""`holdfast chaos` breaks a worker on purpose, through the fault socket it opened with `--allow-chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from holdfast.cli.arguments import CommandOptions
from holdfast.cli.checks import readable
from holdfast.cli.terminal import write_out
from holdfast.core.errors import UserError
from holdfast.engines.sim.chaos_server import send_fault
from holdfast.engines.sim.faults import FIELDS
from holdfast.settings import Environment
from holdfast.spec.names import chaos_path
from holdfast.spec.settings import about
from holdfast.supervise.records import read_record, read_records


class ChaosCommand(CommandOptions, frozen=True):
    worker: Annotated[str, about("Worker name, as shown by `holdfast status`.", positional=True, required=True)] = ""
    fault: Annotated[str, about("Fault to inject; see above.", positional=True, required=True)] = ""
    factor: Annotated[float, about("slow: factor by which everything takes longer.")] = 20.0
    tokens: Annotated[int, about("error-after, truncate: number of tokens before the fault.")] = 5
    every: Annotated[int, about("error-every: one in this many streams fails.")] = 5
    seed: Annotated[int, about("flip-bits: random seed for which bits, 1 to 8, are flipped.")] = 0
    ms: Annotated[int, about("late-pongs, late-beats: delay.", "ms")] = 3000
    times: Annotated[int, about("wrong-proofs: number of self-checks after a takeover that fail.")] = 1
    by: Annotated[float, about("drift-logprobs: amount subtracted from every log-probability.")] = 0.5

    def run(self, env: Environment) -> int:
        fault = self.fault.replace("-", "_")
        command: dict[str, Any] = {"fault": fault}
        if (field := FIELDS.get(fault)) is not None:
            command[field[0]] = getattr(self, field[0])
        answer = _send(readable(env.state_dir), self.worker, command)
        if not answer.get("ok"):
            raise UserError(f"{self.worker} refused: {answer.get('error')}")
        write_out(f"{self.worker} (pid {answer.get('pid')}): {' '.join(map(str, command.values()))}\n")
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
