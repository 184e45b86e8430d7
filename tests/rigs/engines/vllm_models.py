"""What vLLM is given in tests: its variables, and tiny models of two families, made once, in a folder that stays."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from holdfast.engines.sim.vocabulary import asset
from holdfast.engines.vllm.environment import needed, usual

SHAPE = {
    "vocab_size": 1024,
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


def set_variables() -> None:
    """Before the first import of vLLM in this process, which reads them then."""
    for name, value in needed("host-0").items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    for name, value in usual("host-0", 2, "info").items():
        os.environ.setdefault(name, value)


def made(family: str) -> Path:
    """The folder of a model of this family, with random weights that are always the same: "llama", "qwen3", "gemma3",
    half of whose layers see 64 positions, or "chat", a llama with the simulator's words."""
    folder = Path(tempfile.gettempdir()) / f"holdfast-tiny-{family}-1"
    if folder.exists():
        return folder
    import torch
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    torch.manual_seed(7)
    if family in ("llama", "chat"):
        shape = SHAPE | ({"vocab_size": 6144} if family == "chat" else {})
        model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **shape))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **SHAPE))
    else:
        kinds = ["sliding_attention", "full_attention"] * (SHAPE["num_hidden_layers"] // 2)
        model = Gemma3ForCausalLM(Gemma3TextConfig(sliding_window=64, layer_types=kinds, **SHAPE))
    with tempfile.TemporaryDirectory() as half:
        model.save_pretrained(Path(half) / "model")
        if family == "chat":
            for name in ("tokenizer.json", "chat_template.jinja"):
                (Path(half) / "model" / name).write_bytes(asset(name))
        (Path(half) / "model").rename(folder)
    return folder
