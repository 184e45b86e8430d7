"""A model's directory as vLLM gets it, looked at without vLLM; and the variables that vLLM is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import UserError
from holdfast.engines.vllm.environment import needed, usual
from holdfast.engines.vllm.files import ModelFiles, look_at_files
from holdfast.roles import examining
from holdfast.roles.examining import examine_vllm
from holdfast.roles.small_files import chat_template
from holdfast.spec.engines import GIB, FailoverSettings, VllmSettings
from holdfast.spec.launch import WorkerLaunch
from tests.rigs.small_model import LLAMA, weights

TOKENIZER = {"model": {"vocab": {"a": 0, "<end>": 5, "<far>": 500}}}
OTHER = LLAMA | {"architectures": ["NobodyForCausalLM"], "model_type": "nobody", "eos_token_id": [7, 5]}


def quiet(work: str, done: int, total: int | None) -> None: ...


def made(folder: Path, config: dict[str, Any] = OTHER, end: str = "<end>", **more: Any) -> Path:
    """A model's directory with these further files."""
    folder.mkdir(exist_ok=True)
    files = {"config": config, "tokenizer": TOKENIZER, "tokenizer_config": {"eos_token": end, "bos_token": "a"}}
    for name, said in (files | more).items():
        (folder / f"{name}.json").write_text(json.dumps(said))
    (folder / "model.safetensors").write_bytes(weights(LLAMA))
    return folder


def looked_at(folder: Path) -> ModelFiles:
    return look_at_files(str(folder), quiet)


def test_a_family_that_our_own_engine_does_not_know_is_taken(tmp_path: Path) -> None:
    """vLLM knows many more: only text and files are looked at."""
    advice = {"eos_token_id": 9, "temperature": 0.7}
    folder = made(tmp_path / "m", generation_config=advice, tokenizer_config={"eos_token": "<end>"})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    files = looked_at(folder)
    assert files.eos_token_ids == [5, 9, 7]
    assert files.text.generation_defaults == {"temperature": 0.7}
    assert chat_template(WorkerLaunch(), files.text) == files.text.chat_template == "{{ messages }}"
    assert files.weights_bytes == (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("config", "end", "ids"),
    [
        (LLAMA, "", []),
        (LLAMA, "<end>", [5]),
        (LLAMA | {"eos_token_id": 3}, "<far>", [3]),  # no row of the model's
        ({"text_config": LLAMA | {"eos_token_id": 3}}, "<far>", [3]),
        ({"text_config": LLAMA | {"eos_token_id": 3}, "eos_token_id": 4}, "", [4]),
    ],
)
def test_what_ends_a_text_is_found_where_it_is_said(tmp_path: Path, config: Any, end: str, ids: list[int]) -> None:
    """By the tokenizer first; of a model of several kinds of input also in its text's part."""
    assert looked_at(made(tmp_path / "m", config, end)).eos_token_ids == ids


def test_an_identity_is_the_contents(tmp_path: Path) -> None:
    """Not where it lies, nor who saved it; another weight or another shape is another model."""
    first = looked_at(made(tmp_path / "a")).identified(tmp_path / "cache", quiet).identity
    saved = OTHER | {"transformers_version": "9", "_name_or_path": "x"}
    assert looked_at(made(tmp_path / "b", saved)).identified(tmp_path / "cache", quiet).identity == first
    shaped = looked_at(made(tmp_path / "c", OTHER | {"rope_theta": 5.0})).identified(tmp_path / "cache", quiet)
    other = made(tmp_path / "d")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    assert len({first, shaped.identity, looked_at(other).identified(tmp_path / "cache", quiet).identity}) == 3


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "has neither model.safetensors nor"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, lost: str, said: str) -> None:
    """Before vLLM is loaded."""
    folder = made(tmp_path / "m")
    (folder / lost).unlink()
    with pytest.raises(UserError, match=said):
        looked_at(folder)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "has_vllm", lambda: True)


def asked(source: str, **settings: Any) -> WorkerLaunch:
    return WorkerLaunch(engine="vllm", source=source, standbys=1, vllm=VllmSettings(**settings))


@pytest.mark.parametrize(
    ("source", "settings", "said"),
    [
        ("default", {}, "--engine vllm needs --model: it takes a directory with config.json"),
        ("tiny", {}, "cannot serve --model tiny: it takes a directory"),
        ("/nowhere/at/all", {}, "is not there; --engine vllm takes a directory"),
        ("FILE", {}, "is no directory; --engine vllm takes a directory"),
        ("MODEL", {"options": ("--worker-cls", "x")}, "--worker-cls of vLLM is not to be set here"),
        ("MODEL", {"kv_gib": 1e6}, "--engine vllm does not fit: weights 0.00 GiB"),
        ("MODEL", {"options": ("-tp", "3")}, "--tensor-parallel-size 3 cannot share the model's 4 heads evenly"),
    ],
)
def test_what_cannot_be_is_refused_before_vllm_is_loaded(
    installed: None, tmp_path: Path, source: str, settings: Any, said: str
) -> None:
    """With the mend, by `up` and by every engine that starts."""
    (tmp_path / "file").touch()
    source = {"FILE": str(tmp_path / "file"), "MODEL": str(made(tmp_path / "m"))}.get(source, source)
    with pytest.raises(UserError) as refused:
        examine_vllm(asked(source, **settings), quiet)
    assert said in str(refused.value)


def test_what_can_be_is_taken(installed: None, tmp_path: Path) -> None:
    """Of a GPU whose size nobody knows no sum is judged."""
    folder = str(made(tmp_path / "m"))
    assert examine_vllm(asked(folder), quiet)[0].path == Path(folder)
    on_gpu = WorkerLaunch(
        engine="vllm", source=folder, failover=FailoverSettings(device="GPU-1"), vllm=VllmSettings(kv_gib=1e6)
    )
    assert examine_vllm(on_gpu, quiet)[0].path == Path(folder)
    with pytest.raises(UserError, match=r"80.00 GiB of GPU-1; use a smaller --kv-gib"):
        examine_vllm(on_gpu, quiet, gpu_bytes=80 * GIB)


def test_without_vllm_it_is_told_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is called vllm is none: this directory's tests once lay in one."""
    monkeypatch.setattr(examining, "has_vllm", lambda: False)
    with pytest.raises(UserError, match="pip install vllm"):
        examine_vllm(asked("/m"), quiet)


def test_an_engine_sees_its_own_gpus() -> None:
    """Whatever a person has set: its own alone, and each of several ranks sees those of all."""
    assert "CUDA_VISIBLE_DEVICES" not in needed("host-1")
    assert needed("GPU-1")["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert needed("GPU-1", "GPU-2")["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert usual("host-1", 1, "info")["OMP_NUM_THREADS"] == "1"
    assert usual("host-1", 9, "info", ranks=2)["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in usual("GPU-1", 8, "debug")
    assert not needed("host-1").keys() & usual("host-1", 8, "info").keys()


def test_on_a_gpu_the_pools_size_must_be_said() -> None:
    """By `up` at once, before anything is started."""
    with pytest.raises(UserError, match="--kv-gib"):
        VllmSettings().for_device(is_gpu=True)
    assert (VllmSettings().for_device(False).kv_gib, VllmSettings().for_device(False).concurrency) == (0.5, 32)
    assert VllmSettings(kv_gib=4).for_device(True).concurrency == 256
