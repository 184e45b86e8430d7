"""Failover at a tenth of its published size: real `holdfast up`, real kills, exact answers, redundancy restored."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import uvloop

from bench import failover
from bench.failover import engine_bench
from bench.prove_failover import HITS, run_case
from holdfast.testing.answers import Answer
from holdfast.testing.supervised import Supervised
from holdfast.testing.workload import Workload, run_streams
from tests.rigs.engines.mixed_load import EngineLoad

pytestmark = pytest.mark.alone

LOAD = Workload(streams=8, tokens=300)  # four seconds and more: enough for a hit in the middle of them
# What comes to the same for the rest: another end of the same engine, or of its memory before it.
LATER = ("SIGTERM", "device error", "vault a second before")
SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "1"))


@pytest.fixture(scope="module")
def up() -> Iterator[Supervised]:
    with Supervised("--vault-gib", "0.1", "--sim-ranks", "2", "--sim-tpot-ms", "15") as started:
        yield started


@pytest.fixture(scope="module")
def unbroken(up: Supervised) -> list[Answer]:
    return uvloop.run(run_streams(up.port, LOAD))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LATER else []) for name in HITS]
)
@pytest.mark.timeout(300)
def test_every_stream_goes_on_and_a_standby_comes_back(up: Supervised, unbroken: list[Answer], name: str) -> None:
    """Whatever ends the active engine, all streams end as if nothing had happened, and a new standby is ready."""
    outcome, more = run_case(up, LOAD, unbroken, name)
    assert outcome.survived, (outcome, up.logs())
    assert outcome.resumed, "the hit came too late to mean anything"
    assert more["two_leaders"] == 0
    print(outcome, more)  # bounds of stalls are `make prove-failover`'s: here others share the machine's cores


@pytest.mark.long
@pytest.mark.timeout(300)
def test_many_failovers_under_load_lose_nothing() -> None:
    """Twenty ends of the active engine under continuous load: nothing lost, wrong or doubled, nothing grows."""
    row = failover.run(failover.sim_bench(20, 8, 100, vault_gib=0.1, seed=SEED))
    assert row["streams_lost"] == row["tokens_wrong"] == row["two_actives"] == 0, row
    assert row["leaders"] >= 21
    assert row["recomputed_tokens_max"] <= 16
    # A leak would show at each of fifteen; a few are questions that are on their way when it is looked.
    assert all(sizes["fds"] <= 8 for sizes in row["growth"].values()), row["growth"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_kills_of_the_active_engine_change_no_token() -> None:
    """Twenty SIGKILLs under mixed load and a pool 95% full: nothing lost, every stream's tokens those of the unbroken
    run, never two leaders, no block of a stream that comes back evicted or missing, less than one computed again."""
    pytest.importorskip("torch", reason="torch is not installed here")
    row = failover.run(engine_bench(20, 10, 80, seed=SEED))
    assert row["streams_lost"] == row["tokens_wrong"] == row["counts_wrong"] == row["two_actives"] == 0, row
    assert row["leaders"] >= 21
    # How many streams are under way at a kill depends on the seed; with fewer than one at each nothing is shown.
    assert row["resumed_streams"] >= 20, "the kills came too late to mean anything"
    assert row["resumed_identical_share"] == 1.0
    assert row["resumed_resident_total"] >= 20, row
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
