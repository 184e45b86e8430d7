"""vLLM's own parser and configuration, with what Holdfast sets in it. Needs vllm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed: `make test-vllm` installs it and runs these")

from vllm.engine.arg_utils import EngineArgs

from holdfast.core.errors import Refused
from holdfast.engines.vllm.options import (
    ASYNC_SCHEDULER,
    DIRECT_ASYNC_SCHEDULER,
    DIRECT_SCHEDULER,
    SCHEDULER,
    WORKER,
    engine_config,
    given,
    loaded_as,
)
from holdfast.engines.vllm.reserved_options import PASSED, RESERVED
from holdfast.spec.engines import GIB, FailoverSettings, VllmSettings

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_every_option_was_thought_of() -> None:
    """Each of this version's is either handed on or refused; one that is new here is to be decided about."""
    assert {field.name for field in dataclasses.fields(EngineArgs)} <= RESERVED.keys() | PASSED


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--worker-clss x", "unrecognized arguments: --worker-clss x"),
        ("--seed x", "argument --seed: invalid int value: 'x'"),
        ("--seed", "argument --seed: expected one argument"),
        ("--dtype float99", "argument --dtype: invalid choice: 'float99'"),
        ("stray", "unrecognized arguments: stray"),
        ("--compilation-config {bad", "argument --compilation-config/-cc: Invalid JSON"),
        ("--compilation-config.mode", "in --compilation-config.mode"),
        ("--data-parallel-rank 1", "--data-parallel-rank of vLLM is not to be set here"),
        ("-dpn 1", "--data-parallel-rank of vLLM is not to be set here"),
        ("-sc {}", "--speculative-config of vLLM is not to be set here"),
    ],
)
def test_a_wrong_word_is_refused_with_vllms_words(words: str, said: str) -> None:
    """In one line, which names the word; also of ours by a spelling that only vLLM knows."""
    with pytest.raises(Refused) as refused:
        given(words.split())
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "pydantic" not in str(refused.value)


def test_only_what_was_said_is_said() -> None:
    """vLLM's defaults stay vLLM's."""
    words = ["--enforce-eager", "--max-num-batched-tokens", "4k", "--seed=3"]
    assert given(words) == {"enforce_eager": True, "max_num_batched_tokens": 4000, "seed": 3}
    assert given([]) == {}


def test_what_is_ours_is_set(model: str) -> None:
    """Whatever else is said."""
    settings = VllmSettings(kv_gib=0.25, concurrency=7, context_tokens_max=256, options=("--seed", "3"))
    config = engine_config(model, settings, FailoverSettings(), {"shared": 9})
    cache, scheduler, parallel = config.cache_config, config.scheduler_config, config.parallel_config
    assert (cache.kv_cache_memory_bytes, cache.enable_prefix_caching) == (GIB // 4, True)
    assert cache.block_size == 32
    assert (scheduler.max_num_seqs, scheduler.policy) == (8, "priority")
    assert scheduler.scheduler_cls in (SCHEDULER, ASYNC_SCHEDULER)
    assert (scheduler.scheduler_cls == ASYNC_SCHEDULER) == bool(scheduler.async_scheduling)
    assert (parallel.worker_cls, parallel.distributed_executor_backend) == (WORKER, "uni")
    assert (config.model_config.max_model_len, config.model_config.seed) == (256, 3)
    assert config.model_config.skip_tokenizer_init
    assert config.additional_config == {"holdfast": {"shared": 9}}


def test_whoever_wants_no_kv_taken_over_has_vllms_books(model: str) -> None:
    """`--kv direct`: blocks by any name, of any kind."""
    settings = VllmSettings(options=("--no-enable-prefix-caching", "--kv-cache-dtype", "fp8"))
    config = engine_config(model, settings, FailoverSettings(kv="direct"))
    ours = DIRECT_ASYNC_SCHEDULER if config.scheduler_config.async_scheduling else DIRECT_SCHEDULER
    assert config.scheduler_config.scheduler_cls == ours
    assert (config.cache_config.enable_prefix_caching, config.cache_config.cache_dtype) == (False, "fp8")
    with pytest.raises(Refused, match="--kv-cache-dtype of vLLM"):
        engine_config(model, VllmSettings(options=("--kv-cache-dtype", "fp8")), FailoverSettings())


def test_a_persons_additional_config_stays(model: str) -> None:
    """Beside ours, which is nobody else's."""
    settings = VllmSettings(options=("--additional-config", '{"a": 1}'))
    assert engine_config(model, settings, FailoverSettings()).additional_config == {"a": 1, "holdfast": {}}
    ours = VllmSettings(options=("--additional-config", '{"holdfast": {}}'))
    with pytest.raises(Refused, match="--additional-config has holdfast"):
        engine_config(model, ours, FailoverSettings())


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({}, ("--max-num-batched-tokens", "1"), r"max_num_batched_tokens \(1\) must be greater"),
        ({"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}, (), "vLLM .* cannot serve this"),
    ],
)
def test_what_vllm_cannot_do_is_said_in_its_words(model: str, change: Any, options: Any, said: str) -> None:
    """And no second try is made."""
    (Path(model) / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(Refused, match=said):
        engine_config(model, VllmSettings(options=options), FailoverSettings())


def test_weights_are_those_of_their_options() -> None:
    """As they lie in memory: another option may have made others of the same files."""
    assert loaded_as("a", ("--seed", "1")) == loaded_as("a", ("--seed", "1"))
    assert len({loaded_as("a", ()), loaded_as("b", ()), loaded_as("a", ("--dtype", "half"))}) == 3
