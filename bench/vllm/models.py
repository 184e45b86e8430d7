"""Makes tiny models of two families that chat: random weights, always the same ones, and the sim's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.engines.sim.vocabulary import asset

FAMILIES = ("llama", "qwen3")
# Weights large enough that the likeliest tokens differ from place to place.
SHAPE: dict[str, Any] = {
    "vocab_size": 6144,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
BLOCK_TOKENS = 32
BLOCK_BYTES = 2 * 4 * 2 * 32 * BLOCK_TOKENS * 4  # keys and values: 4 layers, 2 heads of 32, in fp32


def make_model(family: str, folder: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(family, tie_word_embeddings=family == "qwen3", **SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_bytes(asset(name))
    return folder
