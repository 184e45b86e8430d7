"""What a directory as Hugging Face lays it out says of a model's text: its tokenizer, its chat template, how its makers
want it to be drawn from. The same for every architecture, and for every engine.

Always true: what is missing or cannot be read is named, with its file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.generation import generation_defaults, token_id, token_text
from holdfast.engines.torch.files.gguf_tokenizer import with_bos


@dataclass(frozen=True, slots=True)
class ModelText:
    tokenizer_json: bytes = field(repr=False)
    chat_template: str | None = field(repr=False)  # None: it does not chat
    bos_token: str  # the text of its begin-of-text token, for chat templates; empty without one
    end: int | None  # the tokenizer's own end of text
    advice: Mapping[str, Any] = field(repr=False)  # its generation_config.json
    generation_defaults: Mapping[str, float]  # what of that a silent request gets, by the names of a model card


def text_in(path: Path) -> ModelText:
    """UserError names what a directory lacks."""
    tokenizer = path / "tokenizer.json"
    if not tokenizer.exists():
        raise UserError(f"{path} has no tokenizer.json; save the tokenizer there with transformers' save_pretrained")
    words = read_json(tokenizer)
    if not isinstance(words.get("model"), dict):
        raise UserError(f"{tokenizer} has no model: it is not a tokenizer as transformers saves it")
    named = _tokenizer_config(path)
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


def _tokenizer_config(path: Path) -> dict[str, Any]:
    """How the tokenizer's own files name its tokens; one that was saved by hand may have only the second."""
    said: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path / name).exists():
            said |= {key: value for key, value in read_json(path / name).items() if value is not None}
    return said


def _chat_template(path: Path, named: dict[str, Any], bos: str) -> str | None:
    """A file of its own since transformers 4.43; before, a field, which may list several templates by name."""
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
