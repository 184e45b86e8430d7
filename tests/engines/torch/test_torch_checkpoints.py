"""Directories that transformers saved, read back exactly; their identity; loading parameters; the tiny model."""

from __future__ import annotations

import copy
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
from holdfast.engines.torch.files.checkpoint import Checkpoint, tensor_shapes
from holdfast.engines.torch.files.config import RopeScaling
from holdfast.engines.torch.files.directory import look_at_directory, read_header
from holdfast.engines.torch.files.gguf_model import llama3_divisors
from holdfast.engines.torch.files.resolve import TINY, resolve, tiny
from holdfast.engines.torch.model import parameters as parameters_module
from holdfast.engines.torch.model.parameters import load, parameters
from holdfast.frontend.text.tokenizer import TextTokenizer
from tests.rigs.engines.torch_models import FAMILIES, reference
from tests.rigs.small_model import quiet

torch.set_num_threads(1)


class Saved:
    """A random model that transformers made and saved, in shards or in one file."""

    def __init__(self, path: Path, name: str, shard: str, dtype: torch.dtype) -> None:
        model = copy.deepcopy(reference(name)[0]).to(dtype)
        model.save_pretrained(path, max_shard_size=shard)
        (path / "tokenizer.json").write_bytes(tiny().tokenizer_json)
        self.path, self.state, self.theirs = path, model.state_dict(), model.config

    def open(self, cache: Path | None = None) -> Checkpoint:
        return resolve(str(self.path), cache or self.path / "cache", quiet)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """Models by name, shard size and precision, each made once."""
    made: dict[tuple[Any, ...], Saved] = {}

    def get(name: str, shard: str = "100KB", dtype: torch.dtype = torch.float32) -> Saved:
        key = (name, shard, dtype)
        if key not in made:
            made[key] = Saved(tmp_path_factory.mktemp(name), *key)
        return made[key]

    return get


# -- directories


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in FAMILIES), ("llama2", torch.bfloat16), ("qwen2", torch.float16)],
)
def test_what_transformers_saved_is_read_exactly(saved: Any, name: str, dtype: torch.dtype) -> None:
    """By its path: every tensor, from shards, in its stored precision, whole and in part; and its tokenizer."""
    model = saved(name, "50KB", dtype)
    checkpoint = model.open()
    assert len(list(model.path.glob("model-*.safetensors"))) > 1
    for tensor in tensor_shapes(checkpoint.config):
        read = checkpoint.read(tensor)
        assert read.dtype == dtype
        assert torch.equal(read, model.state[tensor]), tensor
        assert torch.equal(checkpoint.read(tensor, 3, 9), model.state[tensor][3:9]), tensor
    tied = {"lm_head.weight"} if checkpoint.config.tied else set()
    assert set(tensor_shapes(checkpoint.config)) == set(model.state) - tied
    assert (checkpoint.source, checkpoint.identity[:7]) == (str(model.path), "sha256:")
    assert checkpoint.tokenizer_json == (model.path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", FAMILIES)
def test_configurations_agree_with_transformers(saved: Any, name: str) -> None:
    """Shape, rope, epsilon and ends are what transformers' own config object says."""
    model = saved(name)
    ours, theirs = model.open().config, model.theirs
    assert (ours.hidden, ours.layers, ours.heads) == (theirs.hidden_size, 3, theirs.num_attention_heads)
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_size == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tied == theirs.tie_word_embeddings
    assert list(ours.eos_token_ids) == ([] if theirs.eos_token_id is None else [theirs.eos_token_id])


def test_llama_3s_divisors_are_transformers() -> None:
    """What GGUF's divisors are checked against is what transformers computes."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference("llama3")[0].config, torch.device("cpu"))
    plain = 500_000.0 ** -(torch.arange(0, 18, 2, dtype=torch.float64) / 18)
    ours = llama3_divisors(RopeScaling("llama3", 8.0, 1.0, 4.0, 64), 500_000.0, 18)
    assert torch.allclose(plain / scaled.double(), torch.tensor(ours, dtype=torch.float64), rtol=1e-5)


def test_identity_is_of_the_content(saved: Any, tmp_path: Path) -> None:
    """Sharding does not count; precision, one bit of a weight and a setting do: whoever maps these weights must not be
    able to take them for others."""
    whole, sharded, halved = saved("llama2", "1GB"), saved("llama2"), saved("llama2", dtype=torch.bfloat16)
    assert whole.open().identity == sharded.open().identity != halved.open().identity
    path = shutil.copytree(whole.path, tmp_path / "m")
    found = {whole.open().identity}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    found.add(resolve(str(path), tmp_path, quiet).identity)
    (path / "config.json").write_text(json.dumps(config))
    weights = bytearray((path / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (path / "model.safetensors").write_bytes(weights)
    assert len(found | {resolve(str(path), tmp_path, quiet).identity}) == 3


def test_a_second_start_hashes_nothing(saved: Any, tmp_path: Path) -> None:
    """The identity is remembered by path, size and time of change; a changed file is hashed again."""
    path = shutil.copytree(saved("qwen2", "1GB").path, tmp_path / "m")
    told: list[tuple[str, int, int | None]] = []

    def once() -> str:
        told.clear()
        return resolve(str(path), tmp_path / "cache", lambda *step: told.append(step)).identity

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
    "no shard": (lambda path: second(path).unlink(), "model-00002-of-0000"),
    "no weights": (lambda path: [file.unlink() for file in path.glob("model*")], "neither model.safetensors nor"),
    "a short shard": (lambda path: cut(second(path), 1), "00002.*cut short"),
    "a short header": (lambda path: cut(second(path), 10**9), "00002.*header"),
    "no tensor": (lambda path: rename(path / "model.safetensors.index.json"), "model.layers.1.mlp.up_proj.weight"),
    "another shape": (lambda path: resize(path / "config.json"), r"gate_proj.*\[116, 60\].*\[64, 60\]"),
}


def second(path: Path) -> Path:
    """Of several shards."""
    return sorted(path.glob("model-*.safetensors"))[1]


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
    """A directory that lacks something says what, when it is looked at."""
    path = shutil.copytree(saved("llama2").path, tmp_path / "m")
    damage, words = BREAKAGES[what]
    damage(path)
    with pytest.raises(UserError, match=words):
        look_at_directory(path)


def test_kinds_of_number_that_are_not_supported_are_named(tmp_path: Path) -> None:
    """An fp8 file is refused as such."""
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(3).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"F8_E4M3.*F32, F16, BF16"):
        read_header(tmp_path / "model.safetensors")


def test_the_chat_template_is_found_wherever_it_stands(saved: Any, tmp_path: Path) -> None:
    """In a file of its own first, else in tokenizer_config.json, alone or by name; the begin-of-text written in."""
    path = shutil.copytree(saved("qwen3").path, tmp_path / "m")

    def template(said: dict[str, Any]) -> str | None:
        (path / "tokenizer_config.json").write_text(json.dumps(said))
        return look_at_directory(path).chat_template

    assert template({}) is None
    assert template({"chat_template": "A"}) == "A"
    assert template({"chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]}) == "D"
    started = template({"chat_template": "{{ bos_token }}A", "bos_token": {"content": "<s>"}})
    assert started is not None
    assert '"<s>"' in started
    (path / "chat_template.jinja").write_text("J")
    assert template({"chat_template": "A"}) == "J"


# -- parameters


@pytest.mark.parametrize("rank", [0, 1])
def test_no_more_than_a_chunk_is_held(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a tensor, it is asked for in pieces of the bound, and together they are all of it, a rank's share
    of rows or columns too, in the precision of the memory given; how many bytes of that are written is told."""
    asked: list[int] = []
    told: list[tuple[str, int, int | None]] = []

    class Watched:
        def read(self, name: str, first: int, last: int) -> torch.Tensor:
            found = tiny().read(name, first, last)
            asked.append(found.nbytes)
            return found

    wanted = parameters(TINY, rank, 2)
    whole = {each.name: torch.empty(each.shape) for each in wanted}
    pieces = {name: out.bfloat16() for name, out in whole.items()}
    load(tiny(), wanted, whole, quiet)
    monkeypatch.setattr(parameters_module, "CHUNK_BYTES", 10_000)
    load(Watched(), wanted, pieces, lambda *step: told.append(step))
    assert max(asked) <= 10_000
    assert all(torch.equal(pieces[name], tensor.bfloat16()) for name, tensor in whole.items())
    total = sum(out.nbytes for out in pieces.values())
    assert (told[0], told[-1]) == (("load", 0, total), ("load", total, total))
    assert told == sorted(told)


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
