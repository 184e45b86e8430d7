"""`holdfast up` in the foreground: it tells what happens, stops whole, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.rigs.cli.up_rig import PAIR, START_S, UpRig, until

pytestmark = [pytest.mark.alone, pytest.mark.processes]
SHAPE = PAIR
NAMES = ("store", "vault-1", "worker-1a", "worker-1b", "frontend", "control")


def test_ctrl_c_stops_all(rig: UpRig) -> None:
    """SIGINT in the middle of an answer: the answer is finished, then every process stops, with a line each and in
    order; `up` exits with 0 and leaves none behind. Deaths before were told."""
    up = rig.up_here()
    worker = rig.record("worker-1a")["pid"]
    os.kill(worker, signal.SIGKILL)
    until(lambda: "worker-1a is back as pid" in rig.screen(), "worker-1a to be back")
    answer = rig.answering(200)
    up.send_signal(signal.SIGINT)
    assert up.wait(START_S) == 0
    assert answer.answer().wrong == ""
    out = rig.screen()
    assert rig.pids() == set()
    assert "worker-1a died (SIGKILL); starting it again" in out
    for name in NAMES:
        assert f"{name} stopped (" in out
    order = [out.index(f"{name} stopped") for name in ("frontend", "worker-1a", "vault-1", "store")]
    assert order == sorted(order)
    assert "Ctrl-C stops it" in out
    assert "everything has stopped" in out


def test_nothing_outlives_a_killed_up(rig: UpRig) -> None:
    """SIGKILL of a foreground `up`: every process is gone, engines, vault and keeper too."""
    up = rig.up_here()
    until(lambda: len(rig.pids()) == 9, "all of them, control too")
    up.kill()
    up.wait(START_S)
    rig.must_be_gone()


def test_asking_twice_kills(rig: UpRig) -> None:
    """A second SIGINT does not wait for answers."""
    up = rig.up_here("--drain-s", "30")
    answer = rig.answering(5000)
    up.send_signal(signal.SIGINT)
    until(lambda: not rig.health() or rig.health().get("status") == "draining", "draining")
    up.send_signal(signal.SIGINT)
    up.wait(START_S)
    assert not answer.answer().done
    assert "killing everything" in rig.screen()
    assert rig.pids() == set()


@pytest.mark.parametrize("words", [(), pytest.param(("--detach",), marks=pytest.mark.long)], ids=["here", "detached"])
def test_what_cannot_start_says_why(rig: UpRig, words: tuple[str, ...]) -> None:
    """A worker that fails at once three times ends `up` with one line that has the cause, and leaves nothing."""
    (rig.state_dir / "run" / "worker-1a.sock").mkdir(parents=True)  # nobody can listen there
    done = rig.run("up", *rig.shape, "--port", str(rig.port), *words)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "worker-1a cannot be started: " in done.stderr
    assert "/run/worker-1a.sock" in done.stderr
    rig.must_be_gone()


def test_untied_everything_outlives_a_killed_up_and_tied_nothing(rig: UpRig) -> None:
    """SIGKILL of a foreground `up --untied` in mid-stream: the answer goes on. The next `up` adopts every process as it
    is, and SIGKILL of that one, which is not untied, takes them along."""
    up = rig.up_here("--untied")
    pids = rig.pids_of(*NAMES)
    answer = rig.answering(200)
    up.kill()
    up.wait(START_S)
    assert answer.answer().wrong == ""
    again = rig.up_here()
    assert rig.pids_of(*NAMES) == pids
    again.kill()
    again.wait(START_S)
    rig.must_be_gone()


def test_a_reader_that_leaves_takes_nothing_along(rig: UpRig) -> None:
    """`holdfast up | tee`, and tee ends: a death after that, which `up` can tell nobody of, is mended as ever."""
    reads, writes = os.pipe()
    up = subprocess.Popen(
        rig.command("up", "--port", str(rig.port), "--sim-tpot-ms", "5", *rig.shape),
        env=rig.env,
        stdin=subprocess.DEVNULL,
        stdout=writes,
        stderr=writes,
        start_new_session=True,
    )
    rig.started.append(up)
    os.close(writes)
    until(lambda: rig.health().get("status") == "ready", "everything to be up")
    before = rig.pids_of("worker-1a")["worker-1a"]
    os.close(reads)
    os.kill(before, signal.SIGKILL)
    until(lambda: rig.back("worker-1a", before), "worker-1a to be back")
    assert up.poll() is None
    assert rig.chat(5).wrong == ""
    up.send_signal(signal.SIGTERM)
    up.wait(START_S)
    assert rig.pids() == set()
