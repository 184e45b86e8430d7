"""Opens a directory in Hugging Face's layout: config.json, tokenizer.json, and safetensors in one file or in shards.

Its text side (tokenizer, chat template, end tokens, its makers' sampling defaults) is the same for every architecture
and engine.

Always true: an error names the file, tensor or field that is missing or cannot be read. Only sampling defaults that the
engine supports are used. The tokenizer's own end token comes before all others, because clients do not see it (as in
vLLM). A safetensors header is checked against its file before any tensor is read: offsets inside the file, sizes as
shape and dtype require.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.checkpoint import FileCheckpoint, checked_tensors
from holdfast.engines.torch.files.config import from_hugging_face, with_end
from holdfast.engines.torch.files.gguf_tokenizer import with_bos
from holdfast.engines.torch.files.stored import PLAIN, Stored, bytes_of

# field: (name in a model card, least, most). vLLM takes the same six; the rest of the file is for other ways to draw.
_FIELDS: dict[str, tuple[str, float, float]] = {
    "temperature": ("temperature", 0.0, 2.0),
    "top_p": ("top_p", 1e-9, 1.0),
    "top_k": ("top_k", -1, 2**31 - 1),
    "min_p": ("min_p", 0.0, 1.0),
    "repetition_penalty": ("repetition_penalty", 1e-9, 1e9),
    "max_new_tokens": ("max_tokens", 1, 2**31 - 1),
}
_WHOLE = ("top_k", "max_new_tokens")


def generation_defaults(advice: Mapping[str, Any], where: Path) -> dict[str, float]:
    """Return the sampling defaults by the names of a model card; UserError names a value out of range."""
    defaults: dict[str, float] = {}
    for setting, (name, least, most) in _FIELDS.items():
        value = advice.get(setting)
        if value is None:
            continue
        kinds = (int,) if setting in _WHOLE else (int, float)
        if type(value) not in kinds or not least <= value <= most:
            wanted = "whole number" if setting in _WHOLE else "number"
            raise UserError(f"{where} says {setting} = {value!r}: a {wanted} from {least:g} to {most:g} is needed")
        defaults[name] = value
    return defaults


def token_text(token: Any) -> str:
    """Return the text of a token in tokenizer_config.json: a string, or an object that has it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""


def token_id(tokenizer: Mapping[str, Any], text: str) -> int | None:
    """Return a token's id by its text, from the content of a tokenizer.json."""
    if not text:
        return None
    for added in tokenizer.get("added_tokens") or ():
        if added.get("content") == text:
            return int(added["id"])
    model = tokenizer.get("model") or {}
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, Mapping):
        found = vocabulary.get(text)
        return found if isinstance(found, int) else None
    # A unigram's is a list of pairs, in the order of the ids.
    return next((index for index, pair in enumerate(vocabulary or ()) if pair[0] == text), None)


@dataclass(frozen=True, slots=True)
class ModelText:
    tokenizer_json: bytes = field(repr=False)
    chat_template: str | None = field(repr=False)  # None: it does not chat
    bos_token: str  # the text of its begin-of-text token, for chat templates; empty without one
    end: int | None  # the tokenizer's own end of text
    advice: Mapping[str, Any] = field(repr=False)  # its generation_config.json
    generation_defaults: Mapping[str, float]  # what of that a silent request gets, by the names of a model card


def text_in(path: Path) -> ModelText:
    """Read a directory's text side; UserError names what it lacks."""
    tokenizer = path / "tokenizer.json"
    if not tokenizer.exists():
        raise UserError(f"{path} has no tokenizer.json; save the tokenizer there with transformers' save_pretrained")
    words = read_json(tokenizer)
    if not isinstance(words.get("model"), dict):
        raise UserError(f"{tokenizer} has no model: it is not a tokenizer as transformers saves it")
    # How the tokenizer's own files name its tokens: one that was saved by hand may have only the second file.
    named: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path / name).exists():
            named |= {key: value for key, value in read_json(path / name).items() if value is not None}
    bos, advice = token_text(named.get("bos_token")), advice_in(path)
    return ModelText(
        tokenizer_json=read_bytes(tokenizer),
        chat_template=_chat_template(path, named, bos),
        bos_token=bos,
        end=token_id(words, token_text(named.get("eos_token"))),
        advice=advice,
        generation_defaults=generation_defaults(advice, path / ADVICE),
    )


ADVICE = "generation_config.json"


def advice_in(path: Path) -> dict[str, Any]:
    return read_json(path / ADVICE) if (path / ADVICE).exists() else {}


def config_json(path: Path) -> dict[str, Any]:
    if not (path / "config.json").exists():
        raise UserError(f"{path} has no config.json; a model's directory has one, with tokenizer.json and safetensors")
    return read_json(path / "config.json")


def _chat_template(path: Path, named: dict[str, Any], bos: str) -> str | None:
    """Read the template: a file of its own since transformers 4.43; before, a field, which may list several by name."""
    alone = path / "chat_template.jinja"
    template = read_bytes(alone).decode() if alone.exists() else named.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return with_bos(template, bos) if template else None


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(read_bytes(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise UserError(f"{path} is not a JSON object")
    return read


HEADER_BYTES_MAX = 100_000_000  # the format's own bound
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def look_at_directory(path: Path) -> FileCheckpoint:
    """Read everything but the weights, which have no identity yet. Quick, and without torch."""
    config = from_hugging_face(config_json(path), advice_in(path))
    text = text_in(path)
    config = with_end(config, text.end)
    return FileCheckpoint(
        config=config,
        identity="",
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        source=str(path),
        tensors=checked_tensors(_tensors(path), config, path),
        bos_token=text.bos_token,
        generation_defaults=text.generation_defaults,
    )


def weights_in(path: Path) -> list[Path]:
    """Return the files that hold a directory's tensors, in order; UserError names what is missing of them."""
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
    """Read a file's header: eight bytes of length, a JSON object of that length, then the tensors."""
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
