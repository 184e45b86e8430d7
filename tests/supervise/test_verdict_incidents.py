"""Verdicts of control as incidents: one per root cause, from its detection to its recovery, with what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from holdfast.cli.status import cost, headline
from holdfast.failover.journal import Term
from holdfast.health.status_page import VerdictShown
from holdfast.spec.jobs import Job
from holdfast.supervise.incident_recorder import IncidentRecorder
from holdfast.supervise.incidents import Incident, complete, read_incidents
from holdfast.supervise.machine import Fell
from holdfast.supervise.slots import Slot
from holdfast.supervise.status import Status
from tests.rigs.manual_clock import ManualClock

WHY = "3 failures in a row, the last: 1 truncated"


def fell(name: str = "worker-1a", cause: str = "breaker-open", **fields: Any) -> VerdictShown:
    told = {"status": "UNHEALTHY", "weight": 0.0, "reason": WHY, "causes": {cause: WHY}, "fall": 1}
    told |= {"since_unix_s": 100.0}
    return VerdictShown(worker=name, name=name, instance="abc", written_unix_s=100.02, **told | fields)


def back(name: str = "worker-1a", since_s: float = 160.0) -> VerdictShown:
    return VerdictShown(worker=name, name=name, instance="abc", status="SUSPICIOUS", weight=0.5, since_unix_s=since_s)


def test_a_verdict_is_one_incident_from_its_fall_to_its_return(tmp_path: Path) -> None:
    """Heard every second, by one supervisor and by the next; when it was known, when written down, and how long it
    had no traffic."""
    for witness in (IncidentRecorder(tmp_path, ManualClock(101.0)), IncidentRecorder(tmp_path, ManualClock(130.0))):
        for _ in range(3):
            witness.decided([fell()])
    witness.decided([back()])
    witness.decided([back(since_s=170.0)])
    (incident,) = read_incidents(tmp_path)
    assert (incident.unix_s, incident.detected_unix_s, incident.isolated_unix_s) == (100.0, 100.0, 100.02)
    assert incident.back_after_s == 60.0
    assert headline(incident) == f"worker-1a lost its traffic: {WHY}"
    witness.decided([fell(since_unix_s=300.0, fall=2)])
    assert len(read_incidents(tmp_path)) == 2


def test_what_is_no_incident(tmp_path: Path) -> None:
    """A first check, half the traffic, a drain that was asked for, a spare, and a death, which the supervisor tells."""
    witness = IncidentRecorder(tmp_path, ManualClock(101.0))
    verdicts = [
        fell(cause="unchecked"),
        fell(cause="drain", status="DRAINING"),
        fell(cause="gone", status="DEAD"),
        fell(cause="lost", status="DEAD"),
        fell(cause="canary-failed", status="SUSPICIOUS", weight=0.5),
        fell(cause="", causes={}, status="HEALTHY", spare=True),
    ]
    witness.decided(verdicts)
    assert read_incidents(tmp_path) == []


def test_what_was_over_between_two_looks_is_an_incident_too(tmp_path: Path) -> None:
    """A pair that was quarantined, loaded again and is well within half a second: one incident, told once, and not
    again by the next supervisor; a fall that is no incident is not told."""
    brief = {"status": "HEALTHY", "weight": 1.0, "causes": {}, "since_unix_s": 100.6, "group": "worker-1"}
    brief |= {"fell_unix_s": 100.0, "fell_for": {"wrong-answer": WHY}, "quarantined": False, "reason": "sound"}
    pair = [fell(name, **brief) for name in ("worker-1a", "worker-1b")]
    witness = IncidentRecorder(tmp_path, ManualClock(101.0))
    witness.decided([fell("worker-2a", **brief | {"fell_for": {"gone": "it ended"}, "group": "worker-2"})])
    for each in (witness, witness, IncidentRecorder(tmp_path, ManualClock(102.0))):
        each.decided(pair)
    (incident,) = read_incidents(tmp_path)
    assert headline(incident) == f"worker-1a (and worker-1b) was quarantined: {WHY}"
    assert (incident.unix_s, incident.back_after_s) == (100.0, 0.6)


def test_engines_that_share_weights_are_quarantined_in_one_incident(tmp_path: Path) -> None:
    """The active and its standby have one verdict, and one line."""
    witness = IncidentRecorder(tmp_path, ManualClock(101.0))
    pair = [fell(name, "wrong-answer", quarantined=True, group="worker-1") for name in ("worker-1a", "worker-1b")]
    for _ in range(2):
        witness.decided(pair)
    (incident,) = read_incidents(tmp_path)
    assert headline(incident) == f"worker-1a (and worker-1b) was quarantined: {WHY}"


def test_a_quarantined_active_that_is_killed_is_one_incident_with_its_pair(tmp_path: Path) -> None:
    """Whatever is told meanwhile of its standby, which is quarantined still, of the process that comes after it, and by
    the next supervisor; until all of them have their traffic again. A standby that is killed is its own incident, and
    a later quarantine is the next one."""
    clock = ManualClock(102.0)
    witness = IncidentRecorder(tmp_path, clock)
    told = {"cause": "wrong-answer", "quarantined": True, "group": "worker-1"}
    standby = fell("worker-1b", **told)
    witness.decided([fell(**told), standby])
    slot = Slot.of(Job("worker-1a", "worker", group="worker-1"))
    witness.fell(slot, Fell(7, "SIGKILL", was_ready=True))
    witness.decided([fell(**told | {"cause": "gone", "status": "DEAD"}), standby])
    clock.now_s = 110.0
    witness.back(slot)
    witness.decided([standby])
    again = fell(**told, since_unix_s=110.5)
    witness.decided([again, standby])
    IncidentRecorder(tmp_path, clock).decided([standby])
    (incident,) = read_incidents(tmp_path)
    assert headline(incident) == f"worker-1a (and worker-1b) was quarantined: {WHY}; died: SIGKILL"
    assert (incident.unix_s, incident.process_ended_s, incident.pid) == (100.0, 102.0, 7)
    slot = Slot.of(Job("worker-1b", "worker", group="worker-1"))
    witness.fell(slot, Fell(8, "SIGKILL", was_ready=True))
    witness.back(slot)
    witness.decided([back(since_s=130.0), back("worker-1b", since_s=140.0)])
    witness.decided([fell(**told, since_unix_s=200.0), fell("worker-1b", **told | {"since_unix_s": 200.0})])
    first, _, later = read_incidents(tmp_path)
    assert (first.back_after_s, later.unix_s, later.also) == (30.0, 200.0, ("worker-1b",))


def test_a_failover_after_a_verdict_is_timed_from_its_end() -> None:
    """Not from the quarantine that came long before; and who led next is looked for from then on."""
    terms = [Term("worker-1a", 50_000, 7, 1, 0), Term("worker-1b", 400_100, 8, 3, 0)]
    incident = Incident(100.0, "worker-1a", "worker", 7, WHY, group="worker-1", epoch=50_000, verdict="wrong-answer")
    timeline = {"unix_s": 400.2, "lock_ms": 190.0, "from_pid": 7, "zero_monotonic_s": 9.0, "zero": "its end"}
    successor = Status("worker", "worker-1b", 8, "ready", "", 0, group="worker-1", failover=timeline)
    told = complete(replace(incident, ended_unix_s=400.0), [successor], terms)
    assert told.failover is not None
    assert (told.successor, told.failover["lock_ms"]) == ("worker-1b", 200.0)


def test_a_stopped_worker_that_is_then_killed_is_one_incident(tmp_path: Path) -> None:
    """Control found it first, the supervisor ended it: one cause. And where the supervisor was first, control adds
    nothing."""
    witness = IncidentRecorder(tmp_path, ManualClock(102.0))
    witness.decided([fell(cause="lost", reason="stopped")])
    slot = Slot.of(Job("worker-1a", "worker"))
    witness.fell(slot, Fell(7, "SIGKILL", was_ready=True))
    witness.decided([fell(cause="gone", status="DEAD")])
    witness.back(slot)
    (incident,) = read_incidents(tmp_path)
    assert (incident.verdict, incident.pid, incident.why) == ("lost", 7, "stopped; died: SIGKILL")
    assert incident.back_after_s == 2.0
    witness.fell(slot, Fell(8, "SIGKILL", was_ready=True))
    witness.decided([fell(cause="lost", since_unix_s=102.1, fall=2)])
    assert [one.verdict for one in read_incidents(tmp_path)] == ["lost", ""]


def test_streams_that_a_verdict_moved_are_told_with_what_was_replayed() -> None:
    """Of that fall; also those that frontends had moved before they heard of it; not what the worker failed and
    survived before."""
    incident = Incident(100.0, "w", "worker", 0, WHY, instance="abc", verdict="lost", fall=2)
    seam = {"instance": "abc", "epoch": 0, "lost": 0, "worst_gap_ms": 40.0, "streams": 3, "replayed": 90}
    seam |= {"recomputed": 7, "to": {"worker-2": 3}}
    seams = [
        seam | {"fall": 1, "survived": True},
        seam | {"fall": 1, "survived": False, "worst_gap_ms": 900.0},
        seam | {"fall": 2, "survived": True},
        seam | {"fall": 2, "instance": "other"},
    ]
    frontends = [Status("frontend", "f", 1, "ready", "", 0, seams=seams)]
    told = complete(incident, frontends, [])
    assert (told.streams, told.replayed, told.gap_ms) == (6, 180, 900.0)
    opened = complete(replace(incident, verdict="breaker-open"), frontends, [])
    assert opened.streams == 9  # those that failed one by one, on a worker that served on, opened it
    said = ["6 streams went on at worker-2, worst gap 900.0 ms", "180 tokens replayed", "14 tokens computed again"]
    assert cost(told) == said
