"""Tiny random models of every family: the maker's own implementation beside ours, on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import transformers

from holdfast.engines.torch.files.config import ModelConfig, from_hugging_face
from holdfast.engines.torch.model.attention import kv_view
from holdfast.engines.torch.model.batch import step_batch
from holdfast.engines.torch.model.decoder import BoundModel, bind, forward, logits
from holdfast.engines.torch.model.linear import FAST, AllReduce, Arithmetic
from holdfast.engines.torch.model.parameters import load, parameters
from holdfast.engines.torch.ranks.share import SharePiece

CPU = torch.device("cpu")
BLOCK_TOKENS = 8
VOCABULARY = 199  # no multiple of any vector's width

# Odd sizes on purpose: leftovers at the end of vectors are where arithmetics differ.
_SHAPE = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR_ROPE = {"rope_type": "linear", "factor": 2.5, "rope_theta": 10_000.0}
_BIASES = {"attention_bias": True, "mlp_bias": True}
# The maker's name for it, hidden and inner size, and what else it has.
FAMILIES: dict[str, tuple[str, int, int, dict[str, object]]] = {
    "llama2": ("Llama", 60, 116, {"num_attention_heads": 6, "num_key_value_heads": 6}),
    "llama3": ("Llama", 72, 100, {"rope_parameters": _LLAMA3_ROPE}),
    "llama-biased": ("Llama", 48, 52, _BIASES),
    "mistral": ("Mistral", 52, 76, {"head_dim": 22, "sliding_window": 256}),
    "qwen2": ("Qwen2", 56, 108, {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", 52, 76, {"head_dim": 22}),
    "yarn": ("Qwen2", 64, 96, {"rope_parameters": _YARN_ROPE}),
    "linear": ("Llama", 64, 96, {"rope_parameters": _LINEAR_ROPE}),
}


@dataclass
class Run:
    """A model with a pool of its own; blocks of a text are given out of order, and hold garbage at first."""

    model: BoundModel
    config: ModelConfig
    ranks: int = 1
    blocks: int = 160
    kv: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = self.config.layers * 2 * BLOCK_TOKENS * self.model.kv_heads * self.config.head_size
        flat = torch.full((self.blocks * size + 5,), float("nan"))
        self.kv = kv_view(flat, self.config.layers, self.model.kv_heads, self.config.head_size, BLOCK_TOKENS)

    def step(self, pieces: Sequence[SharePiece]) -> torch.Tensor:
        """Logits of each piece's last position."""
        batch = step_batch(pieces, BLOCK_TOKENS, self.model.embed.dtype, CPU, exact=self.model.exact)
        return logits(self.model, forward(self.model, batch, self.kv))


@cache
def reference(family: str) -> tuple[torch.nn.Module, ModelConfig]:
    torch.manual_seed(7)
    maker, hidden, inner, more = FAMILIES[family]
    sizes = {"hidden_size": hidden, "intermediate_size": inner}
    config = getattr(transformers, f"{maker}Config")(**(_SHAPE | sizes | more))
    theirs = getattr(transformers, f"{maker}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():  # as made, biases are 0 and norms 1, and hide mistakes
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    said = config.to_dict() | {"architectures": [f"{maker}ForCausalLM"]}
    return theirs, from_hugging_face(said)


class State:
    """A reference's tensors, as a checkpoint gives them."""

    def __init__(self, family: str) -> None:
        self._tensors = reference(family)[0].state_dict()

    def read(self, name: str, first: int, last: int) -> torch.Tensor:
        return self._tensors[name][first:last]


def tensors(family: str, rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Return a rank's canonical parameters, loaded from the reference's."""
    wanted = parameters(reference(family)[1], rank, ranks)
    outs = {parameter.name: torch.full(parameter.shape, torch.nan) for parameter in wanted}
    load(State(family), wanted, outs, lambda *_: None)
    return outs


def run(
    family: str, arithmetic: Arithmetic = FAST, rank: int = 0, ranks: int = 1, reduce: AllReduce | None = None
) -> Run:
    config = reference(family)[1]
    model = bind(
        tensors(family, rank, ranks),
        config,
        positions_max=256,
        arithmetic=arithmetic,
        ranks=ranks,
        all_reduce=reduce,
    )
    return Run(model, config)


def text(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


def table(number: int, blocks: int = 16) -> list[int]:
    """Block ids of a text: no other's, and in no order."""
    order = torch.randperm(160, generator=torch.Generator().manual_seed(3)).tolist()
    return order[number * blocks : (number + 1) * blocks]


def computed(target: Run, tokens: Sequence[int], cuts: Sequence[int], number: int = 0) -> dict[int, torch.Tensor]:
    """Logits by position of a text computed in pieces of the sizes `cuts`, the last one of what is left."""
    found: dict[int, torch.Tensor] = {}
    start = 0
    for size in [*cuts, len(tokens) - sum(cuts)]:
        piece = SharePiece(tokens[start : start + size], start, table(number))
        start += size
        found[start - 1] = target.step([piece])[0]
    return found
