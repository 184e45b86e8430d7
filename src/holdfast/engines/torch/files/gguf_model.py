"""A GGUF file as a checkpoint: its tensors under Hugging Face names, in Hugging Face's row order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.engines.torch.files.checkpoint import FileCheckpoint, needed, tensor_shapes
from holdfast.engines.torch.files.config import ModelConfig
from holdfast.engines.torch.files.config_gguf import from_gguf
from holdfast.engines.torch.files.gguf_file import read_gguf
from holdfast.engines.torch.files.gguf_tokenizer import bos_token, chat_template, tokenizer_json
from holdfast.engines.torch.files.stored import Stored

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


def look_at_gguf(path: Path, known_identity: str = "") -> FileCheckpoint:
    """Read the header. Quick, and without torch."""
    file = read_gguf(path)
    divisors = file.tensors.get("rope_freqs.weight")
    config = from_gguf(file.metadata, set(file.tensors), divisors.numbers() if divisors else ())
    tensors = needed(_by_hugging_face_name(file.tensors, config), config, path)
    return FileCheckpoint(
        config=config,
        identity=known_identity,
        tokenizer_json=tokenizer_json(file.metadata),
        chat_template=chat_template(file.metadata),
        source=str(path),
        tensors=tensors,
        bos_token=bos_token(file.metadata),
    )


def gguf_name(name: str) -> str:
    """"model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight"."""
    stem, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{layer[1]}.{_INNER[layer[2]]}.{suffix}" if layer else f"{_OUTER[stem]}.{suffix}"


def _by_hugging_face_name(tensors: Mapping[str, Stored], config: ModelConfig) -> dict[str, Stored]:
    """llama.cpp stores the rotated rows of Llama's q and k in pairs, and those of Qwen as they are (fact 26)."""
    found = {}
    for name in tensor_shapes(config):
        stored = tensors.get(gguf_name(name))
        if stored is None:
            continue
        paired = config.family == "llama" and any(f".{part}." in name for part in _ROTATED)
        found[name] = replace(stored, paired_head_size=config.head_size) if paired else stored
    return found
