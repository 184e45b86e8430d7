"""From what a person wrote after `--model` to a checkpoint."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.errors import UserError
from holdfast.engines.torch.checkpoint import Checkpoint, Progress
from holdfast.engines.torch.fetch import SMOLLM2, fetch
from holdfast.engines.torch.gguf_model import open_gguf
from holdfast.engines.torch.safetensors_files import open_directory
from holdfast.engines.torch.tiny import RANDOM, SHAPES, shaped, tiny

DEFAULT_NAMES = ("default", "smollm2-135m")


def resolve(model: str, cache: Path, progress: Progress) -> Checkpoint:
    """Open a model by name or by path, fetching the default one if need be. Blocks: not for an event loop."""
    if model in DEFAULT_NAMES:
        return open_gguf(fetch(SMOLLM2, cache, progress), cache, progress, f"sha256:{SMOLLM2.sha256}")
    if model == "tiny":
        return tiny()
    if model.startswith(RANDOM):
        return shaped(model)
    path = Path(model).expanduser()
    if path.is_dir():
        return open_directory(path, cache, progress)
    if path.is_file() and path.suffix == ".gguf":
        return open_gguf(path, cache, progress)
    wrong = "is neither a directory nor a .gguf file" if path.exists() else "is not there"
    raise UserError(
        f"the model {model} {wrong}; accepted are {' or '.join(DEFAULT_NAMES)}, tiny, the path of a directory with "
        "config.json, tokenizer.json and safetensors, the path of a .gguf file, or, to try what a size costs, "
        f"{' or '.join(RANDOM + shape for shape in SHAPES)}"
    )
