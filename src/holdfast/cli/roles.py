"""`holdfast worker`, `frontend` and `store`: one process in the foreground, from flags instead of a supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import environment
from holdfast.core.errors import UserError
from holdfast.settings import Environment

if TYPE_CHECKING:
    from holdfast.cli.launch import Launch

SIM = "The sim engine"
NAMES_MAX = 1024  # processes of one role in one state directory

Store = Annotated[str, typer.Option(help="The store: unix://, tcp:// or etcd://; default: the state directory's own.")]
Deployment = Annotated[str, typer.Option(help="The deployment's name; default $DYN_NAMESPACE or local.")]
Name = Annotated[str, typer.Option(help="How `holdfast ps` calls it; default: the next free name.")]


def worker(
    store: Store = "",
    deployment: Deployment = "",
    name: Name = "",
    engine: Annotated[str, typer.Option(help="Which engine it hosts.")] = "sim",
    model: Annotated[str, typer.Option(help="The name clients ask for.")] = "holdfast-sim",
    address: Annotated[str, typer.Option(help="Where frontends connect; port 0 picks a free one.")] = "tcp://127.0.0.1:0",
    beat_address: Annotated[str, typer.Option(help="Where frontends hear its heartbeat.")] = "tcp://127.0.0.1:0",
    status_address: Annotated[
        str, typer.Option(help="Where /live, /health and /metrics are; default 127.0.0.1:$DYN_SYSTEM_PORT.")
    ] = "",
    drain_s: Annotated[float, typer.Option(min=0, help="SIGTERM to exit at most, seconds.")] = 5.0,
    allow_chaos: Annotated[bool, typer.Option("--allow-chaos", help="Let `holdfast chaos` break it.")] = False,
    sim_ttft_ms: Annotated[
        float, typer.Option(min=0, help="Time to the first token, milliseconds.", rich_help_panel=SIM)
    ] = 50.0,
    sim_tpot_ms: Annotated[
        float, typer.Option(min=0, help="Time per token, milliseconds; 0 is full speed.", rich_help_panel=SIM)
    ] = 20.0,
    sim_jitter: Annotated[
        float, typer.Option(min=0, max=1, help="Share by which a step's time varies.", rich_help_panel=SIM)
    ] = 0.10,
    sim_concurrency: Annotated[int, typer.Option(min=1, help="Streams that run at once.", rich_help_panel=SIM)] = 256,
    sim_queue: Annotated[int, typer.Option(min=0, help="Streams that may wait.", rich_help_panel=SIM)] = 256,
    sim_block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.", rich_help_panel=SIM)] = 16,
    sim_kv_blocks: Annotated[int, typer.Option(min=1, help="KV blocks.", rich_help_panel=SIM)] = 65_536,
    sim_context_tokens_max: Annotated[
        int, typer.Option(min=1, help="Prompt and answer together, tokens.", rich_help_panel=SIM)
    ] = 32_768,
) -> None:
    """A worker: hosts an engine, registers in the store, serves frontends."""
    from holdfast.cli.launch import SimLaunch, WorkerLaunch

    env = environment()
    launch = WorkerLaunch(
        str(env.state_dir),
        store or _own_store(env),
        deployment or env.deployment,
        _free_name(env.state_dir, "worker", name),
        engine,
        model,
        address,
        beat_address,
        status_address or f"tcp://127.0.0.1:{env.status_port}",
        drain_s,
        allow_chaos,
        SimLaunch(
            sim_ttft_ms,
            sim_tpot_ms,
            sim_jitter,
            sim_concurrency,
            sim_queue,
            sim_block_size,
            sim_kv_blocks,
            sim_context_tokens_max,
        ),
        log_level=env.log_level,
    )
    _run(launch)


def frontend(
    store: Store = "",
    deployment: Deployment = "",
    name: Name = "",
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 for everyone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 picks a free port.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key clients must send; may be repeated. Also $HOLDFAST_API_KEYS.")
    ] = None,
    hold_s: Annotated[float, typer.Option(min=0, help="How long streams wait for a worker, seconds.")] = 30.0,
    body_bytes_max: Annotated[int, typer.Option(min=1, help="The largest request body, bytes.")] = 16 * 1024 * 1024,
    drain_s: Annotated[float, typer.Option(min=0, help="How long answers may finish after SIGTERM, seconds.")] = 30.0,
) -> None:
    """A frontend: the OpenAI-compatible HTTP server. Several may share one port."""
    from holdfast.cli.launch import FrontendLaunch
    from holdfast.core.address import TcpAddress

    env = environment()
    launch = FrontendLaunch(
        str(env.state_dir),
        store or _own_store(env),
        deployment or env.deployment,
        _free_name(env.state_dir, "frontend", name),
        str(TcpAddress(host, port)),
        tuple(api_key or env.api_keys),
        hold_s,
        body_bytes_max,
        drain_s,
        log_level=env.log_level,
    )
    _run(launch)


def store(
    address: Annotated[
        str, typer.Option(help="Where to listen, unix:// or tcp://; default: a socket in the state directory.")
    ] = "",
    name: Annotated[str, typer.Option(help="How `holdfast ps` calls it.")] = "store",
) -> None:
    """The embedded store: who serves what, for one machine or a few."""
    from holdfast.cli.launch import StoreLaunch

    env = environment()
    launch = StoreLaunch(
        str(env.state_dir),
        address or _own_store(env),
        _free_name(env.state_dir, "store", name),
        log_level=env.log_level,
    )
    _run(launch)


def _own_store(env: Environment) -> str:
    return f"unix://{env.state_dir}/run/store.sock"


def _free_name(state_dir: Path, role: str, name: str) -> str:
    """`name` if nobody has it; without one, the first of role-1, role-2, … that is not a supervisor's or a live one's."""
    from holdfast.supervise.records import launch_path, read_record

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
    from holdfast.cli.machine_checks import check_machine
    from holdfast.cli.plan import check_state_dir

    check_machine()
    check_state_dir(Path(launch.state_dir))
    raise typer.Exit(run(launch))
