"""`holdfast worker`: one engine in the foreground, from flags, and from the environment that a pod gives its engines.

`ENGINE_ID`, `GMS_SOCKET_DIR`, `FAILOVER_LOCK_PATH` and `DYN_SYSTEM_PORT` are enough for an engine that has a standby:
its vault is its device's in that directory, and whoever takes turns with the same lock is of its group.
"""

from __future__ import annotations

import hashlib
import re
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli import options as opt
from holdfast.cli.options import environment
from holdfast.cli.roles import own_name, own_store, run_foreground
from holdfast.settings import Environment
from holdfast.spec.waits import WAKE_S

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
    wake_s: opt.WakeS = WAKE_S,
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
    from holdfast.cli.chat_templates import template_path
    from holdfast.cli.idle_options import refuse_idle
    from holdfast.cli.launch import SimLaunch, TorchLaunch, WorkerLaunch
    from holdfast.cli.locks import read_token
    from holdfast.cli.models import named

    refuse_idle(engine, 1, opt.given(called, worker))
    env = environment()
    name, seat = _seat(env, name, device, lock, env.engine_id if engine_id is None else engine_id, group, vault_socket)
    source, model = named(engine, model, served_name)
    sizes = (sim_concurrency, sim_queue, sim_block_size, sim_kv_blocks, sim_context_tokens_max)
    memory: dict[str, Any] = {} if vault_gib is None else {"vault_gib": vault_gib}
    limits = {"context_tokens_max": context, "concurrency": streams_max, "threads": threads}
    seat |= {"store": store or own_store(env), "deployment": deployment or env.deployment, "name": name}
    seat |= {"address": address, "beat_address": beat_address or beside(address, env.state_dir, name)}
    seat |= {"status_address": status_address or _status_address(env), "advertise": advertise}
    seat |= {"standby": standby.value, "kv": kv.value, "lock_token": read_token(lock_token_file, env.lock_token)}
    seat |= {"drain_s": drain_s, "wake_s": wake_s, "load_s": load_s, "core_dumps": core_dumps}
    seat |= {"vault_uids": tuple(vault_uid or ())}
    seat |= {"engine": engine, "model": model, "source": source, "chat_template": template_path(chat_template)}
    seat |= {"torch": TorchLaunch(exact=exact, kv_gib=kv_gib, **limits), "allow_chaos": allow_chaos}
    seat |= {"sim": SimLaunch(sim_ttft_ms, sim_tpot_ms, sim_jitter, *sizes, **memory)}
    run_foreground(WorkerLaunch(**_told(env), **seat))


def _told(env: Environment) -> dict[str, Any]:
    """What only the environment says."""
    probes = {"starting_ready": env.starting_ready, "health_endpoints": env.ready_endpoints}
    probes |= {"engine_token": env.engine_token}
    folders = {"state_dir": str(env.state_dir), "cache_dir": str(env.cache_dir)}
    return {"log_level": env.log_level, **folders, **probes}


def _seat(
    env: Environment, name: str, device: str, lock: str, engine_id: int, group: str, vault_socket: str
) -> tuple[str, dict[str, Any]]:
    """What it is called, and where it sits among the engines it takes turns with: what was not said follows from the
    lock."""
    from holdfast.memory.finding import device_name, socket_path

    device, lock = device_name(device), lock or env.failover_lock
    if lock:
        group = group or group_of(lock, socket.gethostname())
        name = name or f"{group}-{engine_id}"
        vault_socket = vault_socket or socket_path(env.gms_socket_dir, device)
    seat = {"vault_socket": vault_socket, "device": device, "engine_id": engine_id, "lock": lock, "group": group}
    return own_name(env.state_dir, "worker", name), {**seat, "standbys": 1 if lock else 0}


def group_of(lock: str, host: str) -> str:
    """The name that engines with the same lock share. A path means another file on another machine, an address does
    not."""
    path = re.sub(r"^(flock|lock\+unix)://", "", lock)
    local = "://" not in path
    stem = re.sub(r"[^a-z0-9]+", "-", Path(path).stem.lower()).strip("-")[:20] or "engines"
    whose = f"{host if local else ''} {path}"
    return f"{stem}-{hashlib.sha256(whose.encode()).hexdigest()[:8]}"


def beside(address: str, state_dir: Path, name: str) -> str:
    """A heartbeat's address beside the worker's own: the same host, any port."""
    from holdfast.core.address import TcpAddress, parse_address

    own = parse_address(address)
    return str(TcpAddress(own.host, 0)) if isinstance(own, TcpAddress) else f"unix://{state_dir}/run/{name}.beat"


def _status_address(env: Environment) -> str:
    """Empty: the environment wants no status server."""
    from holdfast.core.address import TcpAddress

    return str(TcpAddress(env.status_host, env.status_port)) if env.status_enabled and env.status_port >= 0 else ""
