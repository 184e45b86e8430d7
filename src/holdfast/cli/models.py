"""What a person wrote after `--model`: what is loaded, what it is called, and fetching it with a bar to watch."""

from __future__ import annotations

from pathlib import Path

from holdfast.cli.progress import loading

SIM_NAME = "holdfast-sim"
DEFAULT = "default"
NAMES = {DEFAULT: "smollm2-135m-instruct", "smollm2-135m": "smollm2-135m-instruct", "tiny": "tiny"}


def named(engine: str, model: str, served_name: str) -> tuple[str, str]:
    """What is loaded (a path made absolute: engines stand elsewhere), and the name clients ask for."""
    if engine == "sim":
        return DEFAULT, served_name or model or SIM_NAME
    source = model or DEFAULT
    if source not in NAMES:
        source = str(Path(source).expanduser().absolute())
    return source, served_name or NAMES.get(source) or Path(source).name.removesuffix(".gguf")


def prepare(engine: str, source: str, cache_dir: Path) -> None:
    """Have the default model here before anything is started; UserError if it cannot be had."""
    if engine != "torch" or NAMES.get(source) != NAMES[DEFAULT]:
        return
    from holdfast.engines.torch.fetch import SMOLLM2, fetch

    with loading("fetching SmolLM2-135M-Instruct") as bar:
        fetch(SMOLLM2, cache_dir, lambda work, done, total: bar(done, total or 0))
