"""Describes a deployment on one machine: the number of processes, a pattern for each role, and the device of each rank
of each worker. No I/O.

Always true: no two vaults share a socket. In host memory every rank of every worker has its own device number. GPUs are
assigned round-robin, in the given order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from holdfast.core.errors import UserError
from holdfast.spec.engines import ENGINES
from holdfast.spec.launch import ControlLaunch, FrontendLaunch, WorkerLaunch
from holdfast.spec.names import check_deployment_name, check_url, room_for_socket
from holdfast.spec.settings import GIB_MAX, Settings, about

WORKERS_MAX = 256  # processes on one machine; a larger number is a typing mistake
CONTROLS_MAX = 8  # one decides, the others are standbys; more than three are useless
STANDBYS_MAX = 8  # per worker; each is a whole engine, and one suffices to survive one crash
# Status ports reserved per worker, so that adding a standby does not change the ports of other workers.
STATUS_PORTS_PER_WORKER = 10
ENGINE_LETTERS = "abcdefghi"  # worker-1a, worker-1b, …: the lock decides which is active, not the letter

_UP = ("up",)
_SERVING = {"panel": "Serving", "commands": _UP}
_FLEET = {"panel": "The fleet", "commands": ("up", "node")}


class DeploymentSpec(Settings, frozen=True):
    """The desired state of a deployment. `spec.plan` makes its processes from `worker`, `frontend` and `control`.

    Two defaults differ from those of a single process: the engine is a real one, and frontends stop within seconds,
    because a user waits for them after Ctrl-C."""

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
        int, about("Number of frontend processes; they share the port.", min=1, max=64, commands=_UP, expert=True)
    ] = 1
    controls: Annotated[
        int,
        about(
            "Number of control processes, which check workers and direct traffic; one leads (0: no checks).",
            min=0,
            max=CONTROLS_MAX,
            commands=_UP,
            expert=True,
        ),
    ] = 1
    host: Annotated[
        str, about("HTTP listen address; 0.0.0.0: all IPv4 addresses; :: includes IPv6.", commands=("up", "frontend"))
    ] = "127.0.0.1"
    port: Annotated[int, about("HTTP port; 0 picks a free one.", min=0, max=65535, commands=("up", "frontend"))] = 8000
    # Below the ephemeral ports, and not used by a well-known exporter.
    status_port: Annotated[
        int,
        about(
            "Port of worker-1a's /metrics and /health; 1b's is +1, 2a's +10, the first control's -1; 0: free ports.",
            min=0,
            max=65535,
            commands=_UP,
            expert=True,
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
            expert=True,
        ),
    ] = ""
    node: Annotated[str, about("Name of this node (default: the host name).", expert=("up",), **_FLEET)] = ""
    node_address: Annotated[
        str,
        about(
            "Host or IP at which frontends on other machines reach this node's engines (default: local only).",
            expert=("up",),
            **_FLEET,
        ),
    ] = ""
    node_devices: Annotated[
        int,
        about(
            "Without GPUs: number of devices, which are parts of host memory.", min=1, max=64, expert=("up",), **_FLEET
        ),
    ] = 1
    node_gib: Annotated[
        float,
        about(
            "Without GPUs: memory of each device (0: half of the free host memory, divided among the devices).",
            "GiB",
            min=0,
            max=GIB_MAX,
            expert=("up",),
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
            expert=("up",),
            **_FLEET,
        ),
    ] = -1.0
    gpus: Annotated[tuple[str, ...], about("GPUs of the torch and vllm engines, by UUID (none: host memory).")] = ()
    # Long enough to load the largest models.
    wait_s: Annotated[
        float,
        about(
            "Time limit for the deployment to start serving; after it, `up` stops what it started.",
            "s",
            over=0,
            commands=_UP,
            expert=True,
        ),
    ] = 7200.0
    log_level: Annotated[str, about("Log level of all processes.", choices=("debug", "info", "warning", "error"))] = (
        "info"
    )
    worker: Annotated[WorkerLaunch, about("Settings of every worker.")] = WorkerLaunch(
        engine="torch", model="smollm2-135m-instruct"
    )
    control: Annotated[ControlLaunch, about("Settings of every control.")] = ControlLaunch()
    # Must be last: if several structs have the same option, `holdfast run frontend` uses the frontend's.
    frontend: Annotated[FrontendLaunch, about("Settings of every frontend.")] = FrontendLaunch(drain_s=4.0)

    @property
    def ranks(self) -> int:
        return ranks_of(self.worker)

    def vaults_in(self, state_dir: Path) -> Path:
        return Path(self.vault_dir) if self.vault_dir else state_dir / "gms"

    def status_port_of(self, number: int, engine_id: int) -> int:
        """Return the status port of one engine of worker `number`; 0: any free one."""
        return self.status_port and self.status_port + (number - 1) * STATUS_PORTS_PER_WORKER + engine_id

    def control_port_of(self, number: int) -> int:
        """Return the status port of control `number`; 0: any free one. These ports are below the workers', so that the
        number of workers does not change them."""
        return self.status_port and self.status_port - number

    def check(self, state_dir: Path) -> None:
        """Raise UserError if a setting is invalid; the machine itself is not examined."""
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
        check_slots(self.gpus, self.workers, self.ranks, self.worker.kv_gib, flag)
        if engine == "vllm":
            self.worker.vllm.for_device(bool(self.gpus))
        taken = device_slots(self.gpus, self.workers, self.ranks)
        names = [f"host-{WORKERS_MAX}", *(slot.socket_name for own in taken for slot in own)]
        folder = self.vaults_in(state_dir)
        room = room_for_socket(folder, f"gms_{max(names, key=len)}.sock")
        if self.standbys and room is not None:
            raise UserError(
                f"the vaults' directory is too long for Unix sockets ({folder}); "
                f"set GMS_SOCKET_DIR to one of at most {room} bytes"
            )


def check_state_dir(state_dir: Path) -> None:
    """Raise UserError if the path is too long for the sockets in the directory."""
    room = room_for_socket(state_dir, f"run/worker-{WORKERS_MAX}{ENGINE_LETTERS[-1]}.chaos")
    if room is not None:
        raise UserError(
            f"the state directory's path is too long for Unix sockets ({state_dir}); "
            f"set HOLDFAST_STATE_DIR to one of at most {room} bytes"
        )


# -- device slots


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """The device of one rank, and the name of its vault's socket there."""

    device: str
    socket_name: str  # for `spec.names.socket_path`: the device, with a suffix for a further vault on the same GPU


def ranks_of(worker: WorkerLaunch) -> int:
    """Return the number of devices of one worker; a sim engine's ranks share one."""
    return {"torch": worker.torch.ranks, "vllm": worker.vllm.ranks}.get(worker.engine, 1)


def device_slots(gpus: Sequence[str], pairs: int, ranks: int) -> list[list[DeviceSlot]]:
    """Return the slots of all ranks of every pair (a worker with its standbys); without GPUs, in host memory."""
    return [[device_slot(gpus, pair * ranks + rank) for rank in range(ranks)] for pair in range(pairs)]


def device_slot(gpus: Sequence[str], number: int) -> DeviceSlot:
    """Return the slot with this number, counted from 0; GPUs are assigned round-robin."""
    if not gpus:
        return DeviceSlot(f"host-{number + 1}", f"host-{number + 1}")
    turn, index = divmod(number, len(gpus))
    return DeviceSlot(gpus[index], f"{gpus[index]}.{turn + 1}" if turn else gpus[index])


def pairs_on(taken: Sequence[Sequence[DeviceSlot]]) -> int:
    """Return how many pairs share the most used device."""
    return max(Counter(slot.device for pair in taken for slot in pair).values(), default=0)


def check_slots(gpus: Sequence[str], pairs: int, ranks: int, kv_gib: float, flag: str = "--ranks") -> None:
    """Raise UserError if there are too few GPUs; without GPUs, do nothing."""
    if not gpus:
        return
    if ranks > len(gpus):
        raise UserError(
            f"{flag} {ranks} needs as many GPUs, and there are {len(gpus)} ({', '.join(gpus)}); "
            "name more with --device, or use fewer ranks"
        )
    shared = pairs_on(device_slots(gpus, pairs, ranks))
    if shared > 1 and not kv_gib:
        raise UserError(
            f"--workers {pairs} puts {shared} workers on one GPU; name more with --device, use fewer --workers, "
            "or say with --kv-gib how much of it each of their KV pools may have"
        )
