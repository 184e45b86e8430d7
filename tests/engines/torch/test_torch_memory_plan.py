"""The memory plans of a GPU and of a host: the sum, the pool, what is refused; settings left to the device."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.core.errors import UserError
from holdfast.engines.torch import geometry as geometry_module
from holdfast.engines.torch.files.config import ModelConfig
from holdfast.engines.torch.files.resolve import SHAPES, TINY, random_checkpoint, resolve, shaped, tiny
from holdfast.engines.torch.geometry import block_geometry, pool_geometry, settings_on, with_planned_pool
from holdfast.engines.torch.memory_plan import (
    HOST_MARGIN_BYTES,
    MIB,
    HostPlan,
    MemoryPlan,
    host_plan,
    memory_plan,
    needed_bytes,
    usable_bytes,
)
from holdfast.engines.torch.model.parameters import count
from holdfast.roles.engine_torch import make_torch
from holdfast.spec.engines import GIB, FailoverSettings, TorchSettings
from holdfast.spec.launch import WorkerLaunch

H200_BYTES = 139 * GIB  # about what an H200 has
KV_8B_TOKEN_BYTES = 131_072  # facts 8


def plan_of(
    config: ModelConfig = SHAPES["8b"], device: int = H200_BYTES, standbys: int = 1, pairs: int = 1, **wishes: Any
) -> MemoryPlan:
    settings = TorchSettings(**({"kv_gib": 0, "concurrency": 0, "step_tokens_max": 0} | wishes)).for_device(True)
    one = block_geometry(random_checkpoint(config), settings, torch.bfloat16)
    return memory_plan(config, settings, one, device, standbys=standbys, pairs=pairs)


def test_what_is_promised_before_is_what_the_plan_takes() -> None:
    """A pair that fits by its needs alone is one whose plan allows its pool, and the other way round, to the byte."""
    wishes = TorchSettings(kv_gib=10.0)
    for config, standbys in ((SHAPES["8b"], 1), (SHAPES["1b"], 0), (TINY, 3)):
        needed = needed_bytes(config, wishes, standbys)
        least = next(size for size in range(needed, 2 * needed, MIB) if usable_bytes(size) >= needed)
        assert plan_of(config, least, standbys, kv_gib=10.0).pool_bytes >= 10 * GIB
        assert plan_of(config, least - MIB, standbys, kv_gib=10.0).pool_bytes < 10 * GIB
    assert needed_bytes(TINY, TorchSettings(), 1) == 0, "its pool takes what is left"


# -- the sum


PLAIN = MemoryPlan(
    device_bytes=100 * GIB,
    pairs=1,
    weights_bytes=20 * GIB,
    engines=3,
    context_bytes=512 * MIB,
    graphs_bytes=256 * MIB,
    workspace_bytes=256 * MIB,
    margin_bytes=2 * GIB,
    context_tokens=1000,
    stream_bytes=5 * GIB,
)


@pytest.mark.parametrize(
    ("changed", "left_gib"),
    [
        ({}, 75),
        ({"engines": 1}, 77),
        ({"weights_bytes": 90 * GIB}, 5),
        ({"weights_bytes": 99 * GIB}, -4),
        ({"pairs": 2}, 25),
        ({"margin_bytes": GIB}, 76),
        ({"workspace_bytes": 1280 * MIB}, 72),
    ],
)
def test_the_pool_is_what_the_sum_leaves(changed: dict[str, int], left_gib: int) -> None:
    """Device, or its share, minus weights, minus every engine's own, minus the margin: each term counts as it says."""
    assert replace(PLAIN, **changed).pool_bytes == left_gib * GIB  # type: ignore[arg-type]


def test_the_sum_is_shown_as_a_table() -> None:
    """A line for each term, in columns, in the order in which it is worked out; shared devices are said to be so."""
    assert PLAIN.lines() == [
        "  device          100.00 GiB",
        "- weights          20.00 GiB",
        "- CUDA context      1.50 GiB, 3 x 512 MiB",
        "- graphs            0.75 GiB, 3 x 256 MiB",
        "- workspace         0.75 GiB, 3 x 256 MiB",
        "- margin            2.00 GiB",
        "= KV pool          75.00 GiB, one text of 1,000 tokens needs 5.00 GiB",
    ]
    assert replace(PLAIN, pairs=2).lines()[0] == "  device           50.00 GiB, of 100.00 GiB shared by 2 pairs"


@pytest.mark.parametrize(
    ("weights_gib", "kv_gib", "pool_gib"), [(20, 0, 75), (20, 75, 75), (20, 3.5, 3.5), (90, 0, 5), (93, 1.5, 1.5)]
)
def test_a_pool_that_fits_is_given(weights_gib: int, kv_gib: float, pool_gib: float) -> None:
    """Nothing asked for: all that is left; a size that fits: that size, even one that a longest text would not fill."""
    assert replace(PLAIN, weights_bytes=weights_gib * GIB).pool_for(kv_gib) == pool_gib * GIB


@pytest.mark.parametrize(
    ("weights_gib", "kv_gib", "said", "left"),
    [
        (91, 0, "one text of 1000 tokens needs a KV pool of 5.00 GiB", "= 4.00 GiB; use a smaller --context"),
        (99, 0, "one text of 1000 tokens needs", "= -4.00 GiB; use a smaller --context, fewer --standbys"),
        (20, 75.5, "--kv-gib 75.5 does not fit", "= 75.00 GiB; use a smaller --kv-gib, fewer --standbys"),
        (99, 0.1, "--kv-gib 0.1 does not fit", "= -4.00 GiB; use a smaller --kv-gib"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sum(weights_gib: int, kv_gib: float, said: str, left: str) -> None:
    """The refusal is one line with what was wanted, every term, what is left, and what to do about it."""
    with pytest.raises(UserError) as refused:
        replace(PLAIN, weights_bytes=weights_gib * GIB).pool_for(kv_gib)
    text = str(refused.value)
    own = "3 engines x (512 MiB context + 256 MiB graphs + 256 MiB workspace)"
    assert said in text
    assert f"device 100.00 GiB - weights {weights_gib}.00 GiB - {own} - margin 2.00 GiB {left}" in text
    assert "or a larger device" in text
    assert "\n" not in text


# -- its terms


def test_an_8b_model_on_an_h200() -> None:
    """The known sizes: 15 GiB of weights, 131 KB of KV a token, 0.6 GiB a context; a standby costs under 2 GiB."""
    plan = plan_of()
    assert plan.weights_bytes == 2 * count(SHAPES["8b"]) == pytest.approx(14.96 * GIB, rel=0.001)
    assert plan.stream_bytes == 8192 * KV_8B_TOKEN_BYTES
    assert plan.context_bytes == 640 * MIB
    assert plan.margin_bytes == pytest.approx(0.02 * H200_BYTES, abs=1)
    assert 64 * 128_256 * 4 * 2 < plan.workspace_bytes < 1.5 * GIB
    assert 115 * GIB < plan.pool_bytes < 120 * GIB
    assert plan.pool_bytes - plan_of(standbys=2).pool_bytes == plan.engine_bytes < 2 * GIB


@pytest.mark.parametrize(
    ("wishes", "term"),
    [
        ({"concurrency": 256}, "workspace_bytes"),
        ({"concurrency": 256}, "graphs_bytes"),
        ({"step_tokens_max": 8192}, "workspace_bytes"),
        ({"context_tokens_max": 100_000}, "workspace_bytes"),
        ({"context_tokens_max": 100_000}, "stream_bytes"),
        ({"device": 40 * GIB * 16}, "margin_bytes"),
        ({"ranks": 2}, "context_bytes"),
    ],
)
def test_what_makes_a_term_larger(wishes: dict[str, Any], term: str) -> None:
    """More streams, longer steps, longer texts, larger devices and ranks that talk are paid for where they cost."""
    assert getattr(plan_of(**wishes), term) > getattr(plan_of(), term)


def test_a_rank_holds_its_share() -> None:
    """Two ranks: half the KV of a text each, and all weights but embedding, head and norms shared out."""
    one, two = plan_of(), plan_of(ranks=2)
    assert two.stream_bytes * 2 == one.stream_bytes
    assert two.weights_bytes == 2 * count(SHAPES["8b"], ranks=2) < 0.6 * one.weights_bytes


def test_a_small_device_keeps_a_gib() -> None:
    """Two percent of a small device would be nothing: a GiB is left, and on it an 8B model is refused."""
    plan = plan_of(device=16 * GIB)
    assert plan.margin_bytes == GIB
    with pytest.raises(UserError, match="a larger device"):
        plan.pool_for(0)
    assert plan_of(SHAPES["1b"], 16 * GIB).pool_for(0) > 8 * GIB


def test_pairs_share_a_device_evenly() -> None:
    """What each of two pairs may have, together with all that both need, is not more than the device."""
    two = plan_of(pairs=2)
    used = 2 * (two.weights_bytes + two.engines * two.engine_bytes + two.pool_bytes + two.margin_bytes)
    assert used <= H200_BYTES
    assert 2 * two.margin_bytes == pytest.approx(0.02 * H200_BYTES, abs=2)
    assert two.pool_bytes < plan_of().pool_bytes / 2


# -- settings left to the device


@pytest.mark.parametrize(
    ("wishes", "is_gpu", "expected"),
    [
        ({}, False, (32, 128, 0.5)),
        ({}, True, (64, 2048, 0.0)),
        ({"concurrency": 5}, False, (5, 128, 0.5)),
        ({"concurrency": 200}, False, (200, 400, 0.5)),
        ({"concurrency": 4096}, True, (4096, 8192, 0.0)),
        ({"step_tokens_max": 300}, True, (64, 300, 0.0)),
        ({"kv_gib": 3.0}, True, (64, 2048, 3.0)),
        ({"kv_gib": 3.0}, False, (32, 128, 3.0)),
    ],
)
def test_what_is_left_to_the_device(wishes: dict[str, Any], is_gpu: bool, expected: tuple[int, int, float]) -> None:
    """0 means by device, what was said stays, a step always has room beside the decodes, and the limits follow."""
    left = TorchSettings(**({"concurrency": 0, "step_tokens_max": 0, "kv_gib": 0.0} | wishes))
    settings = left.for_device(is_gpu)
    assert (settings.concurrency, settings.step_tokens_max, settings.kv_gib) == expected
    assert settings.for_device(is_gpu) == settings


def test_a_step_without_room_for_prompts_is_refused() -> None:
    """A step that the device's streams would fill is refused by name once the device is known, too."""
    with pytest.raises(ValueError, match="step_tokens_max must be over concurrency 64, got 64"):
        TorchSettings(concurrency=0, step_tokens_max=64).for_device(True)


def test_a_cpu_has_no_plan() -> None:
    """On host memory nothing is planned: half a GiB, or what was said."""
    settings, plan = settings_on(["host-1"], tiny(), TorchSettings(kv_gib=0, concurrency=0), standbys=1)
    assert plan is None
    assert with_planned_pool(settings, plan).kv_gib == 0.5
    assert pool_geometry(tiny(), settings, torch.float32).block_count == 0.5 * GIB // (2 * 4 * 2 * 16 * 16 * 4)


def test_heads_that_cannot_be_shared_are_named() -> None:
    """Ranks that do not divide the heads are refused with the numbers, before anything is loaded."""
    with pytest.raises(UserError, match="4 ranks cannot share the model's 2 KV heads evenly"):
        settings_on(["host-1"], tiny(), TorchSettings(ranks=4), standbys=1)
    with pytest.raises(UserError, match="use a number that divides them"):
        pool_geometry(tiny(), TorchSettings(ranks=3), torch.float32)
    with pytest.raises(ValueError, match="ranks must be 1 to 16, got 0"):
        TorchSettings(ranks=0)


def test_a_ranks_pool_is_its_own() -> None:
    """A rank's blocks have its share of the KV heads, and say whose they are."""
    one = pool_geometry(tiny(), TorchSettings(kv_gib=0.5), torch.float32)
    two = TorchSettings(kv_gib=0.5, ranks=2)
    first, second = (pool_geometry(tiny(), two, torch.float32, rank) for rank in range(2))
    assert (first.kv_heads, first.rank, first.rank_count) == (1, 0, 2)
    assert first.block_bytes * 2 == one.block_bytes
    assert first.root() == second.root()
    assert first.hash != second.hash


# -- in a worker, with devices that torch would see


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Names of GPUs and their bytes, as torch would tell them."""
    sizes = {"GPU-a": H200_BYTES, "GPU-b": 80 * GIB}

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=list(sizes.values())[device.index])

    monkeypatch.setattr(geometry_module, "torch_device", lambda name: torch.device("cuda", list(sizes).index(name)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return sizes


LEFT = TorchSettings(kv_gib=0, concurrency=0, step_tokens_max=0)


def test_the_smallest_device_decides(gpus: dict[str, int]) -> None:
    """Ranks on unlike devices have pools alike: as large as the smaller device allows."""
    model = shaped("random:8b")
    _, alone = settings_on(["GPU-a"], model, LEFT, standbys=1)
    settings, both = settings_on(["GPU-a", "GPU-b"], model, TorchSettings(ranks=2), standbys=1)
    assert alone is not None
    assert both is not None
    assert (alone.device_bytes, both.device_bytes) == (H200_BYTES, 80 * GIB)
    settled = with_planned_pool(settings, both)
    assert int(settled.kv_gib * GIB) == both.pool_bytes
    geometry = pool_geometry(model, settled, torch.bfloat16, rank=1)
    assert geometry.block_count == both.pool_bytes // geometry.block_bytes


def test_a_worker_tells_its_plan_and_then_refuses_it(gpus: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    """The log has the table before the refusal that `up` shows."""
    gpus["GPU-a"] = 12 * GIB
    failover = FailoverSettings(vault_socket="/tmp/none.sock", device="GPU-a")
    launch = WorkerLaunch(deployment="test", engine="torch", source="random:8b", standbys=1, failover=failover)
    caplog.set_level(logging.INFO, "holdfast.engine")
    with pytest.raises(UserError, match=r"device 12\.00 GiB - weights 14\.96 GiB - 2 engines x "):
        make_torch(launch, shaped("random:8b"), lambda *_: None)
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "memory of GPU-a:   device           12.00 GiB"
    assert told[-1].startswith("memory of GPU-a: = KV pool ")


def test_a_gpu_that_torch_does_not_see_is_named() -> None:
    """A device that is not here is refused in words, not with a traceback."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, which stands in for any part of one")
    with pytest.raises(UserError, match="torch does not see GPU-0f; install a build of torch for this GPU"):
        settings_on(["GPU-0f"], tiny(), LEFT, standbys=1)


# -- shapes


def test_random_shapes_are_those_of_known_models() -> None:
    """The shapes have the known models' sizes, and share the sim's words and its end."""
    sizes = {name: count(config) for name, config in SHAPES.items()}
    assert sizes == {"1b": 1_235_814_400, "8b": 8_030_261_248}
    assert all(config.eos_token_ids == TINY.eos_token_ids for config in SHAPES.values())
    model = resolve("random:1b", Path("nowhere"), lambda *_: None)
    assert model.config == SHAPES["1b"]
    assert model.identity != resolve("random:8b", Path("nowhere"), lambda *_: None).identity
    with pytest.raises(UserError, match="there is no shape '9b'; there are random:1b, random:8b"):
        resolve("random:9b", Path("nowhere"), lambda *_: None)


@pytest.mark.parametrize("hidden", [64, 62], ids=["even", "odd"])
def test_rows_do_not_depend_on_how_they_are_read(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any cut of the work, for one thread or several, gives the same weights, also where a row is no whole draw."""
    model = random_checkpoint(replace(TINY, hidden=hidden))
    name = "lm_head.weight"
    whole = model.read(name, 0, 700)
    monkeypatch.setattr("holdfast.engines.torch.files.checkpoint.PIECE", 7 * hidden)
    assert torch.equal(model.read(name, 0, 700), whole)
    monkeypatch.setattr("holdfast.engines.torch.files.checkpoint.THREADS_MAX", 1)
    for first, last in ((0, 1), (255, 257), (300, 300), (511, 700)):
        assert torch.equal(model.read(name, first, last), whole[first:last])


HOST = HostPlan(
    host_bytes=32 * GIB + HOST_MARGIN_BYTES,
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
    assert HOST.room_bytes == 20 * GIB
    assert HOST.needed_bytes == 16 * GIB + HOST_MARGIN_BYTES
    assert replace(HOST, workers=2).room_bytes == 8 * GIB
    assert replace(HOST, ranks=2, engines=3).room_bytes == 6 * GIB
    HOST.check(4.0)
    HOST.check(4.0, free_bytes=16 * GIB + HOST_MARGIN_BYTES)


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
def test_a_host_too_small_is_refused_with_the_sum(changed: dict[str, int], free_gib: int | None, words: str) -> None:
    """Each says what there is and what could be asked for less of."""
    with pytest.raises(UserError, match=words):
        replace(HOST, **changed).check(4.0, None if free_gib is None else free_gib * GIB)


def test_a_known_models_weights_are_counted_in_fp32() -> None:
    """8 billion parameters are 30 GiB on a CPU; two ranks have half of most of them each."""
    whole = host_plan(SHAPES["8b"], TorchSettings(kv_gib=0), 64 * GIB, standbys=1)
    assert whole.weights_bytes == pytest.approx(29.92 * GIB, rel=0.001)
    assert whole.pool_bytes == GIB // 2
    half = host_plan(SHAPES["8b"], TorchSettings(kv_gib=1, ranks=2), 64 * GIB, standbys=1)
    assert whole.weights_bytes / 2 < half.weights_bytes < whole.weights_bytes * 0.6
