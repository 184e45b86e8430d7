"""`python -m bench.health`: what it calls found, false, lost and missed; and a tenth of it, with real processes."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

from bench.health.__main__ import seconds
from bench.health.faults import BY_NAME, FAULTS, MAY_MISS, UNFIT, On, Then, pairs
from bench.health.judging import Answers, Hit, Window, alarms, judge_answers, meets, rows
from bench.health.run import HealthBench, run
from bench.prove_health import part_shares, together
from holdfast.core.errors import UserError
from holdfast.engines.sim.faults import parse_fault
from holdfast.health import breaker
from holdfast.health.records import HealthRecord
from holdfast.health.standing import WEIGHTS, HealthCause, HealthStatus, WorkerStanding
from holdfast.testing.answers import Answer
from tests.rigs.health.verdicts import Verdict

SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "1")) % 1_000_000


def verdict(
    name: str,
    status: HealthStatus,
    *causes: HealthCause,
    at_s: float = 11.0,
    fall: int = 0,
    broken: bool = False,
    pid: str = "1",
) -> Verdict:
    standing = WorkerStanding(
        status, WEIGHTS[status], HealthCause.WRONG in causes, "why", causes=dict.fromkeys(causes, "why"), fall=fall
    )
    opened = breaker.BreakerRecord(breaker.BreakerState.OPEN if broken else breaker.BreakerState.CLOSED)
    return Verdict(at_s, f"{name}/{pid}", HealthRecord(name=name, standing=standing, breaker=opened))


# What each expectation looks like in the store.
SEEN: dict[Then, Verdict] = {
    Then.DEAD: verdict("w0", HealthStatus.DEAD, HealthCause.GONE, fall=1),
    Then.LOST: verdict("w0", HealthStatus.UNHEALTHY, HealthCause.LOST, fall=1),
    Then.HALF: verdict("w0", HealthStatus.SUSPICIOUS, HealthCause.SLOW),
    Then.DRAINED: verdict("w0", HealthStatus.DRAINING, HealthCause.CRAWLING),
    Then.QUARANTINED: verdict("w0", HealthStatus.UNHEALTHY, HealthCause.WRONG, fall=1),
    Then.BREAKER: verdict("w0", HealthStatus.UNHEALTHY, HealthCause.BREAKER, fall=1, broken=True),
}


def window(*names: str, history: list[Verdict], answers: Answers | None = None, **more: Any) -> Window:
    hits = tuple(
        Hit(fault, {On.ONE: (f"w{place}",), On.ALL: ("w0", "w1")}.get(fault.on, ()), 10.0)
        for place, fault in enumerate(BY_NAME[name] for name in names)
    )
    return Window(hits, history, answers or Answers(8), **{"recovered_s": 1.0, **more})


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_expectation_is_met_by_its_own_verdict_only(fault: Any) -> None:
    """What is expected is found when it is written, by nothing else, and silence is right for a harmless fault only."""
    right = [SEEN[fault.then]] if fault.then in SEEN else []
    (row,) = rows(window(fault.name, history=right))
    assert row["missed"] == []
    assert row["false_positives"] == 0
    assert row["detect_ms"] == (1000.0 if right else None)
    for then, other in SEEN.items():
        assert meets(fault.then, other) is (then is fault.then), then
    (silent,) = rows(window(fault.name, history=[]))
    assert bool(silent["missed"]) is (fault.then is not Then.NOTHING)


def test_an_earlier_verdict_is_not_this_faults() -> None:
    """A verdict from before the hit, or about another worker, does not count as found; the other's is a false one."""
    (row,) = rows(window("stopped", history=[dataclasses.replace(SEEN[Then.LOST], at_s=9.0)]))
    assert row["detect_ms"] is None
    (row,) = rows(window("stopped", history=[verdict("w1", HealthStatus.UNHEALTHY, HealthCause.LOST, fall=1)]))
    assert (row["detect_ms"], row["false_positives"]) == (None, 1)


def test_a_harsher_verdict_than_the_fault_deserves_is_a_false_one() -> None:
    """A slow worker may lose half its traffic, not all of it; a new worker is no alarm; each is told once."""
    hit = {"w0": HealthStatus.SUSPICIOUS}
    lost = verdict("w0", HealthStatus.UNHEALTHY, HealthCause.LOST)
    assert alarms([SEEN[Then.HALF], verdict("w1", HealthStatus.UNHEALTHY, HealthCause.UNCHECKED)], hit) == []
    assert alarms([lost, dataclasses.replace(lost, at_s=12.0)], hit) == ["w0 UNHEALTHY: why"]


def test_streams_are_moved_once() -> None:
    """A second fall in one window, or a stream that changed hands twice, is a miss."""
    twice = [SEEN[Then.LOST], verdict("w0", HealthStatus.UNHEALTHY, HealthCause.LOST, fall=2, at_s=12.0)]
    assert any("2 times" in text for text in rows(window("wedged", history=twice))[0]["missed"])
    hopping = Answers(8, moved=2, moved_twice=1)
    assert rows(window("wedged", history=twice[:1], answers=hopping))[0]["missed"] == [
        "1 streams were moved more than once"
    ]
    before = {"w0/1": 1}
    again = [verdict("w0", HealthStatus.UNHEALTHY, HealthCause.LOST, fall=2)]
    assert rows(window("wedged", history=again, falls_before=before))[0]["missed"] == []


@pytest.mark.parametrize(
    ("fault", "seen", "more", "why"),
    [
        ("slow x3", Then.HALF, {"answers": Answers(8, moved=1)}, "1 streams were moved"),
        ("slow x20", Then.DRAINED, {"ended": frozenset({"w0"})}, "its process ended"),
        ("crash", Then.DEAD, {"answers": Answers(8, lost=("no [DONE]",))}, "1 streams lost: no [DONE]"),
        ("crash", Then.DEAD, {"answers": Answers(8, wrong=1)}, "1 answers wrong"),
        ("crash", Then.DEAD, {"recovered_s": None}, "not all well again in time"),
    ],
)
def test_what_must_not_happen_is_missed(fault: str, seen: Then, more: dict[str, Any], why: str) -> None:
    """Nothing is moved for slowness, no worker is killed, nothing is lost or wrong, and all come back."""
    assert rows(window(fault, history=[SEEN[seen]], **more))[0]["missed"] == [why]


def test_wrong_answers_are_counted_and_forgiven_where_they_cannot_be_known() -> None:
    """Until a canary finds wrong tokens some reach clients: they are told, and are no miss."""
    (row,) = rows(window("wrong tokens", history=[SEEN[Then.QUARANTINED]], answers=Answers(8, wrong=3)))
    assert (row["wrong_answers"], row["missed"]) == (3, [])


def test_answers_are_compared_token_by_token_and_logprob_by_logprob() -> None:
    """Lost, wrong by a token, wrong by a logprob, moved: each is counted, and a good one is none of them."""
    right = Answer("a", [1, 2], "length", done=True, logprobs=[-0.5])
    pairs_seen = [
        (right, dataclasses.replace(right)),
        (right, dataclasses.replace(right, resumed=1)),
        (right, dataclasses.replace(right, resumed=2)),
        (right, dataclasses.replace(right, tokens=[1, 3])),
        (right, dataclasses.replace(right, logprobs=[-1.0])),
        (right, dataclasses.replace(right, done=False)),
    ]
    assert judge_answers(pairs_seen) == Answers(6, ("no [DONE]",), 2, 2, 1)


def test_of_a_pair_each_is_judged_for_itself() -> None:
    """Both verdicts must come, each on its own worker; what may be missed beside the other is no miss."""
    history = [SEEN[Then.LOST], verdict("w1", HealthStatus.SUSPICIOUS, HealthCause.SLOW)]
    one, other = rows(window("stopped", "slow x3", history=history))
    assert (one["missed"], other["missed"]) == ([], [])
    assert (one["beside"], other["beside"]) == ("slow x3", "stopped")
    one, other = rows(window("slow x3", "stopped", history=[]))
    assert one["missed"] == ["not found within 30 s"]
    one, other = rows(window("slow x3", "CPU saturation", history=[]))
    assert (one["missed"], other["missed"]) == ([], [])


def test_the_list_of_faults_is_sound() -> None:
    """Every command is one that the sim engine knows; the tables of pairs name faults; all other pairs are there."""
    for fault in FAULTS:
        assert bool(fault.sim) is (fault.on in (On.ONE, On.ALL))
        if fault.sim:
            assert parse_fault(fault.sim).kind == fault.sim["fault"]
    named = {name for pair in (*UNFIT, *MAY_MISS) for name in pair}
    assert named <= BY_NAME.keys()
    assert len(list(pairs(FAULTS))) == len(FAULTS) * (len(FAULTS) - 1) // 2 - len(UNFIT)


@pytest.mark.parametrize("parts", [1, 3, 8, 200])
def test_parts_are_all_of_it_once(parts: int) -> None:
    """All parts together, in whatever processes, try every pair, and none twice; parts are about equal."""
    shares = [HealthBench(in_pairs=True, part=(which, parts)).cases for which in range(1, parts + 1)]
    tried = [tuple(fault.name for fault in case) for share in shares for case in share]
    assert sorted(tried) == sorted((one.name, other.name) for one, other in pairs(FAULTS))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_part_of_a_part_side_by_side_is_all_of_it_once() -> None:
    """Several deployments share one part of several: the proof hands each its own, and tells all of it in order."""
    shares = [share for which in (1, 2, 3) for share in part_shares(which, 3, 4)]
    assert sorted(shares) == sorted(f"{place}/12" for place in range(1, 13))
    told = [{"faults": [{"fault": b, "beside": a}, {"fault": a, "beside": b}]} for a, b in (("wedged", "crash"),)]
    told += [{"faults": [{"fault": "crash", "beside": "stopped"}, {"fault": "stopped", "beside": "crash"}]}]
    sums = {"false_positives": 0, "streams_lost": 1, "answers": 2, "cases": 1, "cases_meant": 2}
    about = {"workers": 4, "streams": 16, "canary_interval_s": 5.0, "seed": 1}
    whole = together([{**one, **sums, **about, "missed": ["x"], "seconds": 3.0} for one in told], ["part 1/2 ended"])
    assert [(row["fault"], row["beside"]) for row in whole["faults"]] == [
        ("crash", "stopped"), ("stopped", "crash"), ("crash", "wedged"), ("wedged", "crash"),
    ]  # fmt: skip
    assert (whole["cases"], whole["cases_meant"], whole["missed"]) == (2, 4, ["x", "x", "part 1/2 ended"])


def test_how_long_a_soak_lasts() -> None:
    """Seconds, minutes and hours; anything else is refused by the option's name."""
    assert [seconds("--soak", text) for text in ("90", "90s", "1.5m", "2h")] == [90, 90, 90, 7200]
    for text in ("", "0", "ten", "-5", "5d"):
        with pytest.raises(UserError, match="--soak"):
            seconds("--soak", text)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_what_is_broken_is_found_and_what_is_not_is_left_alone() -> None:
    """One fault of each kind, real processes under load: each found as what it is, nothing lost, no other accused."""
    names = ("crash", "stopped", "slow x20", "wrong tokens", "truncated streams", "client 400s")
    result = run(HealthBench(tuple(BY_NAME[name] for name in names), seed=SEED), print)
    assert result["missed"] == [], result
    assert result["false_positives"] == result["streams_lost"] == 0
    assert result["answers"] > 0
