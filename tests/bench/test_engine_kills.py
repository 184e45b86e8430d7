"""A real model's engine killed at random instants, at a tenth of the published size: every token as if nothing was."""

from __future__ import annotations

import os

import pytest

from holdfast.bench import failover
from holdfast.bench.engine_kills import EngineLoad, engine_bench

pytest.importorskip("torch", reason="torch is not installed here")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_kills_of_the_active_engine_change_no_token() -> None:
    """Twenty SIGKILLs under mixed load and a pool 95% full: nothing lost, every stream's tokens those of the unbroken
    run, never two leaders, no block of a stream that comes back evicted or missing, less than one computed again."""
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", "1"))
    row = failover.run(engine_bench(20, 10, 80, seed=seed))
    assert row["streams_lost"] == row["tokens_wrong"] == row["counts_wrong"] == row["two_actives"] == 0, row
    assert row["leaders"] >= 21
    assert row["resumed_streams"] >= 100, "the kills came too late to mean anything"
    assert row["resumed_identical_share"] == 1.0
    assert row["resumed_resident_total"] >= 100, row
    assert row["resumed_evicted_total"] == row["resumed_missing_total"] == 0, row
    assert row["recomputed_tokens_max"] == row["recomputed_tokens_resident_max"] <= 16, row


def test_the_load_is_mixed() -> None:
    """Greedy and drawn, chat and raw, short and long: every mix of two is asked for, and no two clients ask alike."""
    load = EngineLoad(streams=20)
    seen: dict[tuple[str, float, int], list[object]] = {}
    for number in range(load.streams):
        path, body = load.body(number)
        kind = (path, body["temperature"], load.prompt_tokens(number))
        seen.setdefault(kind, []).append(body.get("prompt") or body["messages"])
    assert len(seen) == 8
    asked = [str(each) for bodies in seen.values() for each in bodies]
    assert len(set(asked)) == load.streams
    assert [len(load.body(number)[1]["prompt"]) for number in (2, 14, 19)] == [40, 1000, 1000]
