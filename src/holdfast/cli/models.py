"""What a person wrote after `--model`: what is loaded, what it is called, and fetching it with a bar to watch."""

from __future__ import annotations

from pathlib import Path

from holdfast.cli.examining import Asked, examine, examine_sim
from holdfast.cli.plan import UpOptions
from holdfast.cli.progress import works
from holdfast.core.errors import UserError

SIM_NAME = "holdfast-sim"
DEFAULT = "default"
WORKS = {"fetch": "fetching", "check": "checking", "unpack": "unpacking"}
MODELS = "give a directory with config.json and safetensors, a .gguf file, tiny (random weights), or nothing (SmolLM2)"
NAMES = {DEFAULT: "smollm2-135m-instruct", "smollm2-135m": "smollm2-135m-instruct", "tiny": "tiny"}


def named(engine: str, model: str, served_name: str) -> tuple[str, str]:
    """What is loaded (a path made absolute: engines stand elsewhere), and the name clients ask for."""
    if engine == "sim":
        return DEFAULT, served_name or model or SIM_NAME
    source = model or DEFAULT
    if not _is_made(source):
        source = str(Path(source).expanduser().absolute())
    return source, served_name or NAMES.get(source) or Path(source).name.removesuffix(".gguf")


def _is_made(source: str) -> bool:
    """Fetched, or made of a seed: there is no path."""
    return source in NAMES or source.startswith("random:")


def prepare(options: UpOptions, free_bytes: int | None) -> None:
    """Have the model here, and know that it can be served, before anything is started; UserError if it cannot."""
    if options.engine == "sim":
        examine_sim(options, free_bytes)
        return
    if not _is_made(options.source) and not Path(options.source).exists():
        raise UserError(f"--model {options.source} is not there; {MODELS}")
    with works() as tell:
        examine(
            Asked.of_deployment(options, free_bytes),
            lambda work, done, total: tell(f"{WORKS[work]} SmolLM2-135M-Instruct", done, total),
        )
