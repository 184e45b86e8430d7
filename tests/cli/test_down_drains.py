"""`holdfast down` lets answers finish for as long as `up` was told (`--drain-s`), whoever stops the processes."""

from __future__ import annotations

import os
import signal

import pytest
from up_rig import Place, until

from holdfast.cli import down

ANSWER_TOKENS = 1400  # at 5 ms each longer than anybody has to leave who was not told otherwise
SHAPE = ("--engine", "sim", "--standbys", "0", "--drain-s", "60", "--status-port", "0")


@pytest.mark.processes
def test_a_supervisor_that_waits_for_answers_does_not_hang(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is killed only past the time that answers have to finish, on top of its own."""
    monkeypatch.setattr(down, "SUPERVISOR_S", 0.2)
    assert place.up().returncode == 0
    answer = place.answering(400)
    assert down.run_down(place.state_dir) == 0
    assert answer.answer().wrong == ""
    assert "did not stop" not in capsys.readouterr().out
    assert not place.pids()


@pytest.mark.long
@pytest.mark.processes
def test_answers_finish_also_where_the_supervisor_is_dead(place: Place) -> None:
    """Whoever stops its processes in its place gives each the time that it would have had."""
    assert place.up().returncode == 0
    answer = place.answering(ANSWER_TOKENS)
    os.kill(place.lock()["pid"], signal.SIGKILL)
    done = place.run("down")
    assert done.returncode == 0, done.stderr
    assert answer.answer().wrong == ""
    until(lambda: not place.pids(), "every process to be gone", 10.0)
