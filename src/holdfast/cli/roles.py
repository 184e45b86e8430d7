"""`holdfast worker`, `frontend` and `store`: one process in the foreground, from flags instead of a supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli import options as opt
from holdfast.cli.options import environment
from holdfast.core.errors import UserError
from holdfast.settings import Environment

if TYPE_CHECKING:
    from holdfast.cli.launch import Launch

NAMES_MAX = 1024  # processes of one role in one state directory

Address = Annotated[str, typer.Option(help="Where frontends connect; port 0 picks a free one.")]
BeatAddress = Annotated[str, typer.Option(help="Where frontends hear its heartbeat.")]
StatusAddress = Annotated[
    str, typer.Option(help="Where /live, /health and /metrics are; default tcp://127.0.0.1:$DYN_SYSTEM_PORT.")
]
BodyBytesMax = Annotated[int, typer.Option(min=1, help="The largest request body, bytes.")]
StoreAddress = Annotated[
    str, typer.Option(help="Where to listen, unix:// or tcp://; default: a socket in the state directory.")
]


def worker(
    store: opt.Store = "",
    deployment: opt.Deployment = "",
    name: opt.Name = "",
    engine: opt.Engine = "sim",
    model: opt.Model = "holdfast-sim",
    chat_template: opt.ChatTemplate = None,
    address: Address = "tcp://127.0.0.1:0",
    beat_address: BeatAddress = "tcp://127.0.0.1:0",
    status_address: StatusAddress = "",
    drain_s: opt.DrainS = 5.0,
    vault_socket: opt.VaultSocket = "",
    device: opt.Device = "host-0",
    lock: opt.Lock = "",
    lock_token_file: opt.LockTokenFile = None,
    engine_id: opt.EngineId = None,
    group: opt.Group = "",
    standby: opt.Standby = opt.StandbyKind.MAPPED,
    kv: opt.Kv = opt.KvKind.VAULT,
    wake_s: opt.WakeS = 30.0,
    core_dumps: opt.CoreDumps = False,
    vault_gib: opt.VaultGib = None,
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
    """A worker: hosts an engine, registers in the store, serves frontends."""
    from holdfast.cli.chat_templates import template_path
    from holdfast.cli.launch import SimLaunch, WorkerLaunch
    from holdfast.cli.locks import read_token

    env = environment()
    name = _free_name(env.state_dir, "worker", name)
    times = (sim_ttft_ms, sim_tpot_ms, sim_jitter)
    sizes = (sim_concurrency, sim_queue, sim_block_size, sim_kv_blocks, sim_context_tokens_max)
    memory: dict[str, Any] = {} if vault_gib is None else {"vault_gib": vault_gib}
    found_by = (str(env.state_dir), store or _own_store(env), deployment or env.deployment, name)
    addresses = (address, beat_address, status_address or _status_address(env))
    _run(
        WorkerLaunch(
            *found_by,
            engine,
            model,
            *addresses,
            drain_s,
            allow_chaos,
            SimLaunch(*times, *sizes, **memory),
            log_level=env.log_level,
            vault_socket=vault_socket,
            device=device,
            engine_id=env.engine_id if engine_id is None else engine_id,
            lock=lock or env.failover_lock,
            lock_token=read_token(lock_token_file, env.lock_token),
            group=group,
            standby=standby.value,
            kv=kv.value,
            wake_s=wake_s,
            starting_ready=env.starting_ready,
            health_endpoints=env.ready_endpoints,
            core_dumps=core_dumps,
            chat_template=template_path(chat_template),
        )
    )


def _status_address(env: Environment) -> str:
    """Empty: the environment wants no status server."""
    return f"tcp://127.0.0.1:{env.status_port}" if env.status_enabled and env.status_port >= 0 else ""


def frontend(
    store: opt.Store = "",
    deployment: opt.Deployment = "",
    name: opt.Name = "",
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    api_key: opt.ApiKeys = None,
    hold_s: opt.HoldS = 30.0,
    known_s: opt.KnownS = 3600.0,
    expect_model: opt.Expect = None,
    queue_s: opt.QueueS = 5.0,
    body_bytes_max: BodyBytesMax = 16 * 1024 * 1024,
    drain_s: opt.DrainS = 30.0,
) -> None:
    """A frontend: the OpenAI-compatible HTTP server. Several may share one port."""
    from holdfast.cli.launch import FrontendLaunch
    from holdfast.cli.plan import own_page
    from holdfast.core.address import TcpAddress

    env = environment()
    name = _free_name(env.state_dir, "frontend", name)
    found_by = (str(env.state_dir), store or _own_store(env), deployment or env.deployment, name)
    where, keys = str(TcpAddress(host, port)), tuple(api_key or env.api_keys)
    _run(
        FrontendLaunch(
            *found_by,
            where,
            keys,
            hold_s,
            body_bytes_max,
            drain_s,
            log_level=env.log_level,
            models=tuple(expect_model or ()),
            known_s=known_s,
            queue_s=queue_s,
            status_address=own_page(env.state_dir, name),
        )
    )


def store(address: StoreAddress = "", name: opt.Name = "store") -> None:
    """The embedded store: who serves what, for one machine or a few."""
    from holdfast.cli.launch import StoreLaunch

    env = environment()
    name = _free_name(env.state_dir, "store", name)
    _run(StoreLaunch(str(env.state_dir), address or _own_store(env), name, log_level=env.log_level))


def _own_store(env: Environment) -> str:
    return f"unix://{env.state_dir}/run/store.sock"


def _free_name(state_dir: Path, role: str, name: str) -> str:
    """`name` if nobody has it; without one, the first of role-1, role-2, … that is nobody's."""
    from holdfast.cli.plan import check_state_dir
    from holdfast.cli.state_dir import own
    from holdfast.supervise.records import launch_path, read_record

    check_state_dir(state_dir)
    own(state_dir)

    def taken(candidate: str) -> bool:
        record = read_record(state_dir, candidate)
        return launch_path(state_dir, candidate).exists() or (record is not None and record.alive)

    if not name:
        return next(free for place in range(1, NAMES_MAX) if not taken(free := f"{role}-{place}"))
    if taken(name):
        raise UserError(f"{name} runs already in {state_dir}; see `holdfast ps`, or choose another --name")
    return name


def _run(launch: Launch) -> None:
    from holdfast.cli.child import run
    from holdfast.cli.machine_checks import check_machine, check_store

    check_machine()
    check_store(getattr(launch, "store", ""))
    raise typer.Exit(run(launch))
