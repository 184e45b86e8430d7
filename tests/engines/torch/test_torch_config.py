"""What config.json, GGUF metadata and a model's text files say of it, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.checkpoint import FileCheckpoint
from holdfast.engines.torch.files.config import RopeScaling, check_context, from_hugging_face, with_end
from holdfast.engines.torch.files.directory import generation_defaults, look_at_directory, token_id, token_text
from holdfast.engines.torch.files.gguf_model import from_gguf, llama3_divisors
from holdfast.engines.torch.files.resolve import TINY
from tests.rigs.small_model import LLAMA, weights

LLAMA2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
LLAMA32 = LLAMA2 | {
    "head_dim": 64,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "eos_token_id": [128001, 128008, 128009],
}
QWEN2 = LLAMA2 | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "sliding_window": 2048,
    "use_sliding_window": False,
    "max_window_layers": 21,
    "rope_theta": 1000000.0,
    "eos_token_id": 151645,
}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "attention_bias": False}


def moved(config: dict[str, Any]) -> dict[str, Any]:
    """The same as transformers 5 writes it."""
    rope = {"rope_type": "default"} | (config.get("rope_scaling") or {})
    rest = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    return rest | {"rope_parameters": rope | {"rope_theta": config.get("rope_theta", 10_000.0)}}


def test_llama_2_is_read() -> None:
    """An early config.json, which says no more than it must."""
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "head_size": 128, "intermediate": 11008}
    words = {"vocabulary": 32000, "eos_token_ids": (2,), "bos_token_id": 1}
    assert from_hugging_face(LLAMA2) == replace(TINY, **shape, **words)  # a plain Llama of 4,096 tokens, too
    bare = {key: value for key, value in LLAMA2.items() if key != "num_key_value_heads"}
    assert from_hugging_face(bare).kv_heads == 32


def test_llama_3_is_read() -> None:
    """Its rope's four numbers, its own head size, the tied head and several ends."""
    config = from_hugging_face(LLAMA32)
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert (config.rope_theta, config.head_size, config.tied) == (500_000.0, 64, True)
    assert config.eos_token_ids == (128001, 128008, 128009)


def test_the_qwens_are_read() -> None:
    """Qwen2 always has biases on q, k, v and none on o; Qwen3 has norms on q and k, and a head size of its own."""
    two, three = from_hugging_face(QWEN2), from_hugging_face(QWEN3)
    assert (two.family, two.qkv_bias, two.o_bias, two.qk_norm, two.head_size) == ("qwen2", True, False, False, 64)
    assert (three.family, three.qkv_bias, three.qk_norm, three.head_size) == ("qwen3", False, True, 128)
    biased = from_hugging_face(QWEN3 | {"attention_bias": True})
    assert biased.qkv_bias
    assert biased.o_bias


@pytest.mark.parametrize("config", [LLAMA2, LLAMA32, QWEN2, QWEN3], ids=["llama2", "llama3", "qwen2", "qwen3"])
def test_where_the_rope_stands_makes_no_difference(config: dict[str, Any]) -> None:
    """transformers 5 keeps all of it in one place, transformers 4 in two."""
    assert from_hugging_face(moved(config)) == from_hugging_face(config)


def test_old_rope_names_are_understood() -> None:
    """`type` before `rope_type`; linear needs its factor only; yarn's attention factor is worked out."""
    linear = from_hugging_face(LLAMA2 | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert linear.rope_scaling == RopeScaling("linear", 2.0)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    scaling = from_hugging_face(QWEN2 | {"rope_scaling": yarn}).rope_scaling
    assert scaling is not None
    assert scaling.original_context == 32768
    assert scaling.attention_factor == pytest.approx(1.138629436)


@pytest.mark.parametrize(
    ("positions", "rope", "context"),
    [
        (32768, {"factor": 4.0, "original_max_position_embeddings": 32768}, 131072),  # Qwen2.5's advice
        (40960, {"factor": 4.0, "original_max_position_embeddings": 32768}, 131072),  # Qwen3's
        (131072, {"factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (131072, {"original_max_position_embeddings": 32768}, 131072),
        (4096, {"factor": 16.0}, 65536),
    ],
)
def test_a_yarn_ropes_context_is_the_stretched_one(positions: int, rope: dict[str, Any], context: int) -> None:
    """Whatever `max_position_embeddings` says beside it: the first length times the factor, in both file formats."""
    config = QWEN2 | {"max_position_embeddings": positions, "rope_scaling": {"rope_type": "yarn", **rope}}
    assert from_hugging_face(config).context_tokens_max == context
    names = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
    said = {f"llama.rope.scaling.{names[key]}": value for key, value in rope.items()}
    gguf = GGUF | {"llama.context_length": positions, "llama.rope.scaling.type": "yarn"} | said
    assert from_gguf(gguf, set()).context_tokens_max == context


def test_every_named_end_ends_a_text() -> None:
    """generation_config.json's ends come first, config.json's are kept."""
    config = LLAMA2 | {"eos_token_id": 7}
    assert from_hugging_face(config, {"eos_token_id": [9, 8]}).eos_token_ids == (9, 8, 7)
    assert from_hugging_face(config, {"eos_token_id": None}).eos_token_ids == (7,)
    assert from_hugging_face(config | {"eos_token_id": None}).eos_token_ids == ()


REFUSED = {
    "another architecture": ({"architectures": ["GemmaForCausalLM"]}, r"GemmaForCausalLM.*LlamaForCausalLM.*Qwen3"),
    "experts by architecture": ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
    "no architecture": ({"architectures": None, "model_type": None}, "does not name"),
    "experts": ({"num_local_experts": 8}, "experts.*num_local_experts = 8"),
    "linear attention": ({"layer_types": ["linear_attention"]}, "linear_attention"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope.*llama3"),
    "dynamic rope": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    "part of a head": ({"partial_rotary_factor": 0.5}, "0.5"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    "another activation": ({"hidden_act": "gelu"}, "gelu"),
    "a missing field": ({"hidden_size": None}, "hidden_size"),
    "uneven heads": ({"num_key_value_heads": 5}, "32 attention heads.*5 KV"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(why: str) -> None:
    """The message names the thing, so that a person knows what to look for."""
    change, words = REFUSED[why]
    with pytest.raises(UserError, match=words):
        from_hugging_face(LLAMA2 | change)


WINDOWS: dict[str, tuple[dict[str, Any], int]] = {
    "no layer has it": ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 32}, 4096),
    "switched off": ({"use_sliding_window": False, "sliding_window": 512, "max_window_layers": 0}, 4096),
    "as wide as the context": ({"layer_types": ["sliding_attention"], "sliding_window": 4096}, 4096),
    "switched on": ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 4}, 512),
    "by layer": ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 512}, 512),
    "a Mistral's": ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, 512),
}


@pytest.mark.parametrize("which", WINDOWS)
def test_texts_stay_inside_a_window_in_use(which: str) -> None:
    """There a window sees everything, which is what is computed; no other number changes. One that cuts nothing is no
    obstacle: most Qwen files name a window that they do not use."""
    change, context = WINDOWS[which]
    assert from_hugging_face(LLAMA2 | change) == replace(from_hugging_face(LLAMA2), context_tokens_max=context)


def test_a_mistral_is_a_llama() -> None:
    """By architecture or by type; a window of null is none, and what its file leaves out is as its makers mean it."""
    new = {"architectures": ["MistralForCausalLM"], "sliding_window": None, "head_dim": 160}
    assert from_hugging_face(LLAMA2 | new) == replace(from_hugging_face(LLAMA2), head_size=160)
    bare = {key: value for key, value in LLAMA2.items() if key not in ("architectures", "num_key_value_heads")}
    first = from_hugging_face(bare | {"model_type": "mistral", "max_position_embeddings": 32768})
    assert (first.family, first.kv_heads, first.context_tokens_max) == ("llama", 8, 4096)


# -- GGUF


GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 16,
    "llama.context_length": 131072,
    "llama.embedding_length": 2048,
    "llama.feed_forward_length": 8192,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 64,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.vocab_size": 128256,
    "tokenizer.ggml.eos_token_id": 128009,
    "tokenizer.ggml.eot_token_id": 128009,
    "tokenizer.ggml.eom_token_id": 128008,
    "tokenizer.ggml.bos_token_id": 128000,
}
DIVISORS = llama3_divisors(RopeScaling("llama3", 32.0, 1.0, 4.0, 8192), 500_000.0, 64)


def test_both_forms_of_a_model_read_alike() -> None:
    """A GGUF gives what the config.json it was made of gives: epsilon in decimal, and Llama 3's rope from divisors."""
    same = LLAMA32 | {"vocab_size": 128256, "intermediate_size": 8192, "bos_token_id": 128000}
    same |= {"eos_token_id": [128009, 128008]}
    assert from_gguf(GGUF, {"token_embd.weight"}, DIVISORS) == from_hugging_face(same)
    assert not from_gguf(GGUF, {"output.weight"}, DIVISORS).tied


def test_a_ggufs_biases_are_seen_in_its_tensors() -> None:
    """GGUF has no field for them; it has one for a window, inside which texts stay."""
    biases = {"blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias"}
    config = from_gguf(GGUF | {"llama.attention.sliding_window": 512}, biases)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    assert config.context_tokens_max == 512


def test_a_ggufs_scaling_is_read() -> None:
    """Linear and yarn stand in the metadata."""
    linear = GGUF | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert from_gguf(linear, set()).rope_scaling == RopeScaling("linear", 2.0)
    yarn = GGUF | {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32768,
    }
    scaling = from_gguf(yarn, set()).rope_scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(1.138629436)
    assert replace(scaling, attention_factor=1.0) == RopeScaling("yarn", 4.0, original_context=32768)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "gemma3"}, "gemma3.*llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.dimension_count": 32}, "rope.dimension_count"),
        ({"llama.attention.head_count_kv": [8, 4]}, "head_count_kv"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 1.5}, "attention factor"),
    ],
)
def test_a_gguf_that_cannot_be_computed_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    """As with config.json."""
    with pytest.raises(UserError, match=words):
        from_gguf(GGUF | change, set())


def test_divisors_that_are_not_llama_3s_are_refused() -> None:
    """What was worked out is checked against every one of them."""
    for wrong in ([*DIVISORS[:-10], DIVISORS[-10] * 1.01, *DIVISORS[-9:]], DIVISORS[:-1], [*DIVISORS, 32.0]):
        with pytest.raises(UserError, match="rope_freqs"):
            from_gguf(GGUF, set(), wrong)


MODEL = LLAMA | {"eos_token_id": 7}
TOKENIZER = {"added_tokens": [{"id": 9, "content": "<|end|>"}], "model": {"vocab": {"a": 0, "</s>": 2, "<s>": 1}}}
ADVICE = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}


def look_at(path: Path, **files: Any) -> FileCheckpoint:
    """A model's directory with these files, names with `__` for the dot."""
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(weights(MODEL))
    for name, content in {"config__json": MODEL, "tokenizer__json": TOKENIZER, **files}.items():
        (path / name.replace("__", ".")).write_text(json.dumps(content))
    return look_at_directory(path)


def test_the_makers_advice_becomes_the_cards_defaults(tmp_path: Path) -> None:
    """The fields that vLLM takes of generation_config.json, under a request's names; without advice there are none."""
    assert look_at(tmp_path).generation_defaults == {}
    more = {"max_new_tokens": 512, "min_p": 0.1, "do_sample": True, "pad_token_id": 3}
    advised = look_at(tmp_path, generation_config__json=ADVICE | more)
    assert advised.generation_defaults == ADVICE | {"max_tokens": 512, "min_p": 0.1}


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "hot"), ("temperature", 3.0), ("top_p", 0), ("top_k", 1.5), ("top_k", True), ("min_p", -1)],
)
def test_advice_that_cannot_be_followed_is_named_with_its_file(field: str, value: Any) -> None:
    """No client is to wonder which of two hundred answers followed it."""
    with pytest.raises(UserError, match=rf"generation_config.json says {field} = "):
        generation_defaults({field: value}, Path("/m/generation_config.json"))


def test_the_tokenizers_end_ends_a_text_too(tmp_path: Path) -> None:
    """It comes first, then those of generation_config.json and config.json; however its file names it."""
    advice = {"eos_token_id": [5, 7]}
    for named in ("<|end|>", {"content": "<|end|>", "special": True}):
        found = look_at(tmp_path, tokenizer_config__json={"eos_token": named}, generation_config__json=advice)
        assert found.config.eos_token_ids == (9, 5, 7)
    old = look_at(tmp_path / "old", special_tokens_map__json={"eos_token": "</s>", "bos_token": "<s>"})
    assert (old.config.eos_token_ids, old.bos_token) == ((2, 7), "<s>")


def test_an_end_that_the_model_has_no_row_for_is_left_out() -> None:
    """A tokenizer may have more tokens than the model it came with."""
    config = from_hugging_face(MODEL)
    assert with_end(config, 96) == with_end(config, None) == config
    assert with_end(config, 95).eos_token_ids == (95, 7)


def test_tokens_are_found_by_their_text() -> None:
    """Among the added ones, in a vocabulary by name, or in a unigram's list."""
    assert [token_id(TOKENIZER, text) for text in ("<|end|>", "</s>", "<none>", "")] == [9, 2, None, None]
    assert token_id({"model": {"vocab": [["<unk>", 0.0], ["</s>", 0.0]]}}, "</s>") == 1
    assert [token_text(said) for said in ("x", {"content": "x"}, None, 3)] == ["x", "x", "", ""]


def test_a_context_beyond_the_model_is_refused() -> None:
    """And one within it is not, nor none at all."""
    config = from_hugging_face(MODEL)
    for asked in (0, 100, 256):
        check_context(config, asked)
    with pytest.raises(UserError, match=r"--context 257 is beyond the 256 tokens"):
        check_context(config, 257)
