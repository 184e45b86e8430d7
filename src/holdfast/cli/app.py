"""The `holdfast` command: every subcommand's options and help. What a command does is in the module named like it.

Rooms are imported inside the commands, so that `holdfast --help` is quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import __version__
from holdfast.cli import bench, roles
from holdfast.cli.options import environment

RUN = "Run it"
PARTS = "Run one process by hand"
BREAK = "Break it and measure it"

app = typer.Typer(
    help="LLM serving whose streams survive dead and frozen engines: an OpenAI-compatible server on one machine.",
    epilog="State (sockets, logs, records) is kept in $HOLDFAST_STATE_DIR, default ~/.holdfast.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Options of `holdfast` itself."""


SERVING, SIM = "Serving", "The sim engine"


@app.command(rich_help_panel=RUN)
def up(
    engine: Annotated[str, typer.Option(help="Which engine the workers host.")] = "sim",
    workers: Annotated[int, typer.Option(help="How many workers.")] = 2,
    frontends: Annotated[int, typer.Option(help="How many frontends share the port.")] = 1,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 for everyone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 picks a free port.")] = 8000,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run in the background.")] = False,
    model: Annotated[
        str, typer.Option(help="The name clients ask for.", rich_help_panel=SERVING)
    ] = "holdfast-sim",
    deployment: Annotated[
        str, typer.Option(help="The deployment's name; default $DYN_NAMESPACE or local.", rich_help_panel=SERVING)
    ] = "",
    store: Annotated[
        str, typer.Option(help="A store to use, e.g. etcd://127.0.0.1:2379; default: our own.", rich_help_panel=SERVING)
    ] = "",
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key clients must send; may be repeated. Also $HOLDFAST_API_KEYS.", rich_help_panel=SERVING),
    ] = None,
    hold_s: Annotated[
        float, typer.Option(min=0, help="How long streams wait for a worker, seconds.", rich_help_panel=SERVING)
    ] = 30.0,
    drain_s: Annotated[
        float, typer.Option(min=0, help="How long answers may finish after Ctrl-C, seconds.", rich_help_panel=SERVING)
    ] = 4.0,
    sim_ttft_ms: Annotated[
        float, typer.Option(min=0, help="Time to the first token, milliseconds.", rich_help_panel=SIM)
    ] = 50.0,
    sim_tpot_ms: Annotated[
        float, typer.Option(min=0, help="Time per token, milliseconds; 0 is full speed.", rich_help_panel=SIM)
    ] = 20.0,
    allow_chaos: Annotated[
        bool, typer.Option("--allow-chaos", help="Let `holdfast chaos` break the workers.", rich_help_panel=SIM)
    ] = False,
) -> None:
    """Start everything: store, workers and frontend. Ctrl-C stops it."""
    from holdfast.cli.launch import SimLaunch
    from holdfast.cli.plan import UpOptions
    from holdfast.cli.up import run_up

    env = environment()
    options = UpOptions(
        deployment=deployment or env.deployment,
        engine=engine,
        model=model,
        workers=workers,
        frontends=frontends,
        host=host,
        port=port,
        store=store,
        hold_s=hold_s,
        drain_s=drain_s,
        allow_chaos=allow_chaos,
        api_keys=tuple(api_key or env.api_keys),
        sim=SimLaunch(ttft_ms=sim_ttft_ms, tpot_ms=sim_tpot_ms),
        log_level=env.log_level,
    )
    raise typer.Exit(run_up(env.state_dir, options, detach))


@app.command(rich_help_panel=RUN)
def down() -> None:
    """Stop everything, whether or not its supervisor lives."""
    from holdfast.cli.down import run_down

    raise typer.Exit(run_down(environment().state_dir))


@app.command(rich_help_panel=RUN)
def ps(
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout, for programs.")] = False,
) -> None:
    """Show what runs."""
    from holdfast.cli.ps import run_ps

    raise typer.Exit(run_ps(environment().state_dir, as_json))


app.command(rich_help_panel=PARTS)(roles.worker)
app.command(rich_help_panel=PARTS)(roles.frontend)
app.command(rich_help_panel=PARTS)(roles.store)


@app.command(rich_help_panel=BREAK)
def chaos(
    worker: Annotated[str, typer.Argument(help="The worker's name, as `holdfast ps` shows it.")],
    fault: Annotated[str, typer.Argument(help="What to do to it; see above.")],
    factor: Annotated[float, typer.Option(help="slow: how many times slower.")] = 20.0,
    tokens: Annotated[int, typer.Option(help="error-after: how many more tokens.")] = 5,
    by: Annotated[float, typer.Option(help="drift-logprobs: how much lower.")] = 0.5,
) -> None:
    """Break a worker on purpose (start it with --allow-chaos).

    Faults:

    - **crash** – the process kills itself (SIGKILL)
    - **stop** – the process stops itself (SIGSTOP)
    - **wedge** – the process lives, its engine makes no step any more
    - **slow** – everything takes --factor times as long
    - **wrong-tokens** – every token is another word than it should be
    - **drift-logprobs** – every logprob is lower --by this
    - **cut** – running streams vanish without an end
    - **error-after** – running streams fail after --tokens more
    - **reset** – its connections are reset
    - **clear** – undo what can be undone
    """
    from holdfast.cli.chaos import run_chaos

    values = {"factor": factor, "tokens": float(tokens), "by": by}
    raise typer.Exit(run_chaos(environment().state_dir, worker, fault, values))


app.add_typer(bench.app, name="bench", rich_help_panel=BREAK)
