"""What a deployment on CPUs may take of the host's memory: the sum, and its refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.tiny import SHAPES
from holdfast.engines.torch.host_plan import MARGIN_BYTES, HostPlan, host_plan
from holdfast.spec.engines import GIB, TorchSettings

PLAN = HostPlan(
    host_bytes=32 * GIB + MARGIN_BYTES,
    workers=1,
    ranks=1,
    engines=2,
    weights_bytes=10 * GIB,
    engine_bytes=GIB,
    pool_bytes=4 * GIB,
    block_bytes=GIB // 1024,
)


def test_what_is_shared_counts_once_and_an_engines_own_for_each() -> None:
    """Weights and pool for every rank of every worker; engines, standbys too, have memory of their own."""
    assert PLAN.room_bytes == 20 * GIB
    assert PLAN.needed_bytes == 16 * GIB + MARGIN_BYTES
    assert replace(PLAN, workers=2).room_bytes == 8 * GIB
    assert replace(PLAN, ranks=2, engines=3).room_bytes == 6 * GIB
    PLAN.check(4.0)
    PLAN.check(4.0, free_bytes=16 * GIB + MARGIN_BYTES)


@pytest.mark.parametrize(
    ("changed", "free_gib", "words"),
    [
        ({"pool_bytes": 500 * GIB}, None, "--kv-gib 4 does not fit into memory: host 32.38 GiB - weights 10.00 GiB"),
        ({"weights_bytes": 40 * GIB}, None, "the model does not fit into memory"),
        ({"workers": 2, "pool_bytes": 5 * GIB}, None, "--kv-gib 4 for each of 2 does not fit.*2 x weights"),
        ({"pool_bytes": 5}, None, "does not hold two KV blocks of 1,048,576 bytes"),
        ({}, 12, r"16.38 GiB of memory are needed and 12.00 GiB of 32.38 GiB are free now"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sum(changed: dict[str, int], free_gib: int | None, words: str) -> None:
    """Each says what there is and what could be asked for less of."""
    with pytest.raises(UserError, match=words):
        replace(PLAN, **changed).check(4.0, None if free_gib is None else free_gib * GIB)


def test_a_known_models_weights_are_counted_in_fp32() -> None:
    """8 billion parameters are 30 GiB on a CPU; two ranks have half of most of them each."""
    whole = host_plan(SHAPES["8b"], TorchSettings(kv_gib=0), 64 * GIB, standbys=1)
    assert whole.weights_bytes == pytest.approx(29.92 * GIB, rel=0.001)
    assert whole.pool_bytes == GIB // 2
    half = host_plan(SHAPES["8b"], TorchSettings(kv_gib=1, ranks=2), 64 * GIB, standbys=1)
    assert whole.weights_bytes / 2 < half.weights_bytes < whole.weights_bytes * 0.6
