"""The fault matrix at a tenth of its size; `make prove-data-path` runs it whole, with the published bounds."""

from __future__ import annotations

import os

import pytest

from bench.data_path.faults import (
    HITS,
    ORPHANS_S,
    frontend_killed,
    no_worker_within_hold,
    only_worker_returns,
    run_calm,
    run_case,
    run_stop_and_continue,
    store_outage,
)
from holdfast.testing.workload import Outcome, Workload

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(300)]

SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "1")) % 1_000_000
LOAD = Workload(streams=16, tokens=250, seed=SEED)  # five seconds: enough for a hit in the middle of them


def _must_have_survived(outcome: Outcome) -> None:
    assert outcome.survived, outcome
    assert outcome.resumed > 0, "the hit worker had no stream: the test proved nothing"
    print(outcome)  # its stall is a wall-clock figure, of which a busy machine makes anything


@pytest.mark.parametrize("fault", [fault for fault in HITS if fault != "stop"])
def test_one_worker_hit_mid_stream(fault: str) -> None:
    """Every stream finishes with the tokens, text and logprobs of the unbroken run, after a short stall."""
    _must_have_survived(run_case(fault, LOAD))


def test_stopped_worker_continues_mid_stream() -> None:
    """A worker stopped and continued while its streams run elsewhere repeats nothing and serves a probation."""
    outcome, verdicts = run_stop_and_continue(Workload(streams=16, tokens=300, seed=SEED), continue_after_s=3.0)
    _must_have_survived(outcome)
    assert verdicts[-2:] == ["probation", "alive"], verdicts


def test_slow_and_starved_engines_are_left_alone() -> None:
    """Engines 20 times slower on saturated cores: nothing is lost, nothing is moved."""
    result = run_calm(10.0, streams=16)
    assert (result["streams_lost"], result["resumed"]) == (0, 0), result


def test_only_worker_killed_and_replaced() -> None:
    """With no worker to take over, streams are held and finish exactly on the worker that comes."""
    result = only_worker_returns(2.0, LOAD)
    assert result["survived"], result
    assert result["resumed"] == LOAD.streams, result


def test_no_worker_within_the_hold() -> None:
    """No worker comes: 503 with Retry-After for new requests, an error event and no [DONE] for open streams."""
    result = no_worker_within_hold(2.0, LOAD)
    assert (result["late_status"], result["late_retry_after"]) == (503, True), result
    assert result["ended_with_error_event"] == LOAD.streams, result
    assert result["false_done"] == 0, result
    assert result["error"]["code"] == "NoWorker", result
    assert result["frontend_alive"], result


@pytest.mark.parametrize("kind", ["embedded", "etcd"])
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_store_away_under_load(kind: str, how: str) -> None:
    """No stream breaks or moves, no worker is forgotten, and afterwards a new worker is found."""
    result = store_outage(kind, how, 4.0, streams=8)
    assert (result["broken"], result["resumed"], result["workers_after"]) == (0, 0, 2), result
    assert result["finished"] > 0, result


def test_frontend_killed_under_load() -> None:
    """The engines drop the dead frontend's work long before it would be done, and a new frontend serves."""
    result = frontend_killed(16)
    assert result["orphans_cancelled_ms"] <= 1000 * ORPHANS_S, result
