"""The configuration that the engine needs before it reads a weight, and its parser for a Hugging Face `config.json`.

Always true: a `ModelConfig` describes a model that the engine computes exactly as its makers do. A model that the
engine cannot compute (another architecture, experts, an unknown rope, quantised safetensors) is refused here, by name,
as a UserError. Unknown values never fall back to a default.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.errors import UserError

log = logging.getLogger(__name__)

# A Mistral is a Llama, but for a window in its first version.
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
TYPES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
SUPPORTED = ", ".join(FAMILIES) + " (Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3)"
# What a Mistral's config.json means where it leaves them out.
MISTRAL_WINDOW, MISTRAL_KV_HEADS = 4096, 8
ROPE_KINDS = ("linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotations are stretched beyond what the model was first trained for; each kind uses some of the fields."""

    kind: str  # "linear", "llama3" or "yarn"
    factor: float
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 0  # llama3, yarn: tokens
    attention_factor: float = 1.0  # yarn: what cos and sin are multiplied by, already worked out
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whether the ramp's ends are rounded to whole dimensions


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of one dense decoder of the Llama family."""

    family: str  # "llama", "qwen2" or "qwen3"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    context_tokens_max: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool  # the embedding is the head
    qkv_bias: bool
    qk_norm: bool
    o_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_size", "intermediate", "vocabulary"):
            if getattr(self, name) < 1:
                raise UserError(f"the model's configuration says {name} = {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise UserError(f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_size % 2:
            raise UserError(f"a head of {self.head_size} numbers cannot be rotated in pairs")


def from_hugging_face(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read `config.json`, and `generation_config.json` where there is one. UserError says what is not supported."""
    family = _family(config)
    _refuse_what_is_not_dense(config)
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    context = _count(config, "max_position_embeddings")
    theta, scaling = _rope(config, context)
    bias = bool(config.get("attention_bias") or False)
    kv_heads = MISTRAL_KV_HEADS if _is_mistral(config) and "num_key_value_heads" not in config else heads
    return ModelConfig(
        family=family,
        layers=_count(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", kv_heads),
        # Qwen3's head size does not follow from the others: where its file leaves it out, 128 is meant.
        head_size=_count(config, "head_dim", 128 if family == "qwen3" else hidden // heads),
        intermediate=_count(config, "intermediate_size"),
        vocabulary=_count(config, "vocab_size"),
        context_tokens_max=within_window(stretched_context(context, scaling), _window(config)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(config.get("tie_word_embeddings") or False),
        qkv_bias=family == "qwen2" or bias,
        qk_norm=family == "qwen3",
        o_bias=family != "qwen2" and bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias") or False),
        eos_token_ids=end_tokens(generation or {}, config),
        bos_token_id=config.get("bos_token_id"),
    )


def _family(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or []
    name = str(named[0]) if named else str(config.get("model_type") or "")
    # Files without `architectures` say only the type; "qwen2" and "Qwen2ForCausalLM" mean the same.
    family = FAMILIES.get(name) or (TYPES.get(name) if not named else None)
    if family is None:
        what = f"the architecture {name}" if name else "an architecture that config.json does not name"
        raise UserError(f"{what} is not supported; supported are {SUPPORTED}")
    return family


def _refuse_what_is_not_dense(config: Mapping[str, Any]) -> None:
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            raise UserError(f"mixtures of experts are not supported ({key} = {config[key]}); use a dense model")
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, Mapping) else quantised
        raise UserError(f"{method} quantisation in safetensors is not supported; use bf16, fp16 or fp32, or a GGUF")
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UserError(f"the activation {act} is not supported; silu is")


def _is_mistral(config: Mapping[str, Any]) -> bool:
    named = config.get("architectures") or []
    return "Mistral" in str(named[0]) if named else config.get("model_type") == "mistral"


def _window(config: Mapping[str, Any]) -> int | None:
    """Return how far back layers look that do not look at everything; None: all do. Qwen configs name a window that
    most of them do not use; a Mistral uses the one it has."""
    window, layers = config.get("sliding_window"), config.get("num_hidden_layers") or 0
    kinds = config.get("layer_types")
    odd = sorted({str(kind) for kind in kinds or ()} - {"full_attention", "sliding_attention"})
    if odd:
        raise UserError(f"layers of the kind {', '.join(odd)} are not supported; full attention is")
    if kinds is not None:
        used = "sliding_attention" in kinds
    elif _is_mistral(config):
        used, window = True, config.get("sliding_window", MISTRAL_WINDOW)
    else:
        used = bool(config.get("use_sliding_window")) and (config.get("max_window_layers") or 0) < layers
    return window if used else None


def within_window(context: int, window: int | None) -> int:
    """Return the longest text to serve: within a sliding window, windowed attention equals full attention."""
    if not window or window >= context:
        return context
    log.warning("texts are limited to %d tokens, the model's sliding window, instead of %d", window, context)
    return window


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"config.json says {key} = {value!r}: a whole number is needed")
    return value


def end_tokens(generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end tokens of both files: chat models name their end of turn in one of them, or in both."""
    found: dict[int, None] = {}
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is not None:
                found[int(token)] = None
    return tuple(found)


def with_end(config: ModelConfig, end: int | None) -> ModelConfig:
    """Put the tokenizer's own end of text before the others; one that the model has no row for is never drawn."""
    if end is None or end >= config.vocabulary:
        return config
    others = [token for token in config.eos_token_ids if token != end]
    return replace(config, eos_token_ids=(end, *others))


def stretched_context(context: int, scaling: RopeScaling | None) -> int:
    """Return how long a text may be. A yarn rope's files often leave `max_position_embeddings` at what the model was
    first trained for (or at something between): the stretched length is meant, as vLLM reads it too."""
    if scaling is None or scaling.kind != "yarn":
        return context
    return int(scaling.original_context * scaling.factor)


def check_context(config: ModelConfig, asked: int) -> None:
    """Raise UserError for positions that a model was not made for: they turn its text into noise."""
    if asked > config.context_tokens_max:
        made_for = f"{config.context_tokens_max} tokens that the model was made for"
        raise UserError(f"--context {asked} is beyond the {made_for}; give no more than those")


def _rope(config: Mapping[str, Any], context: int) -> tuple[float, RopeScaling | None]:
    """Return theta and the scaling. Since transformers 5 both are in `rope_parameters`; before, theta stood outside and
    the rest in `rope_scaling`, with a kind that was first called `type`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UserError(f"rotating a part of each head ({partial}) is not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(f"a rope for each kind of layer ({', '.join(rope)}) is not supported; one for all is")
    if kind == "default":
        return float(theta), None
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return float(theta), scaling_of(str(kind), rope, int(original or context), context)


def scaling_of(kind: str, rope: Mapping[str, Any], original: int, context: int) -> RopeScaling:
    """Return the scaling of a rope kind, by Hugging Face's names for its numbers; unknown kinds are refused by name."""
    if kind not in ROPE_KINDS:
        known = ", ".join(("default", *ROPE_KINDS))
        raise UserError(f"the rope scaling {kind} is not supported; supported are {known}")
    factor = float(rope.get("factor") or context / original)
    if kind == "linear":
        return RopeScaling(kind, factor)
    if kind == "llama3":
        low, high = float(rope.get("low_freq_factor", 1.0)), float(rope.get("high_freq_factor", 4.0))
        return RopeScaling(kind, factor, low, high, original)
    return RopeScaling(
        kind,
        factor,
        original_context=original,
        attention_factor=_yarn_attention(factor, rope),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
    )


def _yarn_attention(factor: float, rope: Mapping[str, Any]) -> float:
    given, scale, scale_all = rope.get("attention_factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    if given is not None:
        return float(given)

    def grown(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    return grown(scale) / grown(scale_all) if scale and scale_all else grown(1.0)
