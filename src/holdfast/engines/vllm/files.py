"""A model's directory for vLLM, looked at without vLLM: its text, and whose weights these are. Any architecture.

Always true: what is missing is named before vLLM, which takes seconds to load, is; weights are safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.checkpoint import Progress
from holdfast.engines.torch.files.config import ends
from holdfast.engines.torch.files.hub import fetch_from_hub, is_hub_id
from holdfast.engines.torch.files.identity import Piece, identity_of
from holdfast.engines.torch.files.model_text import ModelText, config_json, text_in
from holdfast.engines.torch.files.safetensors_files import weights_in

SOURCES = "a directory with config.json, tokenizer.json and safetensors, or a Hub id (org/name)"
NOISE = ("_name_or_path", "transformers_version")  # of a config.json: who saved it, not what it is


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that is on this machine."""

    path: Path
    config: Mapping[str, Any] = field(repr=False)  # its config.json
    text: ModelText = field(repr=False)
    weights: tuple[Path, ...] = field(repr=False)
    identity: str = ""  # of the weights' files and the configuration; empty: they were only looked at

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokenizer's own end before all others; one that the model has no row for is never drawn."""
        found = list(ends(self.text.advice, {**_inner(self.config), **self.config}))
        end, rows = self.text.end, _inner(self.config).get("vocab_size") or self.config.get("vocab_size")
        if end is None or (isinstance(rows, int) and end >= rows):
            return found
        return [end, *(token for token in found if token != end)]

    @property
    def of_text(self) -> Mapping[str, Any]:
        """The part of its configuration that makes text."""
        return _inner(self.config)

    @property
    def weights_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.weights)

    def identified(self, cache: Path, progress: Progress) -> ModelFiles:
        """With its identity, for which all weights are read once; it is remembered under `cache`."""
        pieces = [Piece(file.name, file, 0, file.stat().st_size) for file in self.weights]
        config = json.dumps({name: said for name, said in self.config.items() if name not in NOISE}, sort_keys=True)
        return replace(self, identity=identity_of(pieces, config, cache, progress))


def look_at_files(source: str, progress: Progress) -> ModelFiles:
    """What was said after `--model`, fetched if it is on the Hub; UserError names what is missing or cannot be."""
    path = Path(source).expanduser()
    if not path.exists() and is_hub_id(source):
        path = fetch_from_hub(source, progress, any_family=True)
    if not path.is_dir():
        there = "is no directory" if path.exists() else "is not there"
        raise UserError(f"--model {source} {there}; --engine vllm takes {SOURCES}")
    return ModelFiles(path, config_json(path), text_in(path), tuple(weights_in(path)))


def check_shares(config: Mapping[str, Any], ranks: int) -> None:
    """UserError where as many ranks cannot have whole heads; what else of a model they cannot share, vLLM says."""
    heads = _inner(config).get("num_attention_heads")
    if isinstance(heads, int) and heads % ranks:
        raise UserError(f"--tensor-parallel-size {ranks} cannot share the model's {heads} heads evenly; use a divisor")


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model of several kinds of input, the part that makes text."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config
