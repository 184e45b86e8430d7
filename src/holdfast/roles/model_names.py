"""What a person wrote after `--model`, or in a manifest: what is loaded, and what clients call it."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.hub import is_hub_id

SIM_NAME = "holdfast-sim"
DEFAULT = "default"
NAMES = {DEFAULT: "smollm2-135m-instruct", "smollm2-135m": "smollm2-135m-instruct", "tiny": "tiny"}
# What to expect of models that are for trying Holdfast out, by the names that clients ask for.
NOTES = {
    NAMES[DEFAULT]: "This is a tiny model (135M parameters): wrong and repetitive text is its own, not the server's.\n"
    "For a better one: `holdfast up --model Qwen/Qwen2.5-1.5B-Instruct` (3 GB from the Hugging Face Hub).",
    "tiny": "This model has random weights: its text means nothing.",
    SIM_NAME: "This is a simulator: its text is random words.",
}


def named(engine: str, model: str, served_name: str) -> tuple[str, str]:
    """What is loaded (a path made absolute: engines stand elsewhere), and the name clients ask for."""
    if engine == "sim":
        return DEFAULT, served_name or model or SIM_NAME
    source = model or DEFAULT
    if is_made(source):
        return source, served_name or NAMES.get(source) or source
    try:
        path = Path(source).expanduser().absolute()
        is_there = path.exists()
    except (OSError, RuntimeError) as error:  # too long; nobody's home
        raise UserError(f"--model {source}: {error}") from error
    if not is_there and is_hub_id(source):
        return source, served_name or source.partition("@")[0]
    return str(path), served_name or path.name.removesuffix(".gguf")


def is_made(source: str) -> bool:
    """Fetched, or made of a seed: there is no path."""
    return source in NAMES or source.startswith("random:")
