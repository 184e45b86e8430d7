"""What is kept of a worker's errors, and who shows it."""

from __future__ import annotations

from holdfast.control import health_controller as hc
from holdfast.control.status_page import ControlView, page
from holdfast.health import breaker as b
from holdfast.health import standing as s
from holdfast.health.device_faults import fault_of
from holdfast.health.history import ACCUSED, ERRORS_MAX, FAILED_REQUEST, REASON_CHARS_MAX, History, with_error
from holdfast.supervise.status import Status
from holdfast.supervise.verdicts import with_verdicts
from tests.rigs.worlds.health import HealthRig


def kinds(history: History) -> list[str]:
    return [error.kind for error in history]


def test_a_history_is_bounded_and_counts_what_repeats() -> None:
    """The oldest go first; the same error again is counted where it is, with its last time."""
    history: History = ()
    for number in range(3 * ERRORS_MAX):
        for again in range(3):
            history = with_error(history, "lost", f"silent {number} " + "x" * 1000, number + again / 10)
    assert len(history) == ERRORS_MAX
    last = history[-1]
    assert (last.count, last.at_unix_s) == (3, 3 * ERRORS_MAX - 1 + 0.2)
    assert all(len(error.reason) == REASON_CHARS_MAX for error in history)


def test_a_workers_errors_are_written_down_with_time_and_reason() -> None:
    """Failed requests, a failed canary, a breaker, a device, a wrong answer: in their order, whatever it is then; and
    another control goes on from them."""
    made = HealthRig({"a": "a", "b": "b", "c": "c"})
    made.workers["a"].device = "boot/0000:3b:00"
    made.begin()
    made.wait(40.0)
    assert made.record("a").errors == ()
    for _ in range(3):
        made.tell(hc.AttemptsReported("a", b.Attempts(failed={b.FailureKind.ENGINE_ERROR: 1})))
        made.wait(1.0)
    made.tell(hc.DeviceRead("boot/0000:3b:00", s.DeviceReport(fault_of("0000:3b:00", 64), made.now)))
    made.workers["a"].shift = 1
    made.tell(hc.CheckNeeded("a", "a story"))
    made.wait(20.0)
    errors = made.record("a").errors
    assert kinds(errors) == [FAILED_REQUEST, "breaker-open", "device-sick", ACCUSED, "wrong-answer"]
    assert (errors[0].count, errors[0].reason) == (3, "engine error")
    assert "Xid 64" in errors[2].reason
    assert [error.at_unix_s for error in errors] == sorted(error.at_unix_s for error in errors)
    assert made.record("b").errors == ()
    made.restart()
    made.wait(1.0)
    assert made.record("a").errors[: len(errors)] == errors


def test_a_process_that_replaces_a_dead_one_has_its_errors() -> None:
    """By name and model: a worker that crashes again and again shows it."""
    made = HealthRig({"a": "a", "b": "b"})
    made.begin()
    made.wait(1.0)
    made.tell(hc.WorkerLost("a", "killed by signal 9"))
    facts = made.facts("a")
    made.workers["a2"] = made.workers["a"]
    made.tell(hc.WorkerFound("a2", facts))
    made.wait(1.0)
    assert [(error.kind, error.reason) for error in made.record("a2").errors] == [("gone", "killed by signal 9")]


def test_controls_page_and_ps_show_them() -> None:
    """As they are written down."""
    made = HealthRig({"a": "a", "b": "b"})
    made.begin()
    made.wait(1.0)
    made.workers["a"].how = "silent"
    made.tell(hc.CheckNeeded("a", "a story"))
    made.wait(160.0)
    shown = page(ControlView(name="control", leads=True, records={name: made.record(name) for name in made.workers}))
    (verdict,) = [one for one in shown.verdicts if one.name == "a"]
    assert kinds(tuple(verdict.errors))[:2] == ["canary-failed", "canary-failing"]
    assert verdict.errors[0].count > 1
    (status,) = with_verdicts([Status("worker", "a", 1, "ready", "", 0)], shown.verdicts)
    assert status.errors == verdict.errors
