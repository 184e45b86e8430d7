"""What control holds against a worker: what keeps it from counting, and what undoes the revision that brought it."""

from __future__ import annotations

import pytest

from holdfast.health import standing as s
from holdfast.health.records import HealthRecord
from holdfast.health.standing import HealthCause, HealthStatus, WorkerStanding
from holdfast.rollout.machine import ObservedReplica, ReplicaStage
from holdfast.supervise.observe import PERMANENT_FAULTS, UNCHECKED, with_verdict

SILENT = "canary no answer: nothing within 15 s"
WORKER = ObservedReplica(service="worker", set_id="b", stage=ReplicaStage.SERVING, admitted=True)


def record(*events: s.StandingEvent, spare: bool = False) -> HealthRecord:
    """A worker's record after events of its life, a second apart."""
    standing, now_s = WorkerStanding(), 0.0
    for event in (s.WorkerPresent(1), *events):
        now_s += 10.0
        standing, _ = s.step(standing, event, now_s)
    return HealthRecord(name="worker-3", standing=standing, spare=spare)


def failed(at_s: float, failing: s.CanaryFailing = s.CanaryFailing.NO_ANSWER) -> s.CanaryFailed:
    return s.CanaryFailed(1, at_s, failing, "nothing within 15 s")


def test_a_first_canary_and_a_second() -> None:
    """Unchecked it has no weight; sound and in service it has all of it, and nothing more is waited for."""
    nobody = with_verdict(WORKER, None)
    assert (nobody.weight, nobody.trouble, nobody.how) == (0.0, "", UNCHECKED)
    fresh = with_verdict(WORKER, record())
    assert (fresh.weight, fresh.trouble, fresh.how) == (0.0, "", s.UNCHECKED)
    sound = with_verdict(WORKER, record(s.CanaryPassed(1, 15.0), s.CanaryPassed(1, 25.0)))
    assert (sound.weight, sound.trouble, sound.how) == (1.0, "", "")


def test_a_breaker_that_is_open_is_told() -> None:
    """It is no trouble by itself: that is for who knows how the others fare."""
    shut = with_verdict(
        WORKER, record(s.CanaryPassed(1, 15.0), s.CanaryPassed(1, 25.0), s.BreakerOpened(1, "3 in a row"))
    )
    assert (shut.weight, shut.trouble, shut.is_shut) == (0.0, "", True)
    assert not with_verdict(WORKER, record(s.CanaryPassed(1, 15.0))).is_shut


def test_a_spare_counts() -> None:
    """It has no traffic because enough others have."""
    spare = record(s.CanaryPassed(1, 15.0), s.CanaryPassed(1, 25.0), spare=True)
    assert spare.weight == 0.0
    assert with_verdict(WORKER, spare).weight == 1.0


@pytest.mark.parametrize(
    ("events", "trouble"),
    [
        ([failed(15.0)], ""),
        ([failed(15.0), failed(25.0), failed(35.0)], f"fails its canaries: 3 canaries in a row; {SILENT}"),
        ([failed(15.0, s.CanaryFailing.WRONG)], "answers wrongly: canary wrong: nothing within 15 s"),
        ([s.ReportedFatal(1, "an illegal address")], "says that its engine cannot go on: an illegal address"),
        ([s.WorkerGone(1, "SIGKILL")], ""),
    ],
    ids=["one canary lost", "three in a row", "wrong", "its engine says so", "killed"],
)
def test_what_undoes_a_revision(events: list[s.StandingEvent], trouble: str) -> None:
    """Canaries failing in a row, a wrong answer, an engine that gives up; not one that is lost, or a kill."""
    seen = with_verdict(WORKER, record(*events))
    assert seen.trouble == trouble
    assert seen.weight == 0.0


def test_a_refused_card_comes_first() -> None:
    """Who is refused can pass no canary; the reason that people can mend is told."""
    seen = with_verdict(WORKER, record(failed(15.0), failed(25.0), failed(35.0)), refused="another tokenizer")
    assert seen.trouble == "has a card that is refused: another tokenizer"
    told = with_verdict(
        ObservedReplica(
            service="worker", set_id="b", stage=ReplicaStage.STARTING, trouble="cannot be started: no model"
        ),
        None,
    )
    assert (told.trouble, told.how) == ("cannot be started: no model", "")


def test_what_is_grave_takes_all_traffic() -> None:
    """No cause undoes a revision that control itself lets serve."""
    assert all(s.TABLE[cause][0] is HealthStatus.UNHEALTHY for cause in PERMANENT_FAULTS)
    assert HealthCause.DEVICE_LOST not in PERMANENT_FAULTS
