"""`holdfast up --detach` with real processes: it serves, heals, outlives its supervisor, and is stopped whole."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.supervise.records import read_kept
from holdfast.testing.clients import Stream, chat_body
from holdfast.testing.deployment import Deployment
from holdfast.testing.processes import freeze
from tests.rigs.cli.in_process import said_here
from tests.rigs.cli.up_rig import Asker, UpRig, until

pytestmark = [pytest.mark.alone, pytest.mark.processes]
KEY = "first-secret-key"


@pytest.fixture(scope="module")
def shared() -> Iterator[UpRig]:
    """One deployment for the tests that leave it serving."""
    rig = UpRig()
    keys = rig.folder / "keys"
    keys.write_text("sesame-1\n\nsesame-2\n")
    done = rig.up("--api-key-file", str(keys))
    assert done.returncode == 0, done.stderr
    rig.first_screen = done.stdout  # type: ignore[attr-defined]
    yield rig
    rig.close()


def test_the_screen_says_how_to_talk_and_what_to_kill(shared: UpRig) -> None:
    """The screen ends with a curl for this port and model, and a kill -9 of a real worker; it says what to expect of
    the model, and what is written to a pipe has no key in it."""
    screen = shared.first_screen  # type: ignore[attr-defined]
    assert f"curl -N http://127.0.0.1:{shared.port}/v1/chat/completions" in screen
    assert '"model":"holdfast-sim"' in screen
    assert "Authorization: Bearer YOUR_KEY" in screen
    assert "sesame" not in screen
    assert "This is a simulator: its text is random words." in screen
    assert "No API key is needed" not in screen
    assert any(f"kill -9 {shared.record(name)['pid']}" in screen for name in ("worker-1", "worker-2"))
    assert "\x1b" not in screen, "no terminal, no colours"


def test_keys_are_secret(shared: UpRig) -> None:
    """No API key shows in a command line, and what is on disk is its owner's alone."""
    for pid in shared.pids():
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            assert b"sesame" not in command.read()
    assert stat.S_IMODE((shared.state_dir / "run" / "frontend.launch").stat().st_mode) == 0o600
    assert stat.S_IMODE((shared.state_dir / "run").stat().st_mode) == 0o700


def test_ps_json_is_a_list_of_processes(shared: UpRig) -> None:
    """Each process has its role, name, pid, state, address and streams; the store comes first."""
    processes: dict[str, dict[str, Any]] = {}

    def all_are_ready() -> bool:
        """Control too, which `up` does not wait for; and a busy one may miss the second that a look waits."""
        done = shared.run("ps", "--json")
        assert done.returncode == 0, done.stderr
        processes.clear()
        processes.update((process["name"], process) for process in json.loads(done.stdout))
        return "control" in processes and {process["state"] for process in processes.values()} == {"ready"}

    until(all_are_ready, "all to be ready")
    assert [p["role"] for p in processes.values()] == ["store", "worker", "worker", "frontend", "control"]
    for name, process in processes.items():
        assert {"role", "name", "pid", "state", "address", "streams"} <= set(process)
        assert process["streams"] == 0, name
        os.kill(process["pid"], 0)
    assert processes["frontend"]["address"] == f"tcp://127.0.0.1:{shared.port}"


def test_a_stopped_process_shows_as_stopped(shared: UpRig) -> None:
    """SIGSTOP is seen within a second's asking, and the others are still asked."""
    pid = shared.record("store")["pid"]
    supervisor = shared.lock()["pid"]  # stopped too, or it would replace the other one
    for stopped in (supervisor, pid):
        freeze(stopped)
    try:
        assert shared.ps()["store"]["state"] == "stopped"
        until(lambda: shared.ps()["worker-1"]["state"] == "ready", "a word of another, however busy the machine")
        assert "stopped" in shared.run("ps").stdout
    finally:
        for stopped in (pid, supervisor):
            os.kill(stopped, signal.SIGCONT)


def test_a_second_up_says_so(shared: UpRig) -> None:
    """A second `up` on the same place is refused in one line that names the first and the mend."""
    for words in ((), ("--detach",)):
        done = shared.say("up", "--engine", "sim", *words)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert f"already running (pid {shared.lock()['pid']})" in done.stderr
        assert "holdfast down" in done.stderr


def test_a_busy_port_is_refused_before_anything_starts(shared: UpRig, rig: UpRig) -> None:
    """Another deployment on a port in use gets one line with the port and the mend, and starts nothing."""
    done = rig.say("up", "--port", str(shared.port), *rig.shape)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"port {shared.port} " in done.stderr
    assert "--port" in done.stderr
    assert rig.pids() == set()


def test_chaos_needs_leave(shared: UpRig) -> None:
    """A worker without --allow-chaos cannot be broken, and a worker that isn't there is named."""
    done = shared.say("chaos", "worker-1", "wedge")
    assert done.returncode == 1
    assert "--allow-chaos" in done.stderr
    done = shared.say("chaos", "worker-7", "wedge")
    assert "worker-1, worker-2" in done.stderr


def test_faults_are_sent(deployment: Deployment) -> None:
    """With --allow-chaos a fault reaches the worker; a wrong one is refused by name."""
    pid = deployment.record("worker-0")["pid"]
    environ = {"HOLDFAST_STATE_DIR": str(deployment.folder)}
    try:
        done = said_here(("chaos", "worker-0", "slow", "--factor", "1.5"), environ)
        assert (done.returncode, done.stdout) == (0, f"worker-0 (pid {pid}): slow 1.5\n")
    finally:
        assert said_here(("chaos", "worker-0", "clear"), environ).returncode == 0
    done = said_here(("chaos", "worker-0", "sing"), environ)
    assert (done.returncode, "crash, stop, wedge" in done.stderr) == (1, True)


def answered(rig: UpRig) -> bool:
    """Ask with the key; return whether the answer came to a good end."""
    body = chat_body("hello", 20, model=rig.model)
    return Stream(rig.port, body, authorization=f"Bearer {KEY}").answer().wrong == ""


def test_it_serves_heals_outlives_its_supervisor_and_goes(rig: UpRig) -> None:
    """Serve; a killed worker or frontend is back; a killed supervisor harms no process; the next one adopts them, and
    the API keys with them, though its shell has none; `down` ends all, and leaves nothing to adopt."""
    rig.env["HOLDFAST_API_KEYS"] = KEY
    assert rig.up().returncode == 0
    del rig.env["HOLDFAST_API_KEYS"]
    assert answered(rig)
    for name, pid in rig.pids_of("worker-1", "frontend").items():
        os.kill(pid, signal.SIGKILL)
        until(lambda name=name, pid=pid: rig.back(name, pid), f"{name} to be back")  # type: ignore[misc]
    until(lambda: rig.health().get("status") == "ready", "the frontend to have a worker")

    names = ("store", "worker-1", "worker-2", "frontend", "control")
    pids = rig.pids_of(*names)
    rig.lose_supervisor()
    assert set(pids.values()) <= rig.pids()
    assert answered(rig)
    assert "no supervisor" in rig.run("ps").stdout

    with Asker(rig) as without_key:
        again = rig.up()
    assert again.returncode == 0, again.stderr
    assert "The API keys of the last `holdfast up` here still apply" in again.stdout
    assert without_key.statuses <= {0, 401}
    assert answered(rig)
    assert rig.pids_of(*names) == pids
    adopted = rig.record("worker-2")["pid"]
    os.kill(adopted, signal.SIGKILL)
    until(lambda: rig.back("worker-2", adopted), "an adopted worker to be restarted")

    done = rig.run("down")
    assert done.returncode == 0
    assert all(f"{name} stopped" in done.stdout for name in names)
    assert rig.pids() == set()
    assert rig.ps() == {}
    assert read_kept(rig.state_dir) == [], "the next `up` is a new one, without these keys"
    again = rig.run("down")
    assert again.returncode == 0
    assert "nothing runs" in again.stdout
