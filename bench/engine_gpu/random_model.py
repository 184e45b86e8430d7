"""A model's directory with random weights, as vLLM and anybody else reads it: `python -m … FOLDER --shape 8b`.

The same numbers each time on the same device. Always true: a folder that is there is whole.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.engine_gpu.words import LLAMA_8B, Row

TOKENIZER = Path(__file__).parents[2] / "src/holdfast/engines/sim/data/tokenizer.json"
TINY: Row = LLAMA_8B | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
}
SHAPES = {"8b": LLAMA_8B, "tiny": TINY}


def tensors(shape: Row) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of a Llama's."""
    wide, deep, inner = shape["hidden_size"], shape["num_hidden_layers"], shape["intermediate_size"]
    queries, keys = (shape[f"num_{kind}_heads"] * shape["head_dim"] for kind in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (shape["vocab_size"], wide)
    for layer in (f"model.layers.{number}" for number in range(deep)):
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{layer}.self_attn.{name}_proj.weight", (rows, wide)
        yield f"{layer}.self_attn.o_proj.weight", (wide, queries)
        yield f"{layer}.mlp.gate_proj.weight", (inner, wide)
        yield f"{layer}.mlp.up_proj.weight", (inner, wide)
        yield f"{layer}.mlp.down_proj.weight", (wide, inner)
        yield f"{layer}.input_layernorm.weight", (wide,)
        yield f"{layer}.post_attention_layernorm.weight", (wide,)
    yield "model.norm.weight", (wide,)
    yield "lm_head.weight", (shape["vocab_size"], wide)


def make(folder: Path, shape: Row, device: str) -> None:
    """In one file, written beside its place first."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator(device).manual_seed(7)

    def values(size: tuple[int, ...]) -> Any:
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16)
        drawn = torch.randn(size, generator=draw, device=device, dtype=torch.bfloat16)
        return (drawn * size[1] ** -0.5).cpu()

    half = folder.with_name(f"{folder.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    save_file({name: values(size) for name, size in tensors(shape)}, half / "model.safetensors", {"format": "pt"})
    (half / "config.json").write_text(json.dumps(shape))
    shutil.copy(TOKENIZER, half / "tokenizer.json")
    half.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--device", default="cuda", help="where the numbers are drawn: cuda or cpu")
    asked = parser.parse_args()
    if not asked.folder.exists():
        make(asked.folder, SHAPES[asked.shape], asked.device)


if __name__ == "__main__":
    main()
