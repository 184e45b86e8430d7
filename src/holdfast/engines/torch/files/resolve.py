"""From what a person wrote after `--model` to a checkpoint."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.checkpoint import Checkpoint, FileCheckpoint, Progress
from holdfast.engines.torch.files.config import ModelConfig
from holdfast.engines.torch.files.fetch import SMOLLM2, fetch, place_of
from holdfast.engines.torch.files.gguf_model import look_at_gguf
from holdfast.engines.torch.files.hub import fetch_from_hub, is_hub_id
from holdfast.engines.torch.files.identity import identified
from holdfast.engines.torch.files.safetensors_files import config_in, look_at_directory
from holdfast.engines.torch.files.tiny import RANDOM, SHAPES, shaped, tiny

DEFAULT_NAMES = ("default", "smollm2-135m")


def resolve(model: str, cache: Path, progress: Progress) -> Checkpoint:
    """Open a model by name or by path, fetching the default one if need be. Blocks: not for an event loop."""
    return known(look_at(model, cache, progress), cache, progress)


def known(looked_at: Checkpoint, cache: Path, progress: Progress) -> Checkpoint:
    """With its identity, for which all weights are read once."""
    return identified(looked_at, cache, progress) if isinstance(looked_at, FileCheckpoint) else looked_at


def look_at(model: str, cache: Path, progress: Progress) -> Checkpoint:
    """All that can be known of a model without reading its weights or loading torch; their identity may be left open.
    UserError names what is missing or not supported."""
    if model in DEFAULT_NAMES:
        return look_at_gguf(fetch(SMOLLM2, cache, progress), f"sha256:{SMOLLM2.sha256}")
    if model == "tiny":
        return tiny()
    if model.startswith(RANDOM):
        return shaped(model)
    path = Path(model).expanduser()
    if not path.exists() and is_hub_id(model):
        path = fetch_from_hub(model, progress)
    if path.is_dir():
        return look_at_directory(path)
    if path.is_file() and path.suffix == ".gguf":
        return look_at_gguf(path)
    wrong = "is neither a directory nor a .gguf file" if path.exists() else "is not there"
    raise UserError(
        f"the model {model} {wrong}; accepted are {' or '.join(DEFAULT_NAMES)}, tiny, the path of a directory with "
        "config.json, tokenizer.json and safetensors, the path of a .gguf file, or, to try what a size costs, "
        f"{' or '.join(RANDOM + shape for shape in SHAPES)}"
    )


def shape_at_hand(model: str, cache: Path) -> ModelConfig | None:
    """What shape a model has, if that can be told at once; None if it has to be fetched first. UserError as above."""
    path = place_of(SMOLLM2, cache) if model in DEFAULT_NAMES else Path(model).expanduser()
    if model == "tiny" or model.startswith(RANDOM):
        return (tiny() if model == "tiny" else shaped(model)).config
    if path.is_dir():
        return config_in(path)
    return look_at_gguf(path).config if path.is_file() else None
