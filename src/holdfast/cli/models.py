"""What a person wrote after `--model`: what is loaded, what it is called, and fetching it with a bar to watch."""

from __future__ import annotations

from pathlib import Path

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


def prepare(engine: str, source: str, cache_dir: Path) -> None:
    """Have the model here before anything is started; UserError if it cannot be had."""
    if engine != "torch":
        return
    if not _is_made(source) and not Path(source).exists():
        raise UserError(f"--model {source} is not there; {MODELS}")
    if NAMES.get(source) != NAMES[DEFAULT]:
        return
    from holdfast.engines.torch.fetch import SMOLLM2, fetch

    with works() as tell:
        fetch(SMOLLM2, cache_dir, lambda work, done, total: tell(f"{WORKS[work]} SmolLM2-135M-Instruct", done, total))
