"""Whom a start waits for, and who may stop it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.ports import SystemClock
from holdfast.roles.planned import hopeless, is_refused, needed
from holdfast.spec.jobs import Job
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.machine import START_FAILURES_MAX, Life, Phase
from holdfast.supervise.processes import LocalProcesses


@pytest.mark.parametrize(("role", "stops"), [("worker", True), ("frontend", True), ("control", False)])
@pytest.mark.parametrize(
    "life",
    [
        Life(Phase.REFUSED, note="its lock cannot be"),
        Life(Phase.CRASH_LOOP, failures=START_FAILURES_MAX, note="exited with 1, its lock cannot be"),
    ],
)
async def test_a_control_that_cannot_start_stops_nobody(tmp_path: Path, role: str, life: Life, *, stops: bool) -> None:
    """Serving goes on without one, so a start that waits for a large model must not end for it."""
    made = Supervisor(
        tmp_path, [Job("one", role)], LocalProcesses(tmp_path), lambda *_: (), tell=lambda _: None, clock=SystemClock()
    )
    made.slots["one"].life = life
    assert hopeless(needed(made)) == ("one cannot be started: its lock cannot be" if stops else "")
    assert is_refused(made) == (stops and life.phase is Phase.REFUSED)
