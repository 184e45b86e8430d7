"""What the subcommands share: options that several of them have, and the environment, read once per command."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.config_file import defaults, keys_of
from holdfast.cli.option_checks import deployment_name, finite, process_name
from holdfast.cli.web_access import check_keys, check_origins
from holdfast.core.errors import UserError, settled
from holdfast.settings import Environment, read_environment

_SERVING = "Serving"
_FAILOVER = "Failover"
_SIM = "The sim engine"
_TORCH = "The torch engine"


class StandbyKind(StrEnum):
    """How a standby waits."""

    MAPPED = "mapped"
    UNMAPPED = "unmapped"


class KvKind(StrEnum):
    """Where the KV pool lies."""

    VAULT = "vault"
    DIRECT = "direct"


Engine = Annotated[str, typer.Option(help="Which engine a worker hosts: torch, or sim, the simulator.")]
Host = Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 for everyone, :: with IPv6.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 picks a free port.")]
Workers = Annotated[int, typer.Option(help="How many workers; each is an active engine with its standbys.")]
Standbys = Annotated[int, typer.Option(help="Standbys of each worker; 0: plain workers, without vaults.")]
Frontends = Annotated[int, typer.Option(help="How many frontends share the port.")]
AccessLog = Annotated[bool, typer.Option("--access-log", help="A line in the frontend's log for every request.")]
StatusPort = Annotated[
    int,
    typer.Option(
        min=0, max=65535, help="worker-1a's /metrics and /health; 1b's is one more, 2a's ten more; 0: free ports."
    ),
]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Run in the background.")]


def _read_config(called: typer.Context, config: Path | None) -> Path | None:
    """What the file says becomes the other options' defaults: this one is looked at before them."""
    if config is not None:
        from holdfast.cli.app import up

        with settled():
            called.default_map = defaults(config, up)
    return config


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        is_eager=True,
        callback=_read_config,
        help="A TOML file with any of these options, e.g. port = 9000; the command line wins.",
    ),
]
WaitS = Annotated[
    float,
    typer.Option(
        callback=finite, min=0, help="How long it may take until it serves, seconds; past it all is stopped again."
    ),
]
Untied = Annotated[
    bool,
    typer.Option("--untied", help="If this command is killed the rest goes on, and the next `up` adopts it (systemd)."),
]
Name = Annotated[
    str, typer.Option(callback=process_name, help="How `holdfast ps` calls it; default: the next free name.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, for programs.")]

Deployment = Annotated[
    str,
    typer.Option(
        callback=deployment_name,
        help="The deployment's name; default $DYN_NAMESPACE or local.",
        rich_help_panel=_SERVING,
    ),
]
Store = Annotated[
    str,
    typer.Option(help="A store to use, e.g. etcd://127.0.0.1:2379; default: our own.", rich_help_panel=_SERVING),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        callback=check_origins,
        help="A web origin whose pages may ask from a browser, or '*'; may be repeated. Default: none.",
        rich_help_panel=_SERVING,
    ),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        callback=check_keys,
        help="A key clients must send; may be repeated. Also $HOLDFAST_API_KEYS.",
        rich_help_panel=_SERVING,
    ),
]
HoldS = Annotated[
    float,
    typer.Option(callback=finite, min=0, help="How long streams wait for a worker, seconds.", rich_help_panel=_SERVING),
]
KnownS = Annotated[
    float,
    typer.Option(
        callback=finite,
        min=0,
        help="How long a model whose last worker went is answered 503, not 404, seconds.",
        rich_help_panel=_SERVING,
    ),
]
Expect = Annotated[
    list[str] | None,
    typer.Option(
        "--expect-model",
        help="A model that will have workers: until then it is answered 503, not 404; may be repeated.",
        rich_help_panel=_SERVING,
    ),
]
QueueS = Annotated[
    float,
    typer.Option(
        callback=finite,
        min=0,
        help="How long new requests wait where all workers are full, seconds.",
        rich_help_panel=_SERVING,
    ),
]
DrainS = Annotated[
    float,
    typer.Option(
        callback=finite,
        min=0,
        help="How long answers may finish once asked to stop, seconds.",
        rich_help_panel=_SERVING,
    ),
]

Standby = Annotated[
    StandbyKind, typer.Option(help="A standby's memory: mapped and ready, or given back.", rich_help_panel=_FAILOVER)
]
Kv = Annotated[
    KvKind, typer.Option(help="KV in the vault, where it survives, or the engine's own.", rich_help_panel=_FAILOVER)
]
VaultGib = Annotated[
    float | None,
    typer.Option(callback=finite, min=0, help="A sim engine's memory in the vault, GiB.", rich_help_panel=_FAILOVER),
]
VaultSocket = Annotated[
    str, typer.Option(help="The vault's socket; default: none, memory of its own.", rich_help_panel=_FAILOVER)
]
VaultUid = Annotated[
    list[int] | None,
    typer.Option(
        help="Whose vault it may be, besides this user's and root's; may be repeated.", rich_help_panel=_FAILOVER
    ),
]
Device = Annotated[str, typer.Option(help="The device the vault serves, e.g. host-0.", rich_help_panel=_FAILOVER)]
Lock = Annotated[
    str,
    typer.Option(help="The lock that elects the active; default $FAILOVER_LOCK_PATH.", rich_help_panel=_FAILOVER),
]
LockTokenFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with the token of a lock server on TCP; default $HOLDFAST_LOCK_TOKEN.", rich_help_panel=_FAILOVER
    ),
]
EngineId = Annotated[
    int | None,
    typer.Option(min=0, help="Which of its group this engine is; default $ENGINE_ID or 0.", rich_help_panel=_FAILOVER),
]
Group = Annotated[
    str, typer.Option(help="The name that this engine and its standbys share.", rich_help_panel=_FAILOVER)
]
LoadS = Annotated[
    float,
    typer.Option(callback=finite, min=0, help="How long loading a model may take, seconds.", rich_help_panel=_SERVING),
]
WakeS = Annotated[
    float,
    typer.Option(callback=finite, min=0, help="How long taking over may take, seconds.", rich_help_panel=_FAILOVER),
]
CoreDumps = Annotated[
    bool, typer.Option("--core-dumps", help="Allow core dumps; they delay a failover.", rich_help_panel=_FAILOVER)
]

Source = Annotated[
    str,
    typer.Option(
        "--model",
        help="torch: default (SmolLM2-135M), a directory, a .gguf, a Hub id (org/name), tiny, random:8b; sim: a name.",
        rich_help_panel=_SERVING,
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        help="A Jinja file that makes prompts of chats, in place of the model's own template.", rich_help_panel=_SERVING
    ),
]
ServedName = Annotated[
    str, typer.Option(help="The name clients ask for; default: the model's.", rich_help_panel=_SERVING)
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact/--fast", help="Arithmetic that does not depend on the batch, or the quicker.", rich_help_panel=_TORCH
    ),
]
KvGib = Annotated[
    float,
    typer.Option(
        callback=finite, min=0, help="KV pool, GiB; 0: half on a CPU, on a GPU what is left.", rich_help_panel=_TORCH
    ),
]
Devices = Annotated[
    str,
    typer.Option(
        "--device",
        help="auto (a GPU if there is one), cpu, or GPUs: cuda-0,cuda-1 or their UUIDs; workers take them in turn.",
        rich_help_panel=_TORCH,
    ),
]
Ranks = Annotated[
    int, typer.Option(help="Devices that share one engine's model (tensor parallel).", rich_help_panel=_TORCH)
]
Context = Annotated[
    int, typer.Option(min=0, help="Prompt and answer together, tokens; 0: the model's.", rich_help_panel=_TORCH)
]
StreamsMax = Annotated[
    int, typer.Option(min=0, help="Streams that run at once; 0: 32 on a CPU, 64 on a GPU.", rich_help_panel=_TORCH)
]
TorchThreads = Annotated[
    int, typer.Option("--torch-threads", min=0, help="CPU threads; 0: all cores but one.", rich_help_panel=_TORCH)
]

SimTtftMs = Annotated[
    float, typer.Option(callback=finite, min=0, help="Time to the first token, milliseconds.", rich_help_panel=_SIM)
]
SimTpotMs = Annotated[
    float,
    typer.Option(callback=finite, min=0, help="Time per token, milliseconds; 0 is full speed.", rich_help_panel=_SIM),
]
SimJitter = Annotated[
    float,
    typer.Option(callback=finite, min=0, max=1, help="Share by which a step's time varies.", rich_help_panel=_SIM),
]
SimConcurrency = Annotated[int, typer.Option(min=1, help="Streams that run at once.", rich_help_panel=_SIM)]
SimQueue = Annotated[int, typer.Option(min=0, help="Streams that may wait.", rich_help_panel=_SIM)]
SimBlockSize = Annotated[int, typer.Option(min=1, help="Tokens per KV block.", rich_help_panel=_SIM)]
SimKvBlocks = Annotated[int, typer.Option(min=1, help="KV blocks.", rich_help_panel=_SIM)]
SimContext = Annotated[int, typer.Option(min=1, help="Prompt and answer together, tokens.", rich_help_panel=_SIM)]
SimRanks = Annotated[int, typer.Option(min=1, max=64, help="Processes of one engine.", rich_help_panel=_SIM)]
SimPoisonToken = Annotated[
    int, typer.Option(hidden=True, min=-1, help="A prompt with this token kills its engine.", rich_help_panel=_SIM)
]
AllowChaos = Annotated[
    bool, typer.Option("--allow-chaos", help="Let `holdfast chaos` break workers.", rich_help_panel=_SIM)
]


def given(called: typer.Context, command: Callable[..., None]) -> dict[str, str]:
    """The options that somebody gave, on the command line or in a file: by name, each with its flag."""
    return {key.name: key.flag for key in keys_of(command).values() if _is_given(called, key.name)}


def _is_given(called: typer.Context, name: str) -> bool:
    source = called.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def environment() -> Environment:
    """What the environment says; a wrong variable is the person's to mend."""
    try:
        return read_environment()
    except ValueError as error:
        raise UserError(str(error)) from error
