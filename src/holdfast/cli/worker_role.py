"""`holdfast worker`: one engine in the foreground, from flags, and from the environment that a pod gives its engines.

`ENGINE_ID`, `GMS_SOCKET_DIR`, `FAILOVER_LOCK_PATH` and `DYN_SYSTEM_PORT` are enough for an engine that has a standby:
its vault is its device's in that directory, and whoever takes turns with the same lock is of its group.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import structs

from holdfast.cli import options as opt
from holdfast.cli.options import environment
from holdfast.cli.roles import own_name, own_store, run_foreground
from holdfast.settings import Environment

if TYPE_CHECKING:
    from holdfast.spec.launch import WorkerLaunch

Address = Annotated[str, typer.Option(help="Where frontends connect; port 0 picks a free one.")]
BeatAddress = Annotated[str, typer.Option(help="Where frontends hear its heartbeat; default: a free port beside it.")]
StatusAddress = Annotated[
    str, typer.Option(help="Where /live, /health and /metrics are; default tcp://$DYN_SYSTEM_HOST:$DYN_SYSTEM_PORT.")
]
Advertise = Annotated[
    str, typer.Option(help="The host that frontends reach it at, where it listens on 0.0.0.0 or behind a NAT.")
]


def worker(
    called: typer.Context,
    store: opt.Store = "",
    deployment: opt.Deployment = "",
    name: opt.Name = "",
    engine: opt.Engine = "sim",
    model: opt.Source = "",
    served_name: opt.ServedName = "",
    chat_template: opt.ChatTemplate = None,
    address: Address = "tcp://127.0.0.1:0",
    beat_address: BeatAddress = "",
    status_address: StatusAddress = "",
    advertise: Advertise = "",
    drain_s: opt.DrainS = 5.0,
    load_s: opt.LoadS = 7200.0,
    vault_socket: opt.VaultSocket = "",
    vault_uid: opt.VaultUid = None,
    device: opt.Device = "host-0",
    lock: opt.Lock = "",
    lock_token_file: opt.LockTokenFile = None,
    engine_id: opt.EngineId = None,
    group: opt.Group = "",
    standby: opt.Standby = opt.StandbyKind.MAPPED,
    kv: opt.Kv = opt.KvKind.VAULT,
    wake_s: opt.WakeS = 12.0,
    core_dumps: opt.CoreDumps = False,
    vault_gib: opt.VaultGib = None,
    exact: opt.Exact = False,
    kv_gib: opt.KvGib = 0.0,
    context: opt.Context = 0,
    streams_max: opt.StreamsMax = 0,
    threads: opt.TorchThreads = 0,
    allow_chaos: opt.AllowChaos = False,
    sim_ttft_ms: opt.SimTtftMs = 50.0,
    sim_tpot_ms: opt.SimTpotMs = 20.0,
    sim_jitter: opt.SimJitter = 0.10,
    sim_concurrency: opt.SimConcurrency = 256,
    sim_queue: opt.SimQueue = 256,
    sim_block_size: opt.SimBlockSize = 16,
    sim_kv_blocks: opt.SimKvBlocks = 65_536,
    sim_context_tokens_max: opt.SimContext = 32_768,
) -> None:
    """A worker: hosts an engine, registers in the store, serves frontends.

    With a lock (`--lock`, `$FAILOVER_LOCK_PATH`) it stands by until it has it, with its memory in the vault of its
    device (`--vault-socket`, or in `$GMS_SOCKET_DIR`; `holdfast memory serve` runs one).
    """
    from holdfast.cli.asked import asked
    from holdfast.cli.locks import read_token
    from holdfast.cli.models import named
    from holdfast.roles.chat_templates import template_path
    from holdfast.spec.idle import refuse_idle
    from holdfast.spec.launch import WorkerLaunch

    env = environment()
    launch, given = asked(called, worker, WorkerLaunch(**_told(env)))
    refuse_idle(engine, 1, given)
    launch = _seated(launch, env, env.engine_id if engine_id is None else engine_id)
    source, model = named(engine, model, served_name)
    run_foreground(
        structs.replace(
            launch,
            source=source,
            model=model,
            chat_template=template_path(chat_template),
            lock_token=read_token(lock_token_file, env.lock_token),
            beat_address=beat_address or beside(address, env.state_dir, launch.name),
        )
    )


def _told(env: Environment) -> dict[str, Any]:
    """What only the environment says, and what it says where nobody else does."""
    probes = {"starting_ready": env.starting_ready, "health_endpoints": env.ready_endpoints}
    folders = {"state_dir": str(env.state_dir), "cache_dir": str(env.cache_dir)}
    found_by = {"store": own_store(env), "deployment": env.deployment, "status_address": _status_address(env)}
    return {"log_level": env.log_level, "engine_token": env.engine_token, **probes, **folders, **found_by}


def _seated(launch: WorkerLaunch, env: Environment, engine_id: int) -> WorkerLaunch:
    """With its name, and where it sits among the engines it takes turns with: what was not said follows from the
    lock."""
    from holdfast.memory.finding import device_name
    from holdfast.spec.names import group_of, socket_path

    name, group, lock = launch.name, launch.group, launch.lock or env.failover_lock
    place = structs.replace(launch.place, device=device_name(launch.place.device), engine_id=engine_id)
    if lock:
        group = group or group_of(lock, socket.gethostname())
        name = name or f"{group}-{engine_id}"
        vault_socket = place.vault_socket or socket_path(env.gms_socket_dir, place.device)
        place = structs.replace(place, vault_socket=vault_socket)
    name = own_name(env.state_dir, "worker", name)
    return structs.replace(launch, name=name, group=group, lock=lock, place=place, standbys=1 if lock else 0)


def beside(address: str, state_dir: Path, name: str) -> str:
    """A heartbeat's address beside the worker's own: the same host, any port."""
    from holdfast.core.address import TcpAddress, parse_address

    own = parse_address(address)
    return str(TcpAddress(own.host, 0)) if isinstance(own, TcpAddress) else f"unix://{state_dir}/run/{name}.beat"


def _status_address(env: Environment) -> str:
    """Empty: the environment wants no status server."""
    from holdfast.core.address import TcpAddress

    return str(TcpAddress(env.status_host, env.status_port)) if env.status_enabled and env.status_port >= 0 else ""
