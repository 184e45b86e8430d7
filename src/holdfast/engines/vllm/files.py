"""Reads a model's directory for vLLM, without vLLM: its text, and its weights' identity. Any architecture.

Always true: missing files are named before vLLM is loaded, which takes seconds. Weights are safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.checkpoint import OnProgress
from holdfast.engines.torch.files.config import end_tokens
from holdfast.engines.torch.files.directory import ModelText, config_json, text_in, weights_in
from holdfast.engines.torch.files.hub import fetch_from_hub, is_hub_id
from holdfast.engines.torch.files.identity import Piece, identity_of

SOURCES = "a directory with config.json, tokenizer.json and safetensors, or a Hub id (org/name)"
NOISE = ("_name_or_path", "transformers_version")  # of a config.json: how it was saved, not what it is


@dataclass(frozen=True, slots=True)
class ModelFiles:
    path: Path
    config: Mapping[str, Any] = field(repr=False)  # its config.json
    text: ModelText = field(repr=False)
    weights: tuple[Path, ...] = field(repr=False)
    identity: str = ""  # of the weights' files and the configuration; empty: they were only looked at

    @property
    def eos_token_ids(self) -> list[int]:
        """Return the end tokens, the tokenizer's own first; one that the model has no row for is never drawn."""
        found = list(end_tokens(self.text.advice, {**_inner(self.config), **self.config}))
        end, rows = self.text.end, _inner(self.config).get("vocab_size") or self.config.get("vocab_size")
        if end is None or (isinstance(rows, int) and end >= rows):
            return found
        return [end, *(token for token in found if token != end)]

    @property
    def of_text(self) -> Mapping[str, Any]:
        return _inner(self.config)

    @property
    def weights_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.weights)

    def identified(self, cache: Path, progress: OnProgress) -> ModelFiles:
        """Return the files with their identity, for which all weights are read once; it is cached under `cache`."""
        pieces = [Piece(file.name, file, 0, file.stat().st_size) for file in self.weights]
        config = json.dumps({name: said for name, said in self.config.items() if name not in NOISE}, sort_keys=True)
        return replace(self, identity=identity_of(pieces, config, cache, progress))


def look_at_files(source: str, progress: OnProgress) -> ModelFiles:
    """Read the model of `--model`, fetched if it is on the Hub; UserError names what is missing or cannot be."""
    path = Path(source).expanduser()
    if not path.exists() and is_hub_id(source):
        path = fetch_from_hub(source, progress, any_family=True)
    if not path.is_dir():
        there = "is no directory" if path.exists() else "is not there"
        raise UserError(f"--model {source} {there}; --engine vllm takes {SOURCES}")
    return ModelFiles(path, config_json(path), text_in(path), tuple(weights_in(path)))


def check_shares(config: Mapping[str, Any], ranks: int) -> None:
    """Raise UserError if as many ranks cannot have whole heads; vLLM says what else of a model they cannot share."""
    heads = _inner(config).get("num_attention_heads")
    if isinstance(heads, int) and heads % ranks:
        raise UserError(f"--tensor-parallel-size {ranks} cannot share the model's {heads} heads evenly; use a divisor")


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part that makes text, of a model of several kinds of input."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config
