"""Directories that transformers saved, read back exactly; their identity; the fused parameters; the tiny model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from holdfast.core.errors import UserError
from holdfast.engines.torch.files import identity
from holdfast.engines.torch.files.checkpoint import Checkpoint, tensor_shapes
from holdfast.engines.torch.files.config import RopeScaling
from holdfast.engines.torch.files.config_gguf import llama3_divisors
from holdfast.engines.torch.files.resolve import resolve
from holdfast.engines.torch.files.safetensors_files import open_directory, read_header
from holdfast.engines.torch.files.tiny import TINY, random_checkpoint, tiny
from holdfast.engines.torch.model import assemble
from holdfast.engines.torch.model.parameters import Parameter, parameters
from holdfast.frontend.text.tokenizer import TextTokenizer

torch.set_num_threads(1)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "eos_token_id": 2}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "eos_token_id": [5, 6], "tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def quiet(*_: object) -> None:
    pass


class Saved:
    """A random model that transformers made and saved, sharded, in bf16 or fp32."""

    def __init__(self, path: Path, name: str, shard: str, dtype: torch.dtype) -> None:
        import transformers

        family, more = FAMILIES[name]
        torch.manual_seed(7)
        config = getattr(transformers, f"{family}Config")(**SMALL | more)
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()  # biases and norms too: zeros and ones hide mistakes
        model.save_pretrained(path, max_shard_size=shard)
        (path / "tokenizer.json").write_bytes(tiny().tokenizer_json)
        self.path, self.state, self.theirs = path, model.state_dict(), config

    def open(self, cache: Path | None = None) -> Checkpoint:
        return open_directory(self.path, cache, quiet)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """Models by name, shard size and precision, each made once."""
    made: dict[tuple[Any, ...], Saved] = {}

    def get(name: str, shard: str = "20KB", dtype: torch.dtype = torch.float32) -> Saved:
        key = (name, shard, dtype)
        if key not in made:
            made[key] = Saved(tmp_path_factory.mktemp(name), *key)
        return made[key]

    return get


# -- directories


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_saved_is_read_exactly(saved: Any, name: str, dtype: torch.dtype) -> None:
    """Every tensor, from shards, in its stored precision, whole and in part."""
    model = saved(name, dtype=dtype)
    checkpoint = model.open()
    assert len(list(model.path.glob("model-*.safetensors"))) > 1
    for tensor in tensor_shapes(checkpoint.config):
        read = checkpoint.read(tensor)
        assert read.dtype == dtype
        assert torch.equal(read, model.state[tensor]), tensor
        assert torch.equal(checkpoint.read(tensor, 3, 9), model.state[tensor][3:9]), tensor
    tied = {"lm_head.weight"} if checkpoint.config.tied else set()
    assert set(tensor_shapes(checkpoint.config)) == set(model.state) - tied


@pytest.mark.parametrize("name", FAMILIES)
def test_configurations_agree_with_transformers(saved: Any, name: str) -> None:
    """Shape, rope, epsilon and ends are what transformers' own config object says."""
    model = saved(name)
    ours, theirs = model.open().config, model.theirs
    assert (ours.hidden, ours.layers, ours.heads) == (32, 2, 4)
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_size == getattr(theirs, "head_dim", 8)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tied == theirs.tie_word_embeddings
    ends = {"llama2": [2], "llama3": [5, 6], "llama-biased": [2], "mistral": [2]}
    assert list(ours.eos_token_ids) == ends.get(name, [])


def test_llama_3s_divisors_are_transformers(saved: Any) -> None:
    """What GGUF's divisors are checked against is what transformers computes."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = saved("llama3")
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.theirs, torch.device("cpu"))
    plain = 500_000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    ours = llama3_divisors(RopeScaling("llama3", 8.0, 1.0, 4.0, 64), 500_000.0, 8)
    assert torch.allclose(plain / scaled.double(), torch.tensor(ours, dtype=torch.float64), rtol=1e-5)


def test_one_file_and_many_have_one_identity(saved: Any) -> None:
    """Identity is of the content: sharding does not count; precision, one bit of a weight and the rope do."""
    identities = {shard: saved("llama2", shard).open().identity for shard in ("20KB", "1GB")}
    assert len(set(identities.values())) == 1
    assert saved("llama2", dtype=torch.bfloat16).open().identity not in identities.values()


def test_a_bit_or_a_setting_makes_another_identity(saved: Any, tmp_path: Path) -> None:
    """Whoever maps these weights must not be able to take them for others."""
    path = shutil.copytree(saved("llama2", "1GB").path, tmp_path / "m")
    before = open_directory(path, None, quiet).identity
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    other_setting = open_directory(path, None, quiet).identity
    (path / "config.json").write_text(json.dumps(config))
    weights = bytearray((path / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (path / "model.safetensors").write_bytes(weights)
    assert len({before, other_setting, open_directory(path, None, quiet).identity}) == 3


def test_a_second_start_hashes_nothing(saved: Any, tmp_path: Path) -> None:
    """The identity is remembered by path, size and time of change; a changed file is hashed again."""
    path = shutil.copytree(saved("qwen2", "1GB").path, tmp_path / "m")
    told: list[tuple[str, int, int | None]] = []

    def once() -> str:
        told.clear()
        return open_directory(path, tmp_path / "cache", lambda *step: told.append(step)).identity

    first = once()
    assert told[0][:2] == ("hash", 0)
    assert told[-1][1] == told[-1][2]
    assert once() == first
    assert told == []
    weights = path / "model.safetensors"
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert once() == first
    assert told != []
    for note in (tmp_path / "cache" / "identities").iterdir():
        note.write_text("{")  # a memory that cannot be read is no memory
    assert once() == first


def test_a_cache_that_cannot_be_written_costs_time_only(saved: Any, tmp_path: Path) -> None:
    """A read-only home is no reason not to serve."""
    (tmp_path / "file").write_text("")
    assert saved("qwen2").open(tmp_path / "file").identity == saved("qwen2").open().identity


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda path: (path / "config.json").write_text("{"), "config.json is not JSON"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json"),
    "no shard": (lambda path: (path / "model-00002-of-00006.safetensors").unlink(), "model-00002-of-00006"),
    "no weights": (lambda path: [file.unlink() for file in path.glob("model*")], "neither model.safetensors nor"),
    "a short shard": (lambda path: cut(path / "model-00002-of-00006.safetensors", 8), "00002.*cut short"),
    "a short header": (lambda path: cut(path / "model-00002-of-00006.safetensors", 10**9), "00002.*header"),
    "no tensor": (lambda path: rename(path / "model.safetensors.index.json"), "model.layers.1.mlp.up_proj.weight"),
    "another shape": (lambda path: resize(path / "config.json"), r"gate_proj.*\[48, 32\].*\[64, 32\]"),
}


def cut(file: Path, off: int) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: max(20, len(data) - off)])


def rename(file: Path) -> None:
    index = json.loads(file.read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    file.write_text(json.dumps(index))


def resize(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 64}))


@pytest.mark.parametrize("what", BREAKAGES)
def test_what_is_missing_is_named(saved: Any, tmp_path: Path, what: str) -> None:
    """A directory that lacks something says what, when it is opened."""
    path = shutil.copytree(saved("llama2").path, tmp_path / "m")
    assert (path / "model-00006-of-00006.safetensors").exists()
    damage, words = BREAKAGES[what]
    damage(path)
    with pytest.raises(UserError, match=words):
        open_directory(path, None, quiet)


def test_a_header_is_checked_against_its_file(saved: Any, tmp_path: Path) -> None:
    """A file cut in its last byte is refused by its header alone: a remembered identity reads no tensors."""
    file = shutil.copy(saved("llama2", "1GB").path / "model.safetensors", tmp_path)
    assert "lm_head.weight" in read_header(Path(file))
    cut(Path(file), 1)
    with pytest.raises(UserError, match="cut short"):
        read_header(Path(file))


def test_kinds_of_number_that_are_not_supported_are_named(tmp_path: Path, saved: Any) -> None:
    """An fp8 file is refused as such."""
    from safetensors.torch import save_file

    path = shutil.copytree(saved("llama2", "1GB").path, tmp_path / "m")
    fp8 = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in saved("llama2", "1GB").state.items()}
    save_file(fp8, path / "model.safetensors")
    with pytest.raises(UserError, match=r"F8_E4M3.*F32, F16, BF16"):
        open_directory(path, None, quiet)


def test_the_chat_template_is_found_wherever_it_stands(saved: Any, tmp_path: Path) -> None:
    """In a file of its own first, else in tokenizer_config.json, alone or by name; the begin-of-text written in."""
    path = shutil.copytree(saved("qwen3").path, tmp_path / "m")

    def template(said: dict[str, Any]) -> str | None:
        (path / "tokenizer_config.json").write_text(json.dumps(said))
        return open_directory(path, None, quiet).chat_template

    assert template({}) is None
    assert template({"chat_template": "A"}) == "A"
    assert template({"chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]}) == "D"
    started = template({"chat_template": "{{ bos_token }}A", "bos_token": {"content": "<s>"}})
    assert started is not None
    assert '"<s>"' in started
    (path / "chat_template.jinja").write_text("J")
    assert template({"chat_template": "A"}) == "J"


# -- fused parameters


def fused(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """By hand, for one rank."""
    outer = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    if name in outer:
        return state[outer[name]]
    _, layer, what = name.split(".")
    attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
    kind = "bias" if what.endswith("_bias") else "weight"
    made_of = {
        "qkv": [f"{attention}{part}_proj.{kind}" for part in "qkv"],
        "o": [f"{attention}o_proj.{kind}"],
        "gate_up": [f"{mlp}gate_proj.{kind}", f"{mlp}up_proj.{kind}"],
        "down": [f"{mlp}down_proj.{kind}"],
        "q_norm": [f"{attention}q_norm.weight"],
        "k_norm": [f"{attention}k_norm.weight"],
        "norm_1": [f"model.layers.{layer}.input_layernorm.weight"],
        "norm_2": [f"model.layers.{layer}.post_attention_layernorm.weight"],
    }
    return torch.cat([state[part] for part in made_of[what.removesuffix("_bias")]])


def filled(checkpoint: Checkpoint, rank: int, ranks: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    wanted = parameters(checkpoint.config, rank, ranks)
    outs = {parameter.name: torch.full(parameter.shape, torch.nan, dtype=dtype) for parameter in wanted}
    assemble.load(checkpoint, wanted, outs, quiet, rank, ranks)
    return outs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_fused_from_their_tensors(
    saved: Any, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows below rows, in the precision of the memory given; however small the chunks are that they come in."""
    model = saved(name)
    for chunk in (assemble.CHUNK_BYTES, 700):
        monkeypatch.setattr(assemble, "CHUNK_BYTES", chunk)
        for parameter, out in filled(model.open(), 0, 1, dtype).items():
            assert torch.equal(out, fused(model.state, parameter).to(dtype)), parameter


@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_together_compute_what_one_computes(saved: Any, name: str) -> None:
    """Each rank has whole heads and inner columns: the ranks' products, summed, are the whole model's."""
    model = saved(name)
    checkpoint = model.open()
    whole = filled(checkpoint, 0, 1, torch.float64)
    ranks = [filled(checkpoint, rank, 2, torch.float64) for rank in range(2)]
    config = checkpoint.config
    inputs = torch.randn(3, config.hidden, dtype=torch.float64)
    for layer in ("layer.0.", "layer.1."):
        down = [(inputs @ rank[f"{layer}gate_up"].T).chunk(2, -1)[0] @ rank[f"{layer}down"].T for rank in ranks]
        alone = (inputs @ whole[f"{layer}gate_up"].T).chunk(2, -1)[0] @ whole[f"{layer}down"].T
        assert torch.allclose(sum(down), alone)
        up = torch.cat([(inputs @ rank[f"{layer}gate_up"].T).chunk(2, -1)[1] for rank in ranks], -1)
        assert torch.allclose(up, (inputs @ whole[f"{layer}gate_up"].T).chunk(2, -1)[1])
        together = sum(v_then_o(rank, layer, inputs, config, 2) for rank in ranks)
        assert torch.allclose(together, v_then_o(whole, layer, inputs, config, 1))
    for parameter in ("embed", "norm", "layer.1.norm_2"):
        assert all(torch.equal(rank[parameter], whole[parameter]) for rank in ranks)


def v_then_o(
    held: dict[str, torch.Tensor], layer: str, inputs: torch.Tensor, config: Any, ranks: int
) -> torch.Tensor:
    """Attention over one position: every query head takes its KV head's value. Its size tells q, k and v apart."""
    heads, kv_heads, size = config.heads // ranks, config.kv_heads // ranks, config.head_size
    out = inputs @ held[f"{layer}qkv"].T
    if config.qkv_bias:
        out = out + held[f"{layer}qkv_bias"]
    q, k, v = out.split([heads * size, kv_heads * size, kv_heads * size], -1)
    shared = [part.reshape(3, kv_heads, 1, size) for part in (k, v)]
    values = q.reshape(3, kv_heads, heads // kv_heads, size) * shared[0] + shared[1]
    return values.reshape(3, -1) @ held[f"{layer}o"].T


def test_no_more_than_a_chunk_is_held() -> None:
    """However large a tensor, it is asked for in pieces of the bound; and together they are all of it."""
    asked: list[int] = []
    large = random_checkpoint(TINY)

    class Watched:
        config = TINY

        def read(self, name: str, first: int, last: int) -> torch.Tensor:
            asked.append((last - first) * TINY.hidden * 4)
            return large.read(name, first, last)

    out = torch.empty(TINY.vocabulary, TINY.hidden)
    before, assemble.CHUNK_BYTES = assemble.CHUNK_BYTES, 100_000
    try:
        assemble.fill(Watched(), Parameter("embed", tuple(out.shape)), out)  # type: ignore[arg-type]
    finally:
        assemble.CHUNK_BYTES = before
    assert max(asked) <= 100_000
    assert torch.equal(out, large.read("model.embed_tokens.weight"))


def test_a_load_tells_how_far_it_is() -> None:
    """From nothing to everything, in bytes of the memory written, never backwards."""
    wanted = parameters(TINY)
    outs = {parameter.name: torch.empty(parameter.shape, dtype=torch.bfloat16) for parameter in wanted}
    told: list[tuple[str, int, int | None]] = []
    assemble.load(tiny(), wanted, outs, lambda *step: told.append(step))
    total = sum(out.nbytes for out in outs.values())
    assert told[0] == ("load", 0, total)
    assert told[-1] == ("load", total, total)
    assert told == sorted(told)


def test_ranks_that_cannot_share_are_refused() -> None:
    """By what cannot be shared."""
    with pytest.raises(UserError, match=r"3 ranks.*2 KV heads"):
        assemble.parts(TINY, "embed", 0, 3)


# -- the tiny model


KNOWN = [-0.168607, -0.133754, -0.097434]


def test_the_tiny_model_is_the_same_everywhere() -> None:
    """Weights follow from the seed, the name and the place: known ones stand here, and any rows read are those rows."""
    model = tiny()
    q = model.read("model.layers.0.self_attn.q_proj.weight")
    assert [round(value, 6) for value in q[0, :3].tolist()] == KNOWN
    whole = model.read("lm_head.weight")
    assert torch.equal(model.read("lm_head.weight", 250, 777), whole[250:777])
    assert not torch.equal(whole[:256], whole[256:512])
    assert float(whole.std()) == pytest.approx(3 / 8, rel=0.02)
    assert float(q.mean()) == pytest.approx(0, abs=0.01)
    assert not torch.equal(q, model.read("model.layers.1.self_attn.q_proj.weight"))
    assert tiny(1).identity != tiny().identity == resolve("tiny", Path("nowhere"), quiet).identity


def test_the_tiny_model_can_chat() -> None:
    """Its tokenizer has no id beyond its head, it has a template, and its end is the template's."""
    model = tiny()
    tokenizer = TextTokenizer(model.tokenizer_json)
    assert tokenizer.vocab_size == TINY.vocabulary
    assert tokenizer.token_id("<|im_end|>") == TINY.eos_token_ids[0]
    assert model.chat_template is not None
    assert "<|im_end|>" in model.chat_template
    assert Tokenizer.from_str(model.tokenizer_json.decode()).decode(tokenizer.encode_now("as ever")) == "as ever"


# -- by name


def test_what_is_no_model_is_told_what_is(tmp_path: Path) -> None:
    """A person who mistypes reads what is accepted."""
    (tmp_path / "model.bin").write_text("")
    accepted = "default or smollm2-135m, tiny, the path of a directory .*gguf"
    with pytest.raises(UserError, match=f"smollm9 is not there; accepted are {accepted}"):
        resolve("smollm9", tmp_path, quiet)
    with pytest.raises(UserError, match=r"model\.bin is neither a directory nor a \.gguf file"):
        resolve(str(tmp_path / "model.bin"), tmp_path, quiet)


def test_a_directory_is_opened_by_its_path(saved: Any, tmp_path: Path) -> None:
    """Its source is that path, and its tokenizer the file's bytes."""
    model = resolve(str(saved("qwen3").path), tmp_path, quiet)
    assert model.source == str(saved("qwen3").path)
    assert model.tokenizer_json == (saved("qwen3").path / "tokenizer.json").read_bytes()
    assert model.identity.startswith("sha256:")
    assert identity.CHUNK_BYTES >= 2**20
