"""`holdfast up` in the foreground: it tells what happens, stops whole, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.rigs.cli.up_place import PAIR, START_S, Place, until

pytestmark = [pytest.mark.alone, pytest.mark.processes]
SHAPE = PAIR
NAMES = ("store", "vault-1", "worker-1a", "worker-1b", "frontend", "control")


def test_ctrl_c_stops_all(place: Place) -> None:
    """SIGINT in the middle of an answer: the answer is finished, then every process stops, with a line each and in
    order; `up` exits with 0 and leaves none behind. Deaths before were told."""
    up = place.up_here()
    worker = place.record("worker-1a")["pid"]
    os.kill(worker, signal.SIGKILL)
    until(lambda: "worker-1a is back as pid" in place.screen(), "worker-1a to be back")
    answer = place.answering(200)
    up.send_signal(signal.SIGINT)
    assert up.wait(START_S) == 0
    assert answer.answer().wrong == ""
    out = place.screen()
    assert place.pids() == set()
    assert "worker-1a died (SIGKILL); starting it again" in out
    for name in NAMES:
        assert f"{name} stopped (" in out
    order = [out.index(f"{name} stopped") for name in ("frontend", "worker-1a", "vault-1", "store")]
    assert order == sorted(order)
    assert "Ctrl-C stops it" in out
    assert "everything has stopped" in out


def test_nothing_outlives_a_killed_up(place: Place) -> None:
    """SIGKILL of a foreground `up`: every process is gone, engines, vault and keeper too."""
    up = place.up_here()
    until(lambda: len(place.pids()) == 9, "all of them, control too")
    up.kill()
    up.wait(START_S)
    place.must_be_gone()


def test_asking_twice_kills(place: Place) -> None:
    """A second SIGINT does not wait for answers."""
    up = place.up_here("--drain-s", "30")
    answer = place.answering(5000)
    up.send_signal(signal.SIGINT)
    until(lambda: not place.health() or place.health().get("status") == "draining", "draining")
    up.send_signal(signal.SIGINT)
    up.wait(START_S)
    assert not answer.answer().done
    assert "killing everything" in place.screen()
    assert place.pids() == set()


@pytest.mark.parametrize("words", [(), pytest.param(("--detach",), marks=pytest.mark.long)], ids=["here", "detached"])
def test_what_cannot_start_says_why(place: Place, words: tuple[str, ...]) -> None:
    """A worker that fails at once three times ends `up` with one line that has the cause, and leaves nothing."""
    (place.state_dir / "run" / "worker-1a.sock").mkdir(parents=True)  # nobody can listen there
    done = place.run("up", *place.shape, "--port", str(place.port), *words)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "worker-1a cannot be started: " in done.stderr
    assert "/run/worker-1a.sock" in done.stderr
    place.must_be_gone()


def test_untied_everything_outlives_a_killed_up_and_tied_nothing(place: Place) -> None:
    """SIGKILL of a foreground `up --untied` in mid-stream: the answer goes on. The next `up` adopts every process as it
    is, and SIGKILL of that one, which is not untied, takes them along."""
    up = place.up_here("--untied")
    pids = place.pids_of(*NAMES)
    answer = place.answering(200)
    up.kill()
    up.wait(START_S)
    assert answer.answer().wrong == ""
    again = place.up_here()
    assert place.pids_of(*NAMES) == pids
    again.kill()
    again.wait(START_S)
    place.must_be_gone()


def test_a_reader_that_leaves_takes_nothing_along(place: Place) -> None:
    """`holdfast up | tee`, and tee ends: a death after that, which `up` can tell nobody of, is mended as ever."""
    reads, writes = os.pipe()
    up = subprocess.Popen(
        place.command("up", "--port", str(place.port), "--sim-tpot-ms", "5", *place.shape),
        env=place.env,
        stdin=subprocess.DEVNULL,
        stdout=writes,
        stderr=writes,
        start_new_session=True,
    )
    place.started.append(up)
    os.close(writes)
    until(lambda: place.health().get("status") == "ready", "everything to be up")
    os.close(reads)
    before = place.record("worker-1a")["pid"]
    os.kill(before, signal.SIGKILL)
    until(lambda: place.back("worker-1a", before), "worker-1a to be back")
    assert up.poll() is None
    assert place.chat(5).wrong == ""
    up.send_signal(signal.SIGTERM)
    up.wait(START_S)
    assert place.pids() == set()
