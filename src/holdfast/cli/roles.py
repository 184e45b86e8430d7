"""`holdfast frontend` and `store`: one process in the foreground, from flags instead of a supervisor. What those and
`holdfast worker` share: where their store is, what they are called, how they run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import structs

from holdfast.cli import options as opt
from holdfast.cli.options import environment
from holdfast.core.errors import settled
from holdfast.settings import Environment

if TYPE_CHECKING:
    from holdfast.spec.launch import Launch

BodyBytesMax = Annotated[int, typer.Option(min=1, help="The largest request body, bytes.")]
StoreAddress = Annotated[
    str, typer.Option(help="Where to listen, unix:// or tcp://; default: a socket in the state directory.")
]


def frontend(
    called: typer.Context,
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
    from holdfast.cli.asked import asked
    from holdfast.core.address import TcpAddress
    from holdfast.spec.launch import FrontendLaunch
    from holdfast.spec.names import own_page

    env = environment()
    told: dict[str, Any] = {"state_dir": str(env.state_dir), "log_level": env.log_level, "api_keys": env.api_keys}
    pattern = FrontendLaunch(store=own_store(env), deployment=env.deployment, **told)
    launch, _ = asked(called, frontend, pattern)
    name = own_name(env.state_dir, "frontend", name)
    where = {"address": str(TcpAddress(host, port)), "status_address": own_page(env.state_dir, name)}
    run_foreground(structs.replace(launch, name=name, **where))


def store(address: StoreAddress = "", name: opt.Name = "store") -> None:
    """The embedded store: who serves what, for one machine or a few."""
    from holdfast.spec.launch import StoreLaunch

    env = environment()
    name = own_name(env.state_dir, "store", name)
    told: dict[str, Any] = {"state_dir": str(env.state_dir), "log_level": env.log_level}
    run_foreground(StoreLaunch(name=name, address=address or own_store(env), **told))


def own_store(env: Environment) -> str:
    return f"unix://{env.state_dir}/run/store.sock"


def own_name(state_dir: Path, role: str, name: str) -> str:
    """`name`, or the next free one of its role, claimed for this process; the state directory is made if need be."""
    from holdfast.cli.state_dir import own
    from holdfast.roles.names import claim_name
    from holdfast.spec.deployment import check_state_dir

    with settled():
        check_state_dir(state_dir)
        own(state_dir)
    return claim_name(state_dir, role, name)


def run_foreground(launch: Launch) -> None:
    from holdfast.cli.machine_checks import check_machine, check_store
    from holdfast.roles.run import run

    with settled():
        check_machine()
        check_store(getattr(launch, "store", ""))
    raise typer.Exit(run(launch))
