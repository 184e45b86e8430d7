"""A small model of the Llama family as the files of its directory: what its config.json says, and weights of zeros."""

from __future__ import annotations

import json
import math
from typing import Any

from holdfast.engines.torch.files.checkpoint import tensor_shapes
from holdfast.engines.torch.files.config import from_hugging_face

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
}


def quiet(*_: object) -> None:
    """Take a report of progress, and do nothing."""


def header(**tensors: dict[str, Any]) -> bytes:
    """Return a safetensors file's, before its tensors."""
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def weights(config: dict[str, Any]) -> bytes:
    """A safetensors file of zeros with all that the model needs."""
    tensors, at = {}, 0
    for name, shape in tensor_shapes(from_hugging_face(config)).items():
        tensors[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + 4 * math.prod(shape)]}
        at += 4 * math.prod(shape)
    return header(**tensors) + bytes(at)
