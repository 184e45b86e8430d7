"""What breakers, health checks, degradation and replicas got wrong where this design comes from (facts 13-15, 20): each
defect has a test that is named after it, or a transcript that shows it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

DEFECTS = {
    "successes while closed did not reset the count": ("transcripts/breaker_run.txt",),
    "half-open admitted one more than its budget": (
        "health/test_breaker.py::test_half_open_admits_exactly_its_budget",
    ),
    "a client's 4xx was counted": ("health/test_breaker.py::test_every_name_of_a_failure_is_judged",),
    "a truncated stream, a zero-token 200 and a stall were not": (
        "health/test_breaker.py::test_a_truncated_stream_a_zero_token_200_and_a_stall_count",
    ),
    "UNHEALTHY had no way back": (
        "transcripts/standing_three_canaries.txt",
        "transcripts/breaker_back_off.txt",
    ),
    "a further failure started a second migration": (
        "transcripts/standing_three_canaries.txt",
        "control/test_health_controller.py::test_no_order_of_events_breaks_its_promises",
    ),
    "canaries ran one after the other": ("health/test_canary.py::test_canaries_run_side_by_side",),
    "busy workers were not asked": ("health/test_canary.py::test_busy_workers_are_asked_too",),
    "one failed canary restarted a pod": (
        "transcripts/canary_hiccup.txt",
        "transcripts/standing_one_canary.txt",
    ),
    "levels had no hysteresis": (
        "routing/test_degradation.py::test_hysteresis_a_ratio_that_swings_around_a_bound_moves_nothing",
        "routing/test_degradation.py::test_hysteresis_what_falls_again_and_again_returns_later_each_time",
    ),
    "a step down did not undo what the step up did": (
        "routing/test_degradation.py::test_every_step_down_undoes_what_the_step_up_did",
    ),
    "min(concurrency, rate) mixed units": (
        "routing/test_capacity.py::test_no_mixed_units_a_few_fast_streams_are_not_a_low_rate",
        "routing/test_capacity.py::test_no_mixed_units_each_rate_is_compared_with_its_own_promise",
        "routing/test_capacity.py::test_no_mixed_units_a_ratio_does_not_know_its_unit",
    ),
    # Of replicas (facts 20).
    "a dead replica wins every pull": ("decisions/test_replicas_of_a_model.py::test_a_dead_replica_wins_no_pull",),
    "removing a replica mid-request strands it": (
        "decisions/test_replicas_of_a_model.py::test_removing_a_replica_mid_request_strands_nothing",
    ),
    "the slowest replica delays the first answer": (
        "decisions/test_replicas_of_a_model.py::test_the_slowest_replica_does_not_delay_the_first_answer",
    ),
    "scaled-up replicas get no traffic": (
        "decisions/test_replicas_of_a_model.py::test_scaled_up_replicas_get_traffic",
    ),
    "one request at a time per replica": (
        "decisions/test_replicas_of_a_model.py::test_a_replica_has_many_requests_at_a_time",
    ),
    "a restarted controller forgets placements": (
        "fleet/test_fleet_planner.py::test_a_restarted_controller_adopts_what_is_there",
        "control/test_fleet_loop.py::test_a_controller_may_die_at_any_write",
        "roles/test_fleet_local.py::test_whoever_is_killed_nothing_is_lost_or_started_twice",
    ),
    "a crashed WARM replica comes back HOT on a full device": (
        "fleet/test_fleet_planner.py::test_a_crashed_warm_replica_does_not_come_back_hot_on_a_full_device",
    ),
    "a memory ledger that estimates drifts": (
        "fleet/test_fleet_planner.py::test_a_memory_ledger_does_not_drift",
        "fleet/test_fleet_planner.py::test_an_owner_counts_once",
    ),
    "events are lost": (
        "fleet/test_fleet_planner.py::test_lost_events_are_made_up_for_by_the_next_snapshot",
        "fleet/test_fleet_events.py::test_lost_events_who_was_away_hears_what_still_makes_a_difference",
        "control/test_event_mirror.py::test_the_next_control_goes_on_where_the_last_ended",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_has_its_test(defect: str) -> None:
    """The tests and transcripts that are named for it are there."""
    for where in DEFECTS[defect]:
        if where.endswith(".txt"):
            assert (TESTS / where).exists(), where
            continue
        file, _, name = where.partition("::")
        found = ast.parse((TESTS / file).read_text()).body
        functions = [node for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert name in {function.name for function in functions}, where
