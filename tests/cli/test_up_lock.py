"""One deployment, one supervisor, whatever is deleted under it and whenever `down` comes. Real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from typing import Any

import pytest

from holdfast.cli import down
from holdfast.supervise.lock import Holder, sign, take_lock
from tests.rigs.cli.up_rig import START_S, UpRig, until

pytestmark = [pytest.mark.alone, pytest.mark.processes]
SHAPE = ("--engine", "sim", "--standbys", "0")


def pids_of(rig: UpRig) -> dict[str, int]:
    return {name: found["pid"] for name, found in rig.ps().items()}


@pytest.mark.long
def test_what_is_deleted_under_a_deployment_is_put_back(rig: UpRig) -> None:
    """The lock, then the whole state directory: a second `up` is refused, `ps` shows everything, the stream goes on, a
    dead worker comes back, and `down` leaves nothing."""
    assert rig.up().returncode == 0
    supervisor, before = rig.lock()["pid"], pids_of(rig)
    answer = rig.answering(1000)
    for remove in (lambda: (rig.state_dir / "up.lock").unlink(), lambda: shutil.rmtree(rig.state_dir)):
        remove()
        done = rig.up()
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert f"already running (pid {supervisor})" in done.stderr
        until(lambda: rig.lock().get("pid") == supervisor and rig.record("frontend"), "the lock and records")
        assert f"supervised by pid {supervisor}" in rig.run("ps").stdout
    assert answer.answer().wrong == ""
    assert pids_of(rig) == before
    assert "up.lock was taken away, and put back" in (rig.state_dir / "logs" / "up.log").read_text()
    killed = rig.record("worker-1")["pid"]
    os.kill(killed, signal.SIGKILL)
    until(lambda: rig.back("worker-1", killed), "the worker to be back")
    shutil.rmtree(rig.state_dir)
    done = rig.run("down")
    assert (done.returncode, "everything has stopped" in done.stdout) == (0, True), done.stderr
    assert rig.pids() == set()


def start_for_ever(rig: UpRig) -> subprocess.Popen[str]:
    """`up --detach` that is never up: its store does not answer."""
    words = ("--port", str(rig.port), "--store", "etcd://127.0.0.1:1", *rig.pace, *rig.shape)
    command = rig.command("up", "--detach", *words)
    starting = subprocess.Popen(command, env=rig.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rig.started.append(starting)
    return starting


@pytest.mark.parametrize("moment", ["the lock", "the handover", "the first record"])
def test_down_during_up_leaves_nothing(rig: UpRig, moment: str) -> None:
    """Whenever it comes: nothing runs, nothing comes up later, and `up` does not say that it did."""
    starting = start_for_ever(rig)
    reached = {
        "the lock": lambda: rig.lock().get("pid"),
        "the handover": lambda: len(rig.pids()) > 1,
        "the first record": lambda: rig.record("worker-1"),
    }
    until(reached[moment], moment)
    assert down.run_down(rig.state_dir) == 0
    assert rig.pids() <= {starting.pid}, "it may have its last words to say"
    shown, said = starting.communicate(timeout=START_S)
    assert starting.returncode == -signal.SIGTERM or (starting.returncode == 1 and "before it was up" in said), said
    assert "is up" not in shown
    assert rig.pids() == set()
    assert rig.ps() == {}


def test_down_waits_for_an_heir_that_has_not_signed(rig: UpRig) -> None:
    """The lock names one who has ended, and whom nobody has reaped, while another still holds it: that one is waited
    for, and not taken for a new supervisor again and again."""
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        lock = take_lock(rig.state_dir)
        assert lock is not None
        sign(lock, Holder(ended.pid))
        heir = threading.Timer(1.0, os.close, (lock,))
        heir.start()
        assert down.run_down(rig.state_dir) == 0
        heir.join()


def test_two_downs_at_once_both_end_well(rig: UpRig) -> None:
    """With the supervisor dead and a worker stopped, every process ends: neither takes the other for a supervisor, or
    one that has gone for who stops the rest."""
    assert rig.up().returncode == 0
    rig.lose_supervisor()
    os.kill(rig.record("worker-1")["pid"], signal.SIGSTOP)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(rig.command("down"), env=rig.env, **pipes) for _ in range(2)]
    rig.started += both
    shown = ""
    for one in both:
        out, said = one.communicate(timeout=2 * START_S)
        assert (one.returncode, said) == (0, "")
        shown += out
    assert "worker-1 stopped" in shown
    assert rig.pids() == set()


def test_a_failed_start_says_why(rig: UpRig) -> None:
    """A supervisor that was killed is said to have been killed; what its log happens to end with is not its reason."""
    (rig.state_dir / "logs").mkdir()
    (rig.state_dir / "logs" / "up.log").write_text("an old line\n")
    starting = start_for_ever(rig)
    until(lambda: rig.lock().get("detached"), "the supervisor")
    os.kill(rig.lock()["pid"], signal.SIGKILL)
    _, said = starting.communicate(timeout=START_S)
    assert starting.returncode == 1
    assert "its supervisor ended before it was up: SIGKILL" in said
    assert "an old line" not in said


# -- answers finish for as long as `up` was told, whoever stops the processes

ANSWER_TOKENS = 1400  # at 5 ms each longer than anybody has to leave who was not told otherwise
PATIENT = ("--drain-s", "60")


def test_a_supervisor_that_waits_for_answers_does_not_hang(
    rig: UpRig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is killed only past the time that answers have to finish, on top of its own."""
    monkeypatch.setattr(down, "SUPERVISOR_S", 0.2)
    assert rig.up(*PATIENT).returncode == 0
    answer = rig.answering(400)
    assert down.run_down(rig.state_dir) == 0
    assert answer.answer().wrong == ""
    assert "did not stop" not in capsys.readouterr().out
    assert not rig.pids()


@pytest.mark.long
def test_answers_finish_also_where_the_supervisor_is_dead(rig: UpRig) -> None:
    """Whoever stops its processes in its place gives each the time that it would have had."""
    assert rig.up(*PATIENT).returncode == 0
    answer = rig.answering(ANSWER_TOKENS)
    rig.lose_supervisor()
    done = rig.run("down")
    assert done.returncode == 0, done.stderr
    assert answer.answer().wrong == ""
    rig.must_be_gone()
