"""A directory as Hugging Face lays it out: config.json, tokenizer.json, and safetensors in one file or in shards.

Always true: what is missing is named: a file, a tensor, a field. A safetensors header is checked against its file
before any tensor is read: offsets inside, sizes as shape and kind say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.checkpoint import FileCheckpoint, needed
from holdfast.engines.torch.files.config import ModelConfig, from_hugging_face, with_end
from holdfast.engines.torch.files.model_text import advice_in, config_json, read_json, text_in
from holdfast.engines.torch.files.stored import PLAIN, Stored, bytes_of

HEADER_BYTES_MAX = 100_000_000  # the format's own bound
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def config_in(path: Path, advice: Mapping[str, Any] | None = None) -> ModelConfig:
    """A directory's model by its shape alone; `advice` is its generation_config.json."""
    return from_hugging_face(config_json(path), advice)


def look_at_directory(path: Path) -> FileCheckpoint:
    """Read everything but the weights, whose identity is left open. Quick, and without torch."""
    config = config_in(path, advice_in(path))
    text = text_in(path)
    config = with_end(config, text.end)
    return FileCheckpoint(
        config=config,
        identity="",
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        source=str(path),
        tensors=needed(_tensors(path), config, path),
        bos_token=text.bos_token,
        generation_defaults=text.generation_defaults,
    )


def weights_in(path: Path) -> list[Path]:
    """The files that hold a directory's tensors, in order; UserError names what is missing of them."""
    index = path / INDEX
    if not index.exists():
        if not (path / SINGLE).exists():
            raise UserError(f"{path} has neither {SINGLE} nor {INDEX}")
        return [path / SINGLE]
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise UserError(f"{index} has no weight_map")
    missing = sorted({str(name) for name in places.values() if not (path / str(name)).is_file()})
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}, which {INDEX} names")
    return [path / name for name in sorted(set(map(str, places.values())))]


def _tensors(path: Path) -> dict[str, Stored]:
    shards = {file.name: read_header(file) for file in weights_in(path)}
    if not (path / INDEX).exists():
        return shards[SINGLE]
    places = {name: str(shard) for name, shard in read_json(path / INDEX)["weight_map"].items()}
    absent = [name for name, shard in places.items() if name not in shards[shard]]
    if absent:
        raise UserError(f"{path / places[absent[0]]} lacks the tensor {absent[0]}, which {INDEX} says is there")
    return {name: shards[shard][name] for name, shard in places.items()}


def read_header(path: Path) -> dict[str, Stored]:
    """Eight bytes of length, a JSON object of that length, then the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = file.read(length) if 2 <= length <= HEADER_BYTES_MAX else b""
    if len(head) != length:
        raise UserError(f"{path} is not a safetensors file, or is cut short in its header")
    try:
        entries: dict[str, Any] = json.loads(head)
        entries.pop("__metadata__", None)
        return {name: _stored(path, name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} has a safetensors header that cannot be read: {error!r}") from error


def _stored(path: Path, name: str, entry: dict[str, Any], start: int) -> Stored:
    kind, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if kind not in PLAIN:
        known = ", ".join(PLAIN)
        raise UserError(f"{path}: the tensor {name} is {kind}, which is not supported; supported are {known}")
    if last - first != bytes_of(kind, math.prod(shape)):
        raise UserError(f"{path}: the tensor {name} has {last - first} bytes, which is not {kind} of {list(shape)}")
    if not 0 <= first <= last <= path.stat().st_size - start:
        raise UserError(f"{path} is cut short: it ends before its tensor {name} does")
    return Stored(kind, shape, path, start + first)
