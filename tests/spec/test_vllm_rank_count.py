"""How many devices a vLLM engine has, from its own words, before vLLM is there to read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.errors import UserError
from holdfast.spec.deployment import DeploymentSpec, ranks_of
from holdfast.spec.engines import TorchSettings, VllmSettings, ranks_in
from holdfast.spec.launch import WorkerLaunch


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("", 1),
        ("--enforce-eager --seed 2", 1),
        ("--tensor-parallel-size 2", 2),
        ("--tensor_parallel_size=4 --enforce-eager", 4),
        ("-tp 8", 8),
        ("-tp 2 --tensor-parallel-size 1", 1),
    ],
)
def test_ranks_are_what_vllm_would_read(words: str, ranks: int) -> None:
    """In any spelling; the last word holds."""
    assert ranks_in(words.split()) == ranks
    assert ranks_of(WorkerLaunch(engine="vllm", vllm=VllmSettings(options=tuple(words.split())))) == ranks


@pytest.mark.parametrize("words", ["--tensor-parallel-size two", "-tp 0", "-tp -1", "--tensor-parallel-size", "-tp 64"])
def test_no_number_is_refused(words: str) -> None:
    """By its name, and with what it may be."""
    with pytest.raises(UserError, match="--tensor-parallel-size of vLLM must be 1 to 16 here"):
        ranks_in(words.split())


def test_too_few_devices_are_told_by_vllms_word(tmp_path: Path) -> None:
    """Not by one that would do nothing."""
    vllm = VllmSettings(kv_gib=1.0, options=("--tensor-parallel-size", "4"))
    worker = WorkerLaunch(engine="vllm", vllm=vllm)
    spec = DeploymentSpec("local", worker=worker, gpus=("GPU-1", "GPU-2"))
    with pytest.raises(UserError, match="--tensor-parallel-size 4 needs as many GPUs, and there are 2"):
        spec.check(tmp_path)
    with pytest.raises(UserError, match="vLLM's is --tensor-parallel-size, after --"):
        DeploymentSpec("local", worker=WorkerLaunch(engine="vllm", torch=TorchSettings(ranks=2))).check(tmp_path)
