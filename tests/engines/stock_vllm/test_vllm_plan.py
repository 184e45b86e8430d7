"""What vLLM's engines take of memory: a sum that `up` shows before it starts anything, and that it refuses by."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.errors import TransientError, UserError
from holdfast.engines.vllm.memory_plan import (
    GPU_LIBRARIES_BYTES,
    GRAPHS_BYTES,
    LIBRARIES_BYTES,
    MARGIN_BYTES,
    VllmPlan,
    vllm_plan,
)
from holdfast.spec.engines import GIB, VllmSettings

LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
WEIGHTS = 15 * GIB


def plan(*, is_gpu: bool = True, config: Any = LARGE, options: str = "", **given: Any) -> VllmPlan:
    where = {"where": "GPU-1", "has_bytes": 80 * GIB, "workers": 1, "engines": 2}
    where |= {name: given.pop(name) for name in where if name in given}
    settings = VllmSettings(**{"kv_gib": 40, "options": tuple(options.split()), **given})
    return vllm_plan(config, WEIGHTS, settings, is_gpu=is_gpu, **where)


def test_weights_and_pool_are_there_once_and_the_rest_for_each_engine() -> None:
    """Another standby costs what an engine has of its own, and nothing else; another worker all of it."""
    two, three, twice = plan(), plan(engines=3), plan(workers=2)
    assert two.needed_bytes == WEIGHTS + 40 * GIB + 2 * two.own_bytes + MARGIN_BYTES
    assert three.needed_bytes - two.needed_bytes == two.own_bytes
    assert twice.needed_bytes == 2 * two.needed_bytes - MARGIN_BYTES
    assert GIB < two.own_bytes < 4 * GIB


def test_a_small_pool_leaves_no_room_to_load() -> None:
    """The first engine has the weights twice while it loads, and no pool yet."""
    assert plan(kv_gib=1).needed_bytes == plan(kv_gib=15).needed_bytes < plan(kv_gib=16).needed_bytes


def test_an_engines_own_follows_from_what_it_is_asked_to_do() -> None:
    """Longer steps, more streams, graphs or none; a model that says nothing of its widths has libraries only."""
    own = plan().own_bytes
    assert plan(options="--max-num-batched-tokens 2048").own_bytes < own
    assert plan(options="--max-num-batched-tokens=16384").own_bytes > own
    assert plan(options="--max-num-batched-tokens 8k").own_bytes == own  # only vLLM reads that
    assert plan(concurrency=512).own_bytes > own
    assert own - plan(options="--enforce-eager").own_bytes == GRAPHS_BYTES
    assert plan(config={}).own_bytes == GPU_LIBRARIES_BYTES + GRAPHS_BYTES
    assert plan(config={}, is_gpu=False).own_bytes == LIBRARIES_BYTES


def test_the_sum_is_said_with_its_terms() -> None:
    """All of them, in one line."""
    small = VllmPlan("memory", 16 * GIB, 1, 2, GIB, 2 * GIB, GIB // 2)
    assert small.text() == (
        "weights 1.00 GiB (while the first engine loads, twice), KV pool 2.00 GiB, 2 engines x about 0.50 GiB of their "
        "own, a margin of 0.50 GiB: 4.50 GiB of 16.00 GiB of memory"
    )
    assert plan(workers=2).text().startswith("2 workers, each with weights 15.00 GiB")
    assert plan(has_bytes=0).text().endswith("GiB of GPU-1")


def test_what_does_not_fit_is_refused_with_the_mend() -> None:
    """For good if it never can; else it may be tried again."""
    plan().check()
    plan(has_bytes=0, kv_gib=4000).check()  # nobody knows
    with pytest.raises(UserError, match=r"not fit: weights .* of 80.00 GiB of GPU-1; use a smaller --kv-gib") as no:
        plan(kv_gib=70).check()
    assert not isinstance(no.value, TransientError)
    with pytest.raises(
        TransientError, match=r"10.00 GiB are free now; stop what uses the rest, or use a smaller --kv-gib"
    ):
        plan().check(free_bytes=10 * GIB)
