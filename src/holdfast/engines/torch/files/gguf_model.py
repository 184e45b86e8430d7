"""Opens a GGUF file as a checkpoint: header, configuration, tensors under Hugging Face names in Hugging Face's row
order.

Always true: nothing is believed that lies outside the file; what cannot be read is a UserError with the file's name in
it. The configuration equals what the model's own `config.json` says, so that both forms of one model compute alike.
What GGUF does not say in words is read from its tensors: whether the head is tied, whether there are biases, and Llama
3's rope, which GGUF keeps as one divisor per frequency; those are turned back into the numbers they came from and
checked. The header is parsed here because the `gguf` library takes 30 times as long (docs/decisions.md).
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.checkpoint import FileCheckpoint, checked_tensors, tensor_shapes
from holdfast.engines.torch.files.config import ModelConfig, RopeScaling, scaling_of, stretched_context, within_window
from holdfast.engines.torch.files.gguf_tokenizer import bos_token, chat_template, tokenizer_json
from holdfast.engines.torch.files.stored import KINDS, Stored

VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, where the file names no other

# ggml's numbers for its kinds, so that one that is refused can be refused by name.
GGML_KINDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

# GGUF's numbers for the types of metadata: scalars as struct writes them, then the two that are not.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Llama 3.1 to 3.3 all say low 1, high 4 and 8,192 tokens; only the factor differs (8 or 32).
LLAMA3_ORIGINAL_CONTEXT = 8192

# Hugging Face name -> GGUF name
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
    tensors = checked_tensors(_by_hugging_face_name(file.tensors, config), config, path)
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
    """Translate a name: "model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight"."""
    stem, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{layer[1]}.{_INNER[layer[2]]}.{suffix}" if layer else f"{_OUTER[stem]}.{suffix}"


def _by_hugging_face_name(tensors: Mapping[str, Stored], config: ModelConfig) -> dict[str, Stored]:
    """Rename the tensors. llama.cpp stores rotated rows of Llama's q and k in pairs, Qwen's as they are (fact 26)."""
    found = {}
    for name in tensor_shapes(config):
        stored = tensors.get(gguf_name(name))
        if stored is None:
            continue
        paired = config.family == "llama" and any(f".{part}." in name for part in _ROTATED)
        found[name] = replace(stored, paired_head_size=config.head_size) if paired else stored
    return found


# -- the header


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file's metadata, and where its tensors lie."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]  # under their GGUF names


class _CutShort(Exception):
    """Raised when the file ends inside its header."""


class _Cursor:
    """Reads one value after the other from the mapped file."""

    __slots__ = ("at", "data")

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def bytes(self, size: int) -> bytes:
        piece = self.data[self.at : self.at + size]
        if len(piece) != size:
            raise _CutShort
        self.at += size
        return piece

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        if count > len(self.data):  # before a buffer of that size is asked for
            raise _CutShort
        return struct.unpack(form, self.bytes(struct.calcsize(form)))

    def string(self) -> str:
        return self.bytes(int.from_bytes(self.bytes(8), "little")).decode()

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_scalar(kind))
        inner, count = self.number("I"), self.number("Q")
        if inner == _STRING:
            return [self.string() for _ in range(count)]
        return list(self.numbers(_scalar(inner), count))


def _scalar(kind: int) -> str:
    code = _SCALARS.get(kind)
    if code is None:
        raise ValueError(f"its metadata has a value of the unknown type {kind}")
    return code


def read_gguf(path: Path) -> GgufFile:
    """Read the header; UserError says what is wrong with it, or which kinds of tensor are not supported."""
    try:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        # mapped only while the header is read
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(data), len(data))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except _CutShort as error:
        raise UserError(f"{path} is cut short: its header does not end") from error
    except (ValueError, struct.error) as error:
        raise UserError(f"{path} is not a GGUF file that can be read: {error}") from error


def _parse(path: Path, cursor: _Cursor, size: int) -> GgufFile:
    if cursor.bytes(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}; versions {' and '.join(map(str, VERSIONS))} are known")
    tensors, pairs = cursor.numbers("Q", 2)
    metadata = {}
    for _ in range(pairs):
        key = cursor.string()
        metadata[key] = cursor.value()
    infos = [_tensor_info(cursor) for _ in range(tensors)]
    odd = sorted({kind for _, kind, _, _ in infos} - set(KINDS))
    if odd:
        known = ", ".join(KINDS)
        raise UserError(f"{path} has {', '.join(odd)} tensors, which are not supported; supported are {known}")
    alignment = int(metadata.get("general.alignment", ALIGNMENT))
    start = -(-cursor.at // alignment) * alignment
    found = {name: Stored(kind, shape, path, start + offset) for name, kind, shape, offset in infos}
    for name, stored in found.items():
        if stored.offset + stored.size > size:
            raise UserError(f"{path} is cut short: it ends before its tensor {name} does")
    return GgufFile(path, metadata, found)


def _tensor_info(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int]:
    name = cursor.string()
    dimensions = cursor.numbers("Q", cursor.number("I"))
    kind, offset = cursor.number("I"), cursor.number("Q")
    # GGUF lists the fastest dimension first
    return name, GGML_KINDS.get(kind, f"number {kind}"), tuple(reversed(dimensions)), offset


# -- the configuration


def from_gguf(metadata: Mapping[str, Any], tensors: set[str], rope_divisors: Sequence[float] = ()) -> ModelConfig:
    """Build the configuration from the metadata, the names of the tensors, and the content of `rope_freqs.weight`."""
    family = str(metadata.get("general.architecture", ""))
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"the GGUF architecture {family or '(none)'} is not supported; supported are {known}")
    fields = {key.removeprefix(f"{family}."): value for key, value in metadata.items() if key.startswith(f"{family}.")}
    if fields.get("expert_count"):
        raise UserError(f"mixtures of experts are not supported (expert_count = {fields['expert_count']})")
    hidden, heads = _count(fields, "embedding_length"), _count(fields, "attention.head_count")
    head_size = _count(fields, "attention.key_length", hidden // heads)
    context = _count(fields, "context_length")
    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.get(key, head_size) != head_size:
            raise UserError(f"{key} = {fields[key]} beside heads of {head_size} is not supported")
    theta = _short(fields.get("rope.freq_base", 10_000.0))
    scaling = _scaling(fields, context, theta, head_size, rope_divisors)
    # End of sequence, of turn, of message.
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return ModelConfig(
        family=family,
        layers=_count(fields, "block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(fields, "attention.head_count_kv", heads),
        head_size=head_size,
        intermediate=_count(fields, "feed_forward_length"),
        vocabulary=_count(fields, "vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        context_tokens_max=within_window(stretched_context(context, scaling), fields.get("attention.sliding_window")),
        norm_eps=_short(fields.get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm=family == "qwen3",
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        eos_token_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _count(fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"the GGUF says {key} = {value!r}: one whole number for all layers is needed")
    return value


def _short(value: float) -> float:
    """Return the shortest decimal that a 32-bit float stands for: GGUF's 1e-05 reads as 9.99999974e-06."""
    return float(str(np.float32(value)))


def _scaling(
    fields: Mapping[str, Any], context: int, theta: float, head_size: int, divisors: Sequence[float]
) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type", "none")
    if len(divisors):
        return _llama3(divisors, theta, head_size)
    if kind == "none":
        return None
    if fields.get("rope.scaling.attn_factor", 1.0) != 1.0 or fields.get("rope.scaling.yarn_log_multiplier", 0.0):
        raise UserError("a yarn rope with an attention factor of its own is not supported in GGUF")
    names = {"factor": "factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    rope = {
        ours: _short(fields[f"rope.scaling.{its}"]) for ours, its in names.items() if f"rope.scaling.{its}" in fields
    }
    return scaling_of(str(kind), rope, fields.get("rope.scaling.original_context_length") or context, context)


def _llama3(divisors: Sequence[float], theta: float, head_size: int) -> RopeScaling:
    scaling = RopeScaling("llama3", _short(max(divisors)), original_context=LLAMA3_ORIGINAL_CONTEXT)
    expected = llama3_divisors(scaling, theta, head_size)
    alike = [math.isclose(given, meant, rel_tol=1e-4) for given, meant in zip(divisors, expected, strict=False)]
    if len(alike) != head_size // 2 or len(divisors) != len(alike) or not all(alike):
        raise UserError("the GGUF's rope_freqs.weight is not that of Llama 3.1, 3.2 or 3.3, and no other is supported")
    return scaling


def llama3_divisors(scaling: RopeScaling, theta: float, head_size: int) -> list[float]:
    """Return what Llama 3's rope divides each frequency by: 1 for quick ones, `factor` for slow ones, or between."""
    divisors = []
    for index in range(head_size // 2):
        turns = scaling.original_context / (2 * math.pi * theta ** (2 * index / head_size))
        share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        share = min(1.0, max(0.0, share))
        divisors.append(1 / ((1 - share) / scaling.factor + share))
    return divisors
