"""A model on disk (or out of thin air): what it is, its words, and its tensors under their Hugging Face names.

Always true: a checkpoint that was opened has every tensor its configuration asks for, in the right shape; a missing or
misshapen one was named when it was opened, not in the middle of a load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.config import ModelConfig
from holdfast.engines.torch.files.stored import Stored

if TYPE_CHECKING:  # a model is looked at before torch is loaded
    import torch

# Takes what is going on ("fetch", "hash", "load"), the bytes done, and all there are to do, or None if unknown.
Progress = Callable[[str, int, int | None], None]

NAMES_SHOWN_MAX = 4  # missing tensors in one message: enough to see the pattern


class Checkpoint(Protocol):
    """One model, ready to be read."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def identity(self) -> str:
        """Of the weights' content and the configuration: equal for equal weights, wherever they lie."""

    @property
    def tokenizer_json(self) -> bytes: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def bos_token(self) -> str:
        """The text of its begin-of-text token, for chat templates; empty without one."""

    @property
    def generation_defaults(self) -> Mapping[str, float]:
        """What its makers want a silent request to get, by the names of a model card."""

    @property
    def source(self) -> str:
        """Where it came from, for people."""

    def read(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Rows of a tensor by its Hugging Face name, in stored precision, or fp32 where that is block-quantised."""


@dataclass(frozen=True, slots=True)
class FileCheckpoint:
    """A checkpoint whose tensors lie in files."""

    config: ModelConfig
    identity: str  # empty: not known yet, the files were only looked at (`identity.identified`)
    tokenizer_json: bytes = field(repr=False)
    chat_template: str | None = field(repr=False)
    source: str
    tensors: Mapping[str, Stored] = field(repr=False)
    bos_token: str = ""
    generation_defaults: Mapping[str, float] = field(default_factory=dict)

    def read(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        return self.tensors[name].read(first, last)


@lru_cache(maxsize=8)  # asked for with every tensor that is read; a process has one model, or a few in a test
def tensor_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor a model of this shape has, under its Hugging Face name."""
    hidden, inner = config.hidden, config.intermediate
    q, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    projections = {
        "self_attn.q_proj": ((q, hidden), config.qkv_bias),
        "self_attn.k_proj": ((kv, hidden), config.qkv_bias),
        "self_attn.v_proj": ((kv, hidden), config.qkv_bias),
        "self_attn.o_proj": ((hidden, q), config.o_bias),
        "mlp.gate_proj": ((inner, hidden), config.mlp_bias),
        "mlp.up_proj": ((inner, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, inner), config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_size, "self_attn.k_norm": config.head_size}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary, hidden)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for name, (shape, biased) in projections.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if biased:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocabulary, hidden)
    return shapes


def needed(tensors: Mapping[str, Stored], config: ModelConfig, where: Path) -> dict[str, Stored]:
    """Those of `tensors` that the model is made of, checked; UserError names what is missing or misshapen."""
    shapes = tensor_shapes(config)
    missing = [name for name in shapes if name not in tensors]
    if missing:
        more = f" and {len(missing) - NAMES_SHOWN_MAX} more" if len(missing) > NAMES_SHOWN_MAX else ""
        raise UserError(f"{where} lacks the tensors {', '.join(missing[:NAMES_SHOWN_MAX])}{more}")
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"{where}: the tensor {name} has the shape {list(tensors[name].shape)}; "
                f"by the model's configuration it should be {list(shape)}"
            )
    return {name: tensors[name] for name in shapes}
