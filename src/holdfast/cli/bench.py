"""`holdfast bench`: the commands behind every published figure."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from holdfast.cli.options import environment
from holdfast.core.errors import UserError

app = typer.Typer(help="Measure it; every published figure comes from here.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Measure it; every published figure comes from here."""


@app.command()
def frontend(
    streams: Annotated[int, typer.Option(min=1, help="How many streams at once.")] = 32,
    pace_ms: Annotated[float, typer.Option(min=0, help="Time per token, milliseconds; 0 is full speed.")] = 0.0,
    requests: Annotated[int, typer.Option(min=0, help="How many in all; 0: a few seconds' worth.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="How many workers.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object on stdout, for programs.")] = False,
) -> None:
    """What one streamed token costs the frontend, in CPU time."""
    from holdfast.bench.frontend import FrontendBench, run

    result = run(FrontendBench(streams, pace_ms, requests, workers))
    _show(result, as_json)


@app.command()
def memory(
    device: Annotated[str, typer.Option(help="host-0, a GPU's UUID (nvidia-smi -L), or cuda-0.")] = "host-0",
    gib: Annotated[float, typer.Option(min=0.002, help="How much weights, GiB.")] = 2.0,
    slab_mib: Annotated[int, typer.Option(min=2, help="Size of a slab, MiB; remap costs by their number.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="How often to unmap and remap.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object on stdout, for programs.")] = False,
) -> None:
    """What sharing weights through a vault costs: remap and unmap against their floor, and the memory used."""
    from holdfast.bench.memory import MemoryBench, run
    from holdfast.cli.progress import loading

    if slab_mib % 2:
        raise UserError(f"--slab-mib must be a multiple of 2, the granularity of every device; got {slab_mib}")
    with loading(f"writing {gib:g} GiB to {device}") as progress:
        result = run(MemoryBench(device, gib, slab_mib, rounds), progress)
    _show(result, as_json)


@app.command()
def failover(
    rounds: Annotated[int, typer.Option(min=1, help="How often the active engine is ended.")] = 200,
    streams: Annotated[int, typer.Option(min=0, help="How many clients ask all the time; 0: as many as suit.")] = 0,
    tokens: Annotated[int, typer.Option(min=0, help="How long each answer is; 0: as long as suits.")] = 0,
    vault_gib: Annotated[float, typer.Option(min=0.01, help="sim: weights and KV pool of the engine, GiB.")] = 0.25,
    seed: Annotated[int, typer.Option(help="When and how it is ended.")] = 1,
    engine: Annotated[str, typer.Option(help="sim, or torch with the tiny model.")] = "sim",
    exact: Annotated[bool, typer.Option("--exact/--fast", help="torch: its arithmetic.")] = True,
    kv: Annotated[str, typer.Option(help="torch: where the KV pool lies, vault or direct.")] = "vault",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object on stdout, for programs.")] = False,
) -> None:
    """End the active engine again and again under load: what clients lost, saw wrong, or waited for."""
    from holdfast.bench.engine_kills import EngineKills
    from holdfast.bench.failover import Bench, FailoverBench, run

    if engine not in ("sim", "torch") or kv not in ("vault", "direct"):
        raise UserError(f"--engine is sim or torch and --kv vault or direct; got {engine} and {kv}")
    bench: Bench
    if engine == "sim":
        bench = FailoverBench(rounds, streams or 16, tokens or 200, vault_gib=vault_gib, seed=seed)
    else:
        bench = EngineKills(rounds, streams or 12, tokens or 150, seed, exact, kv)
    _show(run(bench, lambda text: print(text, file=sys.stderr, flush=True)), as_json)


@app.command()
def overload(
    seconds: Annotated[float, typer.Option(min=1, help="How long clients ask.")] = 60.0,
    workers: Annotated[int, typer.Option(min=1, help="How many sim workers.")] = 1,
    load: Annotated[float, typer.Option(min=0.1, help="Clients for each place that the workers have.")] = 2.0,
    kill_every_s: Annotated[float, typer.Option(min=0, help="Kill a worker this often, seconds; 0: never.")] = 0.0,
    seed: Annotated[int, typer.Option(help="What is asked, and who is killed.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object on stdout, for programs.")] = False,
) -> None:
    """Two frontends, clients three to one, on workers that cannot take all: who was served, refused, or lost."""
    from holdfast.bench.overload import OverloadBench, run

    bench = OverloadBench(seconds, workers, load=load, kill_every_s=kill_every_s, seed=seed)
    _show(run(bench, lambda text: print(text, file=sys.stderr, flush=True)), as_json)


@app.command()
def engine(
    model: Annotated[str, typer.Option(help="default, tiny, a directory of safetensors, or a .gguf file.")] = "default",
    streams: Annotated[str, typer.Option(help="How many at once; several with commas between.")] = "1,8",
    tokens: Annotated[int, typer.Option(help="New tokens of each stream.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt, on average.")] = 64,
    compare: Annotated[str, typer.Option(help="transformers: its `generate` takes turns with ours.")] = "",
    repeats: Annotated[int, typer.Option(help="How many rounds; figures are their medians.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of torch; 0: all cores but one, as the engine has.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object on stdout, for programs.")] = False,
) -> None:
    """How fast the torch engine decodes on this CPU, alone: --fast, --exact, and transformers beside them."""
    from holdfast.bench.engine.figures import table
    from holdfast.bench.engine.speed import EngineBench, run

    try:
        counts = tuple(int(count) for count in streams.split(","))
    except ValueError:
        raise UserError(f"--streams are whole numbers with commas between, like 1,8; got {streams}") from None
    cache_dir = environment().cache_dir
    bench = EngineBench(cache_dir, model, counts, tokens, prompt_tokens, compare, repeats, threads)
    result = run(bench, lambda text: print(text, file=sys.stderr, flush=True))
    if as_json:
        _show(result, as_json)
    else:
        sys.stdout.write(table(result))


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    width = max(map(len, result))
    for name, value in result.items():
        sys.stdout.write(f"{name:<{width}}  {value}\n")
