"""GGUF files: against the `gguf` package's own writer and reference arithmetic, and the real default model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.checkpoint import tensor_shapes
from holdfast.engines.torch.files.gguf_model import GGML_KINDS, gguf_name, look_at_gguf, read_gguf
from holdfast.engines.torch.files.gguf_tokenizer import tokenizer_json, with_bos
from holdfast.engines.torch.files.resolve import resolve
from holdfast.engines.torch.files.stored import KINDS
from holdfast.frontend.text.tokenizer import TextTokenizer
from tests.rigs.engines.default_model import cache_dir, smollm2_path
from tests.rigs.small_model import quiet

torch.set_num_threads(1)
HIDDEN, HEADS, KV_HEADS, INNER, WORDS = 64, 4, 2, 96, 300


def byte_tokens() -> list[str]:
    """A token for every byte, in byte-level spelling."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges: bytes, a merged word, one without merges, control tokens, the user's own, fillers."""
    tokens = [*byte_tokens(), "he", "llo", "<s>", "<|im_start|>", "<|im_end|>", "<tool>"]
    types = [1] * 258 + [3, 3, 3, 4]
    tokens += [f"[PAD{index}]" for index in range(len(tokens), WORDS)]
    return tokens, types + [5] * (WORDS - len(types)), ["h e"]


def write(path: Path, family: str, kind: Kind = Kind.F32, **more: Any) -> dict[str, np.ndarray]:
    """A small model as llama.cpp would convert it; answers its tensors as Hugging Face would have them."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    tokens, types, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(more.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(260)
    writer.add_chat_template("{{ bos_token }}{{ messages[0]['content'] }}")
    if "alignment" in more:
        writer.add_custom_alignment(more["alignment"])
    tensors = make(family)
    for name, tensor in tensors.items():
        paired = family == "llama" and ("q_proj" in name or "k_proj" in name)
        stored = pair(tensor, KV_HEADS if "k_proj" in name else HEADS) if paired else tensor
        exact = stored.ndim == 1 or kind is Kind.F32
        raw = stored if exact else gguf.quants.quantize(stored, kind)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=None if exact else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def make(family: str) -> dict[str, np.ndarray]:
    from holdfast.engines.torch.files.config import ModelConfig

    shape = {"layers": 2, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS, "head_size": HIDDEN // HEADS}
    shape |= {"intermediate": INNER, "vocabulary": WORDS, "context_tokens_max": 512}
    traits = {"tied": family == "llama", "qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}
    config = ModelConfig(family, **shape, norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, **traits)
    rng = np.random.default_rng(5)
    return {name: rng.normal(size=size).astype(np.float32) for name, size in tensor_shapes(config).items()}


def pair(weights: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter writes q and k (LlamaModel.permute)."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


# -- tensors


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_converted_model_reads_back_as_it_was(family: str, tmp_path: Path) -> None:
    """Every tensor under its Hugging Face name, q and k rows in Hugging Face's order, whole or a few rows at a time."""
    wanted = write(tmp_path / "m.gguf", family)
    model = look_at_gguf(tmp_path / "m.gguf")
    assert (model.config.family, model.config.layers, model.config.vocabulary) == (family, 2, WORDS)
    assert set(model.tensors) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(model.read(name), torch.from_numpy(tensor)), name
        for first, last in ((0, 1), (3, 14), (tensor.shape[0] - 1, tensor.shape[0]), (5, 5)):
            assert torch.equal(model.read(name, first, last), torch.from_numpy(tensor[first:last])), name


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_every_kind_is_dequantised_as_the_reference_does(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, through paired rows too, and over the ends of what is dequantised at a time."""
    monkeypatch.setattr("holdfast.engines.torch.files.stored._STRIDE", 5)
    wanted = write(tmp_path / "m.gguf", "llama", kind)
    model = look_at_gguf(tmp_path / "m.gguf")
    name = "model.layers.1.mlp.up_proj.weight"
    assert model.tensors[name].kind == kind.name
    for name, tensor in wanted.items():
        if tensor.ndim == 2:  # a row's blocks are its own, so pairing rows does not change them
            reference = gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)
            assert torch.equal(model.read(name).float(), torch.from_numpy(reference)), name


def test_the_names_of_kinds_are_ggmls() -> None:
    """Numbers and names agree with the gguf package's, and sizes with its table."""
    theirs = {kind.value: kind.name for kind in Kind}
    assert {number: theirs.get(number) for number in GGML_KINDS} == GGML_KINDS


def test_kinds_that_are_not_supported_are_refused_by_name(tmp_path: Path) -> None:
    """Before anything is loaded, and with what is supported."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((4, 144), np.uint8), raw_dtype=Kind.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=f"Q4_K.*{', '.join(KINDS)}"):
        read_gguf(tmp_path / "m.gguf")


def test_another_alignment_is_heeded(tmp_path: Path) -> None:
    """Where tensors begin follows from the file's own alignment."""
    wanted = write(tmp_path / "m.gguf", "qwen2", alignment=256)
    model = look_at_gguf(tmp_path / "m.gguf")
    assert model.tensors["model.norm.weight"].offset % 256 == 0
    assert torch.equal(model.read("model.norm.weight"), torch.from_numpy(wanted["model.norm.weight"]))


def test_a_file_cut_anywhere_is_refused_and_never_half_read(tmp_path: Path) -> None:
    """Any prefix of a file is a UserError that names it, wherever it ends."""
    write(tmp_path / "m.gguf", "llama")
    whole = (tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    ends = [*range(1, 400), *range(400, len(whole), 997), len(whole) - 1]
    for end in ends:
        cut.write_bytes(whole[:end])
        with pytest.raises(UserError, match="cut"):
            read_gguf(cut)
    cut.write_bytes(b"")
    with pytest.raises(UserError, match="cut"):
        read_gguf(cut)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """A model that lacks one is refused when it is opened."""
    write(tmp_path / "m.gguf", "llama")
    broken = (tmp_path / "m.gguf").read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    (tmp_path / "m.gguf").write_bytes(broken)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        look_at_gguf(tmp_path / "m.gguf")


# -- tokenizers


TEXTS = [
    "Hello, world!",
    "  two  spaces   and a tab\tthere ",
    "1234567890 3.14159 ½ ²  ٣٤",
    "don't WE'LL i'm they'd'",
    "naïve café Ünï¢ödé — “quotes” …",
    "世界你好 안녕 привет λόγος 😀🧭👩‍👩‍👧",
    "line one\nline two\r\n\r\n  line three\n\n\n",
    "def f(x):\n    return x**2  # code\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "e\u0301 decomposed",
    "",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTTERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "qwen2": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


def metadata(pre: str, **more: Any) -> dict[str, Any]:
    tokens, types, merges = vocabulary()
    named = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges, "bos_token_id": 258}
    return {f"tokenizer.ggml.{key}": value for key, value in (named | more).items()}


@pytest.mark.parametrize("pre", CUTTERS)
def test_text_is_cut_as_the_models_own_tokenizer_cuts_it(pre: str) -> None:
    """The words that merges stay within are those of the family's published tokenizer.json; every text comes back."""
    tokenizer = Tokenizer.from_str(tokenizer_json(metadata(pre)).decode())
    for text in TEXTS:
        assert tokenizer.pre_tokenizer.pre_tokenize_str(text) == CUTTERS[pre].pre_tokenize_str(text), text
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        assert back == (normalizers.NFC().normalize_str(text) if pre == "qwen2" else text)


def test_control_tokens_are_single_ids() -> None:
    """Control tokens and the user's own are found in a text; only the former are special; fillers are plain."""
    tokenizer = TextTokenizer(tokenizer_json(metadata("gpt-2")))
    letters = [tokenizer.token_id(letter) for letter in "llo"]
    assert tokenizer.encode_now("<|im_start|>hello<tool>") == [259, 256, *letters, 261]
    assert tokenizer.special_ids == {258, 259, 260}
    assert tokenizer.vocab_size == WORDS


def test_a_token_that_is_a_word_wins_in_llama_3_only() -> None:
    """ "llo" is a token, and no merges lead to it: Llama 3's tokenizer takes it whole, the others never see it."""
    whole = TextTokenizer(tokenizer_json(metadata("llama-bpe"))).encode_now("llo")
    assert whole == [257]
    assert len(TextTokenizer(tokenizer_json(metadata("qwen2"))).encode_now("llo")) == 3


@pytest.mark.parametrize(
    ("pre", "said", "adds"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", None, False), ("smollm", True, True)],
)
def test_a_plain_text_begins_as_the_model_was_trained(pre: str, said: bool | None, adds: bool) -> None:
    """The file's word on the begin-of-text token counts; without one, Llama 3 has it and the others have not."""
    more = {} if said is None else {"add_bos_token": said}
    tokenizer = TextTokenizer(tokenizer_json(metadata(pre, **more)))
    assert (tokenizer.encode_now("he", add_special_tokens=True) == [258, 256]) is adds
    assert tokenizer.encode_now("he") == [256]


@pytest.mark.parametrize(
    ("more", "words"),
    [({"model": "llama"}, "llama.*gpt2"), ({"pre": "tekken"}, "tekken.*smollm"), ({"pre": None}, "None")],
)
def test_unknown_tokenizers_are_refused_by_name(more: dict[str, Any], words: str) -> None:
    """Cutting text in another way than a model was trained on would only make it stupid, and nobody would know why."""
    with pytest.raises(UserError, match=words):
        tokenizer_json(metadata("gpt-2") | {f"tokenizer.ggml.{key}": value for key, value in more.items()})


def test_a_template_that_asks_for_the_begin_of_text_gets_it(tmp_path: Path) -> None:
    """Who renders a card knows no bos_token, so the template says it itself, and is otherwise as it was."""
    from datetime import datetime

    from holdfast.frontend.text.template import Templates

    write(tmp_path / "m.gguf", "llama")
    template = look_at_gguf(tmp_path / "m.gguf").chat_template
    assert template is not None
    render = Templates(datetime.now).get(template).render
    assert render([{"role": "user", "content": "hi"}]) == "<s>hi"
    odd = with_bos("\n{{ bos_token }}.", 'a"b')
    assert Templates(datetime.now).get(odd).render([]) == '\na"b.'
    assert with_bos("no such thing", "<s>") == "no such thing"


# -- the real default model


def test_the_default_model_is_what_it_is_known_to_be() -> None:
    """SmolLM2-135M-Instruct: its published shape, the wheel's hash as its identity, its tensors in sane sizes."""
    smollm2_path()
    model = resolve("default", cache_dir(), quiet)
    config = model.config
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_size) == (30, 576, 9, 3, 64)
    assert (config.intermediate, config.vocabulary, config.context_tokens_max) == (1536, 49152, 8192)
    assert (config.norm_eps, config.rope_theta, config.rope_scaling) == (1e-5, 100_000.0, None)
    assert (config.tied, config.qkv_bias, config.eos_token_ids, config.bos_token_id) == (True, False, (2,), 1)
    assert model.identity == "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert model.chat_template is not None
    assert "named SmolLM" in model.chat_template


def test_the_default_models_tensors_equal_the_reference() -> None:
    """A tensor of each kind, against the reference arithmetic on the file's own bytes."""
    path = smollm2_path()
    model, stored = look_at_gguf(path), read_gguf(path).tensors
    q = "model.layers.7.self_attn.q_proj.weight"
    for name, kind in {q: Kind.Q4_1, "model.embed_tokens.weight": Kind.Q8_0, "model.norm.weight": Kind.F32}.items():
        place = stored[gguf_name(name)]
        assert place.kind == kind.name
        rows = min(192, place.shape[0])
        raw = np.fromfile(path, np.uint8, place.size // place.shape[0] * rows, offset=place.offset)
        reference = gguf.quants.dequantize(raw.reshape(rows, -1), kind).reshape(rows, *place.shape[1:])
        if name == q:  # undone by hand, from the converter's definition
            reference = reference.reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
        assert torch.equal(model.read(name, 0, rows), torch.from_numpy(reference)), name
    assert model.read("model.embed_tokens.weight", 0, 4000).std() == pytest.approx(0.13, rel=0.3)


def test_the_default_models_words_are_hugging_faces() -> None:
    """The ids its published tokenizer gives for the head of every chat; and every text comes back."""
    tokenizer = TextTokenizer(look_at_gguf(smollm2_path()).tokenizer_json)
    head = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n"
    )
    system = [2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    assert tokenizer.encode_now(head) == [1, 9690, 198, *system, 2, 198, 1, 4093, 198]
    assert tokenizer.encode_now("2026") == [tokenizer.token_id(digit) for digit in "2026"]
    plain = Tokenizer.from_str(look_at_gguf(smollm2_path()).tokenizer_json.decode())
    for text in TEXTS:
        assert plain.decode(plain.encode(text).ids, skip_special_tokens=False) == text
