"""A whole deployment on one machine, as a person asks for it: how many of what, a pattern for each kind, and which
device each rank of each pair sits on. Pure.

Always true: no two vaults have one socket; host memory has a number of its own for every rank of every pair; GPUs go
round, in the order they were named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from holdfast.core.address import UNIX_PATH_BYTES_MAX
from holdfast.core.errors import UserError
from holdfast.spec.engines import ENGINES
from holdfast.spec.launch import ControlLaunch, FrontendLaunch, WorkerLaunch
from holdfast.spec.names import check_deployment_name, check_url
from holdfast.spec.settings import GIB_MAX, Settings, about

WORKERS_MAX = 256  # processes on one machine; more is a typing mistake
CONTROLS_MAX = 8  # one decides; more than two or three wait for nothing
STANDBYS_MAX = 8  # per worker; each is a whole engine, and one is enough to outlive one death
# Ports of status pages that a worker's engines have between them, so that another standby moves nobody else's.
STATUS_PORTS_PER_WORKER = 10
ENGINE_LETTERS = "abcdefghi"  # worker-1a, worker-1b, …: the active by chance of the lock, not by its letter

_UP = ("up",)
_SERVING = {"panel": "Serving", "commands": _UP}
_FLEET = {"panel": "The fleet", "commands": ("up", "node")}


class DeploymentSpec(Settings, frozen=True):
    """What should run. Its processes are made of `worker`, `frontend` and `control` (`spec.plan`).

    Two settings are others for a whole deployment than for a process alone: its engine is a real one, and its frontends
    leave within seconds, because a person who pressed Ctrl-C waits for it."""

    name: Annotated[str, about("Deployment name (default: $DYN_NAMESPACE, or local).", flag="--deployment", **_SERVING)]
    workers: Annotated[
        int,
        about("Number of workers; each is one active engine plus its standbys.", min=0, max=WORKERS_MAX, commands=_UP),
    ] = 1
    standbys: Annotated[
        int,
        about(
            "Standby engines per worker (0: none, and no vaults; only with --engine sim).",
            min=0,
            max=STANDBYS_MAX,
            commands=_UP,
        ),
    ] = 1
    frontends: Annotated[
        int, about("Number of frontend processes; they share the port.", min=1, max=64, commands=_UP)
    ] = 1
    controls: Annotated[
        int,
        about(
            "Number of control processes, which check workers and direct traffic; one leads (0: no checks).",
            min=0,
            max=CONTROLS_MAX,
            commands=_UP,
        ),
    ] = 1
    host: Annotated[
        str, about("HTTP listen address; 0.0.0.0: all IPv4 addresses; :: includes IPv6.", commands=("up", "frontend"))
    ] = "127.0.0.1"
    port: Annotated[int, about("HTTP port; 0 picks a free one.", min=0, max=65535, commands=("up", "frontend"))] = 8000
    # Below the ephemeral ports, and no well-known exporter's.
    status_port: Annotated[
        int,
        about(
            "Port of worker-1a's /metrics and /health; 1b's is +1, 2a's +10, the first control's -1; 0: free ports.",
            min=0,
            max=65535,
            commands=_UP,
        ),
    ] = 9650
    status_host: Annotated[str, about("Listen address of the workers' and controls' status pages.")] = "127.0.0.1"
    store: Annotated[
        str, about("Store to use, e.g. etcd://127.0.0.1:2379 (default: the embedded store).", **_SERVING)
    ] = ""
    vault_dir: Annotated[str, about("Directory of the vaults' sockets (empty: `gms` in the state directory).")] = ""
    backend: Annotated[
        str,
        about(
            "Run a fleet for `holdfast deploy` instead of fixed workers: local (this machine is a node) or ray (a"
            " Ray cluster).",
            choices=("", "local", "ray"),
            panel="The fleet",
            commands=_UP,
        ),
    ] = ""
    address: Annotated[
        str,
        about(
            "With --backend ray: HOST:PORT of the cluster's head (default: the cluster running on this machine).",
            panel="The fleet",
            commands=_UP,
        ),
    ] = ""
    node: Annotated[str, about("Name of this node (default: the host name).", **_FLEET)] = ""
    node_address: Annotated[
        str,
        about(
            "Host or IP at which frontends on other machines reach this node's engines (default: local only).",
            **_FLEET,
        ),
    ] = ""
    node_devices: Annotated[
        int, about("Without GPUs: number of devices, which are parts of host memory.", min=1, max=64, **_FLEET)
    ] = 1
    node_gib: Annotated[
        float,
        about(
            "Without GPUs: memory of each device (0: half of the free host memory, divided among the devices).",
            "GiB",
            min=0,
            max=GIB_MAX,
            **_FLEET,
        ),
    ] = 0.0
    node_host_gib: Annotated[
        float,
        about(
            "Host memory for weights of WARM replicas (-1: half of the free host memory with GPUs, else none).",
            "GiB",
            min=-1,
            max=GIB_MAX,
            **_FLEET,
        ),
    ] = -1.0
    gpus: Annotated[tuple[str, ...], about("GPUs of the torch and vllm engines, by UUID (none: host memory).")] = ()
    # As long as loading the largest models may take.
    wait_s: Annotated[
        float,
        about(
            "Time limit for the deployment to start serving; after it, `up` stops what it started.",
            "s",
            over=0,
            commands=_UP,
        ),
    ] = 7200.0
    log_level: Annotated[str, about("Log level of all processes.", choices=("debug", "info", "warning", "error"))] = (
        "info"
    )
    worker: Annotated[WorkerLaunch, about("Settings of every worker.")] = WorkerLaunch(
        engine="torch", model="smollm2-135m-instruct"
    )
    control: Annotated[ControlLaunch, about("Settings of every control.")] = ControlLaunch()
    # After the others: of an option that several have, `holdfast frontend` means its own.
    frontend: Annotated[FrontendLaunch, about("Settings of every frontend.")] = FrontendLaunch(drain_s=4.0)

    @property
    def ranks(self) -> int:
        """Devices of one worker; a sim engine's ranks share one."""
        return ranks_of(self.worker)

    def vaults_in(self, state_dir: Path) -> Path:
        return Path(self.vault_dir) if self.vault_dir else state_dir / "gms"

    def status_port_of(self, place: int, engine_id: int) -> int:
        """Of one engine of the worker with this number; 0: a free one."""
        return self.status_port and self.status_port + (place - 1) * STATUS_PORTS_PER_WORKER + engine_id

    def control_port_of(self, place: int) -> int:
        """Of the control with this number: below the workers', so that neither moves the other's; 0: a free one."""
        return self.status_port and self.status_port - place

    def check(self, state_dir: Path) -> None:
        """UserError says what cannot be, of all that needs no look at the machine."""
        try:
            check_deployment_name(self.name)
        except ValueError as error:
            raise UserError(f"DYN_NAMESPACE, or --deployment: {error}") from error
        check_state_dir(state_dir)
        engine = self.worker.engine
        if engine not in ENGINES:
            raise UserError(f"--engine {engine!r}: there is no such engine; there are {', '.join(ENGINES)}")
        if engine != "torch" and self.worker.torch.ranks != 1:
            others = {"sim": "the sim engine's is --sim-ranks", "vllm": "vLLM's is --tensor-parallel-size, after --"}
            raise UserError(f"--ranks is for the torch engine and does nothing for {engine}; {others[engine]}")
        if engine != "sim" and not self.standbys:
            mend = "use --standbys 1 or more, or --engine sim"
            raise UserError(f"--engine {engine} keeps its memory in a vault; {mend}")
        first, last = self.status_port, self.status_port_of(max(self.workers, 1), self.standbys)
        least = 1024 + self.controls
        if first and not least <= first <= last <= 65535:
            raise UserError(f"--status-port must be {least} to {65535 - (last - first)} for this many workers")
        if self.store:
            check_url(self.store)
        flag = "--tensor-parallel-size" if engine == "vllm" else "--ranks"
        check_seats(self.gpus, self.workers, self.ranks, self.worker.kv_gib, flag)
        if engine == "vllm":
            self.worker.vllm.for_device(bool(self.gpus))
        self._check_vault_dir(state_dir)

    def _check_vault_dir(self, state_dir: Path) -> None:
        folder = self.vaults_in(state_dir)
        taken = seats(self.gpus, self.workers, self.ranks)
        names = [f"host-{WORKERS_MAX}", *(seat.socket_name for own in taken for seat in own)]
        longest = len(str(folder / f"gms_{max(names, key=len)}.sock").encode())
        if self.standbys and longest > UNIX_PATH_BYTES_MAX:
            room = UNIX_PATH_BYTES_MAX - (longest - len(str(folder).encode()))
            raise UserError(
                f"the vaults' directory is too long for Unix sockets ({folder}); "
                f"set GMS_SOCKET_DIR to one of at most {room} bytes"
            )


def check_state_dir(state_dir: Path) -> None:
    """Sockets live in it, and the kernel bounds their paths."""
    longest = len(str(state_dir / "run" / f"worker-{WORKERS_MAX}{ENGINE_LETTERS[-1]}.chaos").encode())
    if longest > UNIX_PATH_BYTES_MAX:
        room = UNIX_PATH_BYTES_MAX - (longest - len(str(state_dir).encode()))
        raise UserError(
            f"the state directory's path is too long for Unix sockets ({state_dir}); "
            f"set HOLDFAST_STATE_DIR to one of at most {room} bytes"
        )


# -- seats


@dataclass(frozen=True, slots=True)
class Seat:
    device: str
    socket_name: str  # as `spec.names.socket_path` takes it: the device's, but for a later vault on the same GPU


def ranks_of(worker: WorkerLaunch) -> int:
    """Devices of one worker; a sim engine's ranks share one."""
    return {"torch": worker.torch.ranks, "vllm": worker.vllm.ranks}.get(worker.engine, 1)


def seats(gpus: Sequence[str], pairs: int, ranks: int) -> list[list[Seat]]:
    """Every pair's ranks' seats; no GPUs: host memory."""
    return [[seat_at(gpus, pair * ranks + rank) for rank in range(ranks)] for pair in range(pairs)]


def seat_at(gpus: Sequence[str], number: int) -> Seat:
    """The seat with that number, counted from 0: GPUs go round."""
    if not gpus:
        return Seat(f"host-{number + 1}", f"host-{number + 1}")
    turn, place = divmod(number, len(gpus))
    return Seat(gpus[place], f"{gpus[place]}.{turn + 1}" if turn else gpus[place])


def pairs_on(taken: Sequence[Sequence[Seat]]) -> int:
    """How many pairs share the most wanted device."""
    return max(Counter(seat.device for pair in taken for seat in pair).values(), default=0)


def check_seats(gpus: Sequence[str], pairs: int, ranks: int, kv_gib: float, flag: str = "--ranks") -> None:
    """UserError where there are too few GPUs; host memory is never too few, only too small."""
    if not gpus:
        return
    if ranks > len(gpus):
        raise UserError(
            f"{flag} {ranks} needs as many GPUs, and there are {len(gpus)} ({', '.join(gpus)}); "
            "name more with --device, or use fewer ranks"
        )
    shared = pairs_on(seats(gpus, pairs, ranks))
    if shared > 1 and not kv_gib:
        raise UserError(
            f"--workers {pairs} puts {shared} workers on one GPU; name more with --device, use fewer --workers, "
            "or say with --kv-gib how much of it each of their KV pools may have"
        )
