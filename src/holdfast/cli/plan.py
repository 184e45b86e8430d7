"""From what a person asked `holdfast up` for to the processes that should run. Pure.

Always true: the same wishes give the same settings byte for byte, so that the next `up` knows its processes again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.cli.launch import (
    ENGINES,
    FrontendLaunch,
    Launch,
    SimLaunch,
    StoreLaunch,
    TorchLaunch,
    VaultLaunch,
    WorkerLaunch,
    role_of,
)
from holdfast.cli.seats import Seat, check_seats, pairs_on, seats
from holdfast.core.address import UNIX_PATH_BYTES_MAX, TcpAddress
from holdfast.core.errors import UserError
from holdfast.discovery.keys import check_deployment_name
from holdfast.memory.finding import socket_path
from holdfast.settings import STATUS_PORT, WAIT_S
from holdfast.spec.waits import WAKE_S
from holdfast.store.endpoints import check_url
from holdfast.supervise.jobs import Job
from holdfast.supervise.probes import Probes

WORKERS_MAX = 256  # processes on one machine; more is a typing mistake
FRONTENDS_MAX = 64
RANKS_MAX = 16  # of one engine: GPUs that one machine has
STANDBYS_MAX = 8  # per pair; each is a whole engine, and one is enough to outlive one death
# Ports of status pages that a worker's engines have between them, so that another standby moves nobody else's.
STATUS_PORTS_PER_WORKER = 10
ENGINE_LETTERS = "abcdefghi"  # worker-1a, worker-1b, …: the active by chance of the lock, not by its letter

# SIGTERM to SIGKILL. A worker hands its streams back in milliseconds; together with the frontends' drain, the vaults'
# and the store's bound this keeps a whole Ctrl-C at ten seconds. A killed vault's memory goes with its lifeline.
WORKER_STOP_S = 3.0
STORE_STOP_S = 1.0
VAULT_STOP_S = 1.0
FRONTEND_GRACE_S = 1.0  # on top of its own drain
# On top of loading, which gives up by itself: to import, compile and capture.
LOAD_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `holdfast up` was asked for."""

    deployment: str
    engine: str = "sim"
    model: str = "holdfast-sim"
    workers: int = 1  # pairs, or plain workers where there are no standbys
    frontends: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    store: str = ""  # empty: an embedded store of our own
    hold_s: float = 30.0
    drain_s: float = 4.0
    allow_chaos: bool = False
    api_keys: tuple[str, ...] = ()
    sim: SimLaunch = field(default_factory=SimLaunch)
    log_level: str = "info"
    standbys: int = 1  # per pair; 0: plain workers, without vaults and election
    standby: str = "mapped"  # or "unmapped": how a standby waits
    kv: str = "vault"  # or "direct": where the KV pool lies
    vault_dir: Path | None = None  # None: "gms" in the state directory
    wake_s: float = WAKE_S  # how long taking over may take
    source: str = "default"  # what a torch engine loads
    torch: TorchLaunch = field(default_factory=TorchLaunch)
    cache_dir: str = ""
    gpus: tuple[str, ...] = ()  # a torch engine's devices, by UUID; empty: host memory
    known_s: float = 3600.0  # how long a model without a worker is answered 503
    queue_s: float = 5.0  # how long a new request waits where every worker is full
    load_s: float = 7200.0  # how long loading a model may take
    status_host: str = "127.0.0.1"  # where workers' status pages listen
    access_log: bool = False  # of the frontends: a line for every request
    status_port: int = STATUS_PORT  # worker-1a's status page; worker-1b's is one more, worker-2a's ten more
    wait_s: float = WAIT_S  # until it serves; past it what was started is taken down again
    chat_template: str = ""  # a file in place of the model's own template
    cors_origins: tuple[str, ...] = ()  # of web pages that may ask from a browser
    engine_token: str = ""  # for `POST /engine/…` to its workers from anywhere

    @property
    def ranks(self) -> int:
        """Devices of one pair; a sim engine's ranks share one."""
        return self.torch.ranks if self.engine == "torch" else 1


def plan(state_dir: Path, options: UpOptions) -> list[Launch]:
    """Every process that should run; UserError says what is wrong with the wishes."""
    _check(state_dir, options)
    run = state_dir / "run"
    store = options.store or f"unix://{run}/store.sock"
    launches: list[Launch] = []
    if not options.store:
        launches.append(StoreLaunch(str(state_dir), store, log_level=options.log_level))
    taken = seats(options.gpus, options.workers, options.ranks)
    sharing = pairs_on(taken)
    for place, own in enumerate(taken, 1):
        launches += _pair(state_dir, store, place, own, sharing, options)
    names = ["frontend", *(f"frontend-{place}" for place in range(2, options.frontends + 1))]
    launches += [_frontend(state_dir, store, name, options) for name in names]
    return launches


def _pair(state_dir: Path, store: str, place: int, own: list[Seat], sharing: int, options: UpOptions) -> list[Launch]:
    """Vaults, one for each rank's device, and the engines that share their memory, of which the lock makes one the
    active; or one plain worker."""
    group = f"worker-{place}"
    if not options.standbys:
        return [_worker(state_dir, store, group, _status_port(place, 0, options), options)]
    sockets = [socket_path(_vault_dir(state_dir, options), seat.socket_name) for seat in own]
    vaults = [
        VaultLaunch(
            str(state_dir),
            seat.device,
            socket,
            name=f"vault-{place}" + (f"-r{rank}" if rank > 1 else ""),
            log_level=options.log_level,
        )
        for rank, (seat, socket) in enumerate(zip(own, sockets, strict=True), 1)
    ]
    engines = [
        msgspec.structs.replace(
            _worker(state_dir, store, f"{group}{letter}", _status_port(place, engine_id, options), options),
            vault_socket=sockets[0],
            device=own[0].device,
            more_vaults=tuple((vault.socket_path, vault.device) for vault in vaults[1:]),
            standbys=options.standbys,
            device_pairs=sharing,
            engine_id=engine_id,
            lock=f"flock://{state_dir}/run/{group}.lock",
            group=group,
            standby=options.standby,
            kv=options.kv,
            wake_s=options.wake_s,
        )
        for engine_id, letter in enumerate(ENGINE_LETTERS[: options.standbys + 1])
    ]
    return [*vaults, *engines]


def _status_port(place: int, engine_id: int, options: UpOptions) -> int:
    if not options.status_port:
        return 0
    return options.status_port + (place - 1) * STATUS_PORTS_PER_WORKER + engine_id


def _worker(state_dir: Path, store: str, name: str, status_port: int, options: UpOptions) -> WorkerLaunch:
    return WorkerLaunch(
        str(state_dir),
        store,
        options.deployment,
        name,
        options.engine,
        options.model,
        address=f"unix://{state_dir}/run/{name}.sock",
        beat_address=f"unix://{state_dir}/run/{name}.beat",
        status_address=str(TcpAddress(options.status_host, status_port)),
        status_any=True,
        engine_token=options.engine_token,
        load_s=options.load_s,
        allow_chaos=options.allow_chaos,
        sim=options.sim,
        log_level=options.log_level,
        source=options.source,
        cache_dir=options.cache_dir,
        torch=options.torch,
        chat_template=options.chat_template,
    )


def _frontend(state_dir: Path, store: str, name: str, options: UpOptions) -> FrontendLaunch:
    return FrontendLaunch(
        str(state_dir),
        store,
        options.deployment,
        name,
        address=str(TcpAddress(options.host, options.port)),
        access_log=options.access_log,
        status_address=own_page(state_dir, name),
        api_keys=options.api_keys,
        hold_s=options.hold_s,
        queue_s=options.queue_s,
        drain_s=options.drain_s,
        log_level=options.log_level,
        models=(options.model,) if options.workers else (),
        known_s=options.known_s,
        cors_origins=options.cors_origins,
    )


def own_page(state_dir: Path, name: str) -> str:
    """Where a frontend answers for itself alone: its port may be shared. "" if its name is too long for a socket."""
    path = f"{state_dir}/run/{name}.http"
    return f"unix://{path}" if len(path.encode()) <= UNIX_PATH_BYTES_MAX else ""


def job_of(launch: Launch) -> Job:
    """The launch as the supervisor sees it."""
    assert launch.parent == 0, "who the parent is does not belong to the settings"
    bounds_s = {"store": STORE_STOP_S, "vault": VAULT_STOP_S, "worker": WORKER_STOP_S}
    bound_s = bounds_s.get(role_of(launch), 0.0)
    if isinstance(launch, FrontendLaunch):
        bound_s = launch.drain_s + FRONTEND_GRACE_S
    beats = launch.beat_address if isinstance(launch, WorkerLaunch) else ""
    settings = msgspec.json.encode(launch)
    group = launch.group if isinstance(launch, WorkerLaunch) else ""
    probes = Probes(startup_s=launch.load_s + LOAD_GRACE_S) if isinstance(launch, WorkerLaunch) else Probes()
    return Job(launch.name, role_of(launch), settings, bound_s, probes=probes, beat_address=beats, group=group)


def _vault_dir(state_dir: Path, options: UpOptions) -> Path:
    return options.vault_dir or state_dir / "gms"


def _check(state_dir: Path, options: UpOptions) -> None:
    try:
        check_deployment_name(options.deployment)
    except ValueError as error:
        raise UserError(f"DYN_NAMESPACE, or --deployment: {error}") from error
    check_state_dir(state_dir)
    if options.engine not in ENGINES:
        raise UserError(f"--engine {options.engine!r}: there is no such engine; there are {', '.join(ENGINES)}")
    _check_ranks(options)
    if not 0 <= options.workers <= WORKERS_MAX:
        raise UserError(f"--workers must be 0 to {WORKERS_MAX}, got {options.workers}")
    if not 0 <= options.standbys <= STANDBYS_MAX:
        raise UserError(f"--standbys must be 0 to {STANDBYS_MAX}, got {options.standbys}")
    if not 1 <= options.frontends <= FRONTENDS_MAX:
        raise UserError(f"--frontends must be 1 to {FRONTENDS_MAX}, got {options.frontends}")
    if options.engine != "sim" and not options.standbys:
        mend = "use --standbys 1 or more, or --engine sim"
        raise UserError(f"--engine {options.engine} keeps its memory in a vault; {mend}")
    if not options.wait_s > 0:
        raise UserError(f"--wait-s must be over 0, got {options.wait_s:g}")
    if not options.load_s > 0:
        raise UserError(f"--load-s must be over 0, got {options.load_s:g}")
    if not options.wake_s > 0:
        raise UserError(f"--wake-s must be over 0, got {options.wake_s:g}")
    last = _status_port(max(options.workers, 1), options.standbys, options)
    if options.status_port and not 1024 <= options.status_port <= last <= 65535:
        raise UserError(f"--status-port must be 1024 to {65535 - (last - options.status_port)} for this many workers")
    if options.store:
        check_url(options.store)
    check_seats(options.gpus, options.workers, options.ranks, options.torch.kv_gib)
    _check_vault_dir(state_dir, options)


def _check_ranks(options: UpOptions) -> None:
    if options.engine != "torch" and options.torch.ranks != 1:
        raise UserError(f"--ranks is for the torch engine; the {options.engine} engine's is --sim-ranks")
    if not 1 <= options.torch.ranks <= RANKS_MAX:
        raise UserError(f"--ranks must be 1 to {RANKS_MAX}, got {options.torch.ranks}")


def check_state_dir(state_dir: Path) -> None:
    """Sockets live in it, and the kernel bounds their paths."""
    longest = len(str(state_dir / "run" / f"worker-{WORKERS_MAX}{ENGINE_LETTERS[-1]}.chaos").encode())
    if longest > UNIX_PATH_BYTES_MAX:
        room = UNIX_PATH_BYTES_MAX - (longest - len(str(state_dir).encode()))
        raise UserError(
            f"the state directory's path is too long for Unix sockets ({state_dir}); "
            f"set HOLDFAST_STATE_DIR to one of at most {room} bytes"
        )


def _check_vault_dir(state_dir: Path, options: UpOptions) -> None:
    folder = _vault_dir(state_dir, options)
    taken = seats(options.gpus, options.workers, options.ranks)
    names = [f"host-{WORKERS_MAX}", *(seat.socket_name for pair in taken for seat in pair)]
    longest = len(str(folder / f"gms_{max(names, key=len)}.sock").encode())
    if options.standbys and longest > UNIX_PATH_BYTES_MAX:
        room = UNIX_PATH_BYTES_MAX - (longest - len(str(folder).encode()))
        raise UserError(
            f"the vaults' directory is too long for Unix sockets ({folder}); "
            f"set GMS_SOCKET_DIR to one of at most {room} bytes"
        )
