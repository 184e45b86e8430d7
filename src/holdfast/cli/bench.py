"""`holdfast bench`: the commands behind every published figure."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

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
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    width = max(map(len, result))
    for name, value in result.items():
        sys.stdout.write(f"{name:<{width}}  {value}\n")
