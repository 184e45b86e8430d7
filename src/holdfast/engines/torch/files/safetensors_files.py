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
from holdfast.engines.torch.files.generation import generation_defaults, token_id, token_text
from holdfast.engines.torch.files.gguf_tokenizer import with_bos
from holdfast.engines.torch.files.stored import PLAIN, Stored, bytes_of

HEADER_BYTES_MAX = 100_000_000  # the format's own bound
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def config_in(path: Path, advice: Mapping[str, Any] | None = None) -> ModelConfig:
    """A directory's model by its shape alone; `advice` is its generation_config.json."""
    if not (path / "config.json").exists():
        raise UserError(f"{path} has no config.json; a model's directory has one, with tokenizer.json and safetensors")
    return from_hugging_face(_json(path / "config.json"), advice)


def look_at_directory(path: Path) -> FileCheckpoint:
    """Read everything but the weights, whose identity is left open. Quick, and without torch."""
    generation = path / "generation_config.json"
    advice = _json(generation) if generation.exists() else {}
    config = config_in(path, advice)
    tokenizer = path / "tokenizer.json"
    if not tokenizer.exists():
        raise UserError(f"{path} has no tokenizer.json; save the tokenizer there with transformers' save_pretrained")
    words = _json(tokenizer)
    if not isinstance(words.get("model"), dict):
        raise UserError(f"{tokenizer} has no model: it is not a tokenizer as transformers saves it")
    named = _tokenizer_config(path)
    config = with_end(config, token_id(words, token_text(named.get("eos_token"))))
    bos = token_text(named.get("bos_token"))
    tensors = needed(_tensors(path), config, path)
    return FileCheckpoint(
        config=config,
        identity="",
        tokenizer_json=_bytes(tokenizer),
        chat_template=_chat_template(path, named, bos),
        source=str(path),
        tensors=tensors,
        bos_token=bos,
        generation_defaults=generation_defaults(advice, generation),
    )


def _tensors(path: Path) -> dict[str, Stored]:
    index = path / INDEX
    if not index.exists():
        if not (path / SINGLE).exists():
            raise UserError(f"{path} has neither {SINGLE} nor {INDEX}")
        return read_header(path / SINGLE)
    places = _json(index).get("weight_map")
    if not isinstance(places, dict):
        raise UserError(f"{index} has no weight_map")
    missing = sorted({str(name) for name in places.values() if not (path / str(name)).is_file()})
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}, which {INDEX} names")
    shards = {str(name): read_header(path / str(name)) for name in sorted(set(places.values()))}
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


def _tokenizer_config(path: Path) -> dict[str, Any]:
    """How the tokenizer's own files name its tokens; one that was saved by hand may have only the second."""
    said: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path / name).exists():
            said |= {key: value for key, value in _json(path / name).items() if value is not None}
    return said


def _chat_template(path: Path, named: dict[str, Any], bos: str) -> str | None:
    """A file of its own since transformers 4.43; before, a field, which may list several templates by name."""
    alone = path / "chat_template.jinja"
    template = _bytes(alone).decode() if alone.exists() else named.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return with_bos(template, bos) if template else None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(_bytes(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise UserError(f"{path} is not a JSON object")
    return read
