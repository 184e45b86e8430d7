"""`holdfast memory`: vaults in the foreground, and what the running ones say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.options import Json, environment
from holdfast.cli.state_dir import made
from holdfast.core.errors import UserError

app = typer.Typer(help="Memory that outlives processes: serve it, look at it.", no_args_is_help=True)

SocketDir = Annotated[
    Path | None, typer.Option(help="Where the sockets are; default $GMS_SOCKET_DIR, or `gms` in the state directory.")
]


@app.callback()
def root() -> None:
    """Memory that outlives processes: serve it, look at it."""


@app.command()
def serve(
    device: Annotated[
        list[str] | None, typer.Option(help="host-0, a GPU's UUID (nvidia-smi -L), or cuda-0; may be repeated.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every GPU of this machine, and host-0.")] = False,
    socket_dir: SocketDir = None,
    budget_gib: Annotated[
        float, typer.Option(min=0, help="At most this much per device, weights and pool; 0: what there is.")
    ] = 0.0,
    allow_uid: Annotated[list[int] | None, typer.Option(help="Serve this user too; may be repeated.")] = None,
    status_address: Annotated[
        str, typer.Option(help="Where /metrics is, e.g. tcp://127.0.0.1:0; with several devices only port 0.")
    ] = "",
) -> None:
    """Keep the memory of devices: a vault and its keeper for each, in the foreground. Ctrl-C ends them.

    Ending them lets go of the memory; killing them does not.
    """
    from holdfast.cli.vaults import run_serve
    from holdfast.memory.finding import device_name, gpu_uuids

    names = [device_name(name) for name in device or ()] + (["host-0", *gpu_uuids()] if every else [])
    if not names:
        raise UserError("no device is named; use --device host-0, --device cuda-0, or --all")
    folder = (socket_dir or environment().gms_socket_dir).absolute()
    uids = tuple(allow_uid or ())
    if folder.exists():
        made(folder, "GMS_SOCKET_DIR, or --socket-dir,")
    raise typer.Exit(run_serve(list(dict.fromkeys(names)), folder, round(budget_gib * 1024**3), uids, status_address))


@app.command()
def status(
    socket_dir: SocketDir = None,
    history: Annotated[bool, typer.Option("--history", help="Show what happened lately, too.")] = False,
    as_json: Json = False,
) -> None:
    """Show the vaults of this machine, and what they keep."""
    from holdfast.cli.vaults import run_status

    raise typer.Exit(run_status((socket_dir or environment().gms_socket_dir).absolute(), history, as_json))
