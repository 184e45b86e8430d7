"""A model's configuration from a GGUF file's metadata.

Always true: it equals what the model's own `config.json` says, so that both forms of one model compute alike. What GGUF
does not say in words is read from its tensors: whether the head is tied, whether there are biases, and Llama 3's rope,
which GGUF keeps as one divisor per frequency; those are turned back into the numbers they came from and checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.config import ModelConfig, RopeScaling, reach, scaling_of, within_window

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Llama 3.1 to 3.3 all say low 1, high 4 and 8,192 tokens; only the factor differs (8 or 32).
LLAMA3_ORIGINAL_CONTEXT = 8192


def from_gguf(metadata: Mapping[str, Any], tensors: set[str], rope_divisors: Sequence[float] = ()) -> ModelConfig:
    """`tensors`: the names in the file; `rope_divisors`: the content of `rope_freqs.weight`, where there is one."""
    family = str(metadata.get("general.architecture", ""))
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"the GGUF architecture {family or '(none)'} is not supported; supported are {known}")
    said = {key.removeprefix(f"{family}."): value for key, value in metadata.items() if key.startswith(f"{family}.")}
    if said.get("expert_count"):
        raise UserError(f"mixtures of experts are not supported (expert_count = {said['expert_count']})")
    hidden, heads = _count(said, "embedding_length"), _count(said, "attention.head_count")
    head_size = _count(said, "attention.key_length", hidden // heads)
    context = _count(said, "context_length")
    _refuse_odd_attention(said, head_size)
    theta = _short(said.get("rope.freq_base", 10_000.0))
    scaling = _scaling(said, context, theta, head_size, rope_divisors)
    return ModelConfig(
        family=family,
        layers=_count(said, "block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(said, "attention.head_count_kv", heads),
        head_size=head_size,
        intermediate=_count(said, "feed_forward_length"),
        vocabulary=_count(said, "vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        context_tokens_max=within_window(reach(context, scaling), said.get("attention.sliding_window")),
        norm_eps=_short(said.get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm=family == "qwen3",
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        eos_token_ids=_eos(metadata),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _count(said: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = said.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"the GGUF says {key} = {value!r}: one whole number for all layers is needed")
    return value


def _short(value: float) -> float:
    """GGUF's floats have 32 bits: 1e-05 reads as 9.99999974e-06. The shortest decimal that they stand for was meant."""
    return float(str(np.float32(value)))


def _refuse_odd_attention(said: Mapping[str, Any], head_size: int) -> None:
    for key in ("rope.dimension_count", "attention.value_length"):
        if said.get(key, head_size) != head_size:
            raise UserError(f"{key} = {said[key]} beside heads of {head_size} is not supported")


def _eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Any of them ends a text: end of sequence, of turn, of message."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token for token in named if token is not None))


def _scaling(
    said: Mapping[str, Any], context: int, theta: float, head_size: int, divisors: Sequence[float]
) -> RopeScaling | None:
    kind = said.get("rope.scaling.type", "none")
    if len(divisors):
        return _llama3(divisors, theta, head_size)
    if kind == "none":
        return None
    if said.get("rope.scaling.attn_factor", 1.0) != 1.0 or said.get("rope.scaling.yarn_log_multiplier", 0.0):
        raise UserError("a yarn rope with an attention factor of its own is not supported in GGUF")
    names = {"factor": "factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    rope = {ours: _short(said[f"rope.scaling.{its}"]) for ours, its in names.items() if f"rope.scaling.{its}" in said}
    return scaling_of(str(kind), rope, said.get("rope.scaling.original_context_length") or context, context)


def _llama3(divisors: Sequence[float], theta: float, head_size: int) -> RopeScaling:
    scaling = RopeScaling("llama3", _short(max(divisors)), original_context=LLAMA3_ORIGINAL_CONTEXT)
    expected = llama3_divisors(scaling, theta, head_size)
    alike = [math.isclose(given, meant, rel_tol=1e-4) for given, meant in zip(divisors, expected, strict=False)]
    if len(alike) != head_size // 2 or len(divisors) != len(alike) or not all(alike):
        raise UserError("the GGUF's rope_freqs.weight is not that of Llama 3.1, 3.2 or 3.3, and no other is supported")
    return scaling


def llama3_divisors(scaling: RopeScaling, theta: float, head_size: int) -> list[float]:
    """What Llama 3's scaling divides each frequency by: 1 for quick ones, `factor` for slow ones, between by a ramp."""
    divisors = []
    for index in range(head_size // 2):
        turns = scaling.original_context / (2 * math.pi * theta ** (2 * index / head_size))
        share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        share = min(1.0, max(0.0, share))
        divisors.append(1 / ((1 - share) / scaling.factor + share))
    return divisors
