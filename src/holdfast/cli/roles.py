"""`holdfast frontend` and `store`: one process in the foreground, from flags instead of a supervisor. What those and
`holdfast worker` share: where their store is, what they are called, how they run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli import options as opt
from holdfast.cli.options import environment
from holdfast.core.errors import settled
from holdfast.settings import Environment

if TYPE_CHECKING:
    from holdfast.cli.launch import Launch

BodyBytesMax = Annotated[int, typer.Option(min=1, help="The largest request body, bytes.")]
StoreAddress = Annotated[
    str, typer.Option(help="Where to listen, unix:// or tcp://; default: a socket in the state directory.")
]


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
    cors_origin: opt.CorsOrigins = None,
    body_bytes_max: BodyBytesMax = 16 * 1024 * 1024,
    drain_s: opt.DrainS = 30.0,
    access_log: opt.AccessLog = False,
) -> None:
    """A frontend: the OpenAI-compatible HTTP server. Several may share one port."""
    from holdfast.cli.launch import FrontendLaunch
    from holdfast.cli.plan import own_page
    from holdfast.core.address import TcpAddress

    env = environment()
    name = own_name(env.state_dir, "frontend", name)
    found_by = (str(env.state_dir), store or own_store(env), deployment or env.deployment, name)
    where, keys = str(TcpAddress(host, port)), tuple(api_key or env.api_keys)
    run_foreground(
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
            access_log=access_log,
            status_address=own_page(env.state_dir, name),
            cors_origins=tuple(cors_origin or ()),
        )
    )


def store(address: StoreAddress = "", name: opt.Name = "store") -> None:
    """The embedded store: who serves what, for one machine or a few."""
    from holdfast.cli.launch import StoreLaunch

    env = environment()
    name = own_name(env.state_dir, "store", name)
    run_foreground(StoreLaunch(str(env.state_dir), address or own_store(env), name, log_level=env.log_level))


def own_store(env: Environment) -> str:
    return f"unix://{env.state_dir}/run/store.sock"


def own_name(state_dir: Path, role: str, name: str) -> str:
    """`name`, or the next free one of its role, claimed for this process; the state directory is made if need be."""
    from holdfast.cli.names import claim_name
    from holdfast.cli.plan import check_state_dir
    from holdfast.cli.state_dir import own

    with settled():
        check_state_dir(state_dir)
        own(state_dir)
    return claim_name(state_dir, role, name)


def run_foreground(launch: Launch) -> None:
    from holdfast.cli.child import run
    from holdfast.cli.machine_checks import check_machine, check_store

    with settled():
        check_machine()
        check_store(getattr(launch, "store", ""))
    raise typer.Exit(run(launch))
