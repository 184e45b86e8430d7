"""The `holdfast` command: every subcommand's options and help. What a command does is in the module named like it.

Rooms are imported inside the commands, so that `holdfast --help` is quick.
"""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec import structs

from holdfast import __version__
from holdfast.cli import bench, locks, memory, roles, worker_role
from holdfast.cli import options as opt
from holdfast.cli.options import environment
from holdfast.cli.state_dir import readable
from holdfast.core.errors import settled

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


@app.command(rich_help_panel=RUN)
def up(
    called: typer.Context,
    config: opt.Config = None,
    engine: opt.Engine = "torch",
    workers: opt.Workers = 1,
    standbys: opt.Standbys = 1,
    frontends: opt.Frontends = 1,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    status_port: opt.StatusPort = 9650,
    access_log: opt.AccessLog = False,
    detach: opt.Detach = False,
    untied: opt.Untied = False,
    wait_s: opt.WaitS = 7200.0,
    model: opt.Source = "",
    served_name: opt.ServedName = "",
    chat_template: opt.ChatTemplate = None,
    deployment: opt.Deployment = "",
    store: opt.Store = "",
    api_key: opt.ApiKeys = None,
    cors_origin: opt.CorsOrigins = None,
    hold_s: opt.HoldS = 30.0,
    known_s: opt.KnownS = 3600.0,
    queue_s: opt.QueueS = 5.0,
    load_s: opt.LoadS = 7200.0,
    drain_s: opt.DrainS = 4.0,
    standby: opt.Standby = opt.StandbyKind.MAPPED,
    kv: opt.Kv = opt.KvKind.VAULT,
    wake_s: opt.WakeS = 12.0,
    vault_gib: opt.VaultGib = None,
    exact: opt.Exact = False,
    device: opt.Devices = "auto",
    ranks: opt.Ranks = 1,
    kv_gib: opt.KvGib = 0.0,
    context: opt.Context = 0,
    streams_max: opt.StreamsMax = 0,
    threads: opt.TorchThreads = 0,
    sim_ttft_ms: opt.SimTtftMs = 50.0,
    sim_tpot_ms: opt.SimTpotMs = 20.0,
    sim_ranks: opt.SimRanks = 1,
    sim_poison_token: opt.SimPoisonToken = -1,
    allow_chaos: opt.AllowChaos = False,
) -> None:
    """Start everything: store, vaults, workers with their standbys, and frontend. Ctrl-C stops it.

    By default a real model, SmolLM2-135M-Instruct; `--engine sim` is a simulator that says random words."""
    from holdfast.cli.asked import asked
    from holdfast.cli.models import named
    from holdfast.cli.up import choose_and_tell, run_up
    from holdfast.roles.chat_templates import template_path
    from holdfast.spec.deployment import DeploymentSpec
    from holdfast.spec.idle import refuse_idle

    with settled():
        env = environment()
        spec, given = asked(called, up, DeploymentSpec(env.deployment, log_level=env.log_level))
        refuse_idle(engine, standbys, given)
        source, name = named(engine, model, served_name)
        told = {"engine_token": env.engine_token, "cache_dir": str(env.cache_dir), "source": source, "model": name}
        told["chat_template"] = template_path(chat_template)
        keys = spec.frontend.api_keys or env.api_keys
        spec = structs.replace(
            spec,
            gpus=choose_and_tell(engine, device, workers * ranks, exact),
            status_host=env.status_host,
            vault_dir=str(env.gms_socket_dir),
            worker=structs.replace(spec.worker, **told),
            frontend=structs.replace(spec.frontend, api_keys=keys),
        )
    raise typer.Exit(run_up(env.state_dir, spec, detach, tied=not untied))


@app.command(rich_help_panel=RUN)
def down() -> None:
    """Stop everything, whether or not its supervisor lives."""
    from holdfast.cli.down import run_down

    raise typer.Exit(run_down(readable(environment().state_dir)))


@app.command(rich_help_panel=RUN)
def ps(as_json: opt.Json = False) -> None:
    """Show what runs."""
    from holdfast.cli.ps import run_ps

    raise typer.Exit(run_ps(readable(environment().state_dir), as_json))


@app.command(rich_help_panel=RUN)
def incidents(
    as_json: opt.Json = False,
    last: Annotated[int, typer.Option(min=0, help="How many, the latest; 0: all of the hundred that are kept.")] = 20,
) -> None:
    """Show what died, why, who went on, and the gap that streams saw."""
    from holdfast.cli.ps import run_incidents

    raise typer.Exit(run_incidents(environment().state_dir, as_json, last))


@app.command(rich_help_panel=RUN)
def chat(
    message: Annotated[str, typer.Argument(help="One question; without it what is piped in, or a conversation.")] = "",
    url: Annotated[str, typer.Option(help="The server, e.g. http://127.0.0.1:8000; default: the one up here.")] = "",
    model: Annotated[str, typer.Option(help="Whom to ask; default: the server's first model.")] = "",
    api_key: Annotated[str, typer.Option(help="The server's key; default: of the one up here.")] = "",
    system: Annotated[str, typer.Option(help="What the model is told before anything else.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The longest answer, tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is the likeliest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
) -> None:
    """Talk to it. A mark in the margin shows where an engine died and its standby went on."""
    from holdfast.cli.chat.talk import Wishes, run_chat

    wishes = Wishes(system, max_tokens, temperature, seed)
    state_dir = environment().state_dir if url else readable(environment().state_dir)
    raise typer.Exit(run_chat(state_dir, url, model, api_key, wishes, message))


app.command(rich_help_panel=PARTS)(worker_role.worker)
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
    - **wake-fails**, **wake-hangs** – a standby's next takeover fails, or never ends
    - **device-error** – as a GPU that is lost for this process: it exits at once
    - **memory-flip** – its view of the weights is damaged
    - **clear** – undo what can be undone
    """
    from holdfast.cli.chaos import run_chaos

    values = {"factor": factor, "tokens": float(tokens), "by": by}
    raise typer.Exit(run_chaos(readable(environment().state_dir), worker, fault, values))


app.add_typer(memory.app, name="memory", rich_help_panel=PARTS)
app.add_typer(locks.app, name="lock", rich_help_panel=PARTS)
app.add_typer(bench.app, name="bench", rich_help_panel=BREAK)
