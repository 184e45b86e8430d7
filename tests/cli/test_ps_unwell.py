"""`holdfast status` and `holdfast get incidents` when those who look after others are stopped, dead or ended alone."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.status import SILENT_S, supervisor_trouble
from holdfast.supervise.incidents import read_incidents
from holdfast.supervise.lock import Holder, beat, lock_path, sign, take_lock
from holdfast.testing.processes import freeze
from tests.rigs.cli.up_rig import PAIR, UpRig, until

# -- the supervisor's line, without one

SHAPE = PAIR


def test_a_supervisor_that_looks_has_no_line(tmp_path: Path) -> None:
    """Nor has one that never was; who is silent, and who is gone, is told since when, with the mend."""
    assert supervisor_trouble(tmp_path, time.time()) is None
    lock = take_lock(tmp_path)
    assert lock is not None
    sign(lock, Holder(os.getpid(), detached=True, up=True))
    os.utime(lock_path(tmp_path), (1000.0, 1000.0))
    silent = supervisor_trouble(tmp_path, 1000.0 + SILENT_S + 1)
    assert silent is not None
    assert (silent.state, silent.pid, silent.entered_unix_s) == ("silent", os.getpid(), 1000.0)
    assert f"`kill -9 {os.getpid()}` and `holdfast up`" in silent.note
    beat(tmp_path)
    assert supervisor_trouble(tmp_path, time.time()) is None
    os.utime(lock_path(tmp_path), (1000.0, 1000.0))
    os.close(lock)
    dead = supervisor_trouble(tmp_path, time.time())
    assert dead is not None
    assert (dead.state, dead.pid, dead.entered_unix_s) == ("dead", 0, 1000.0)
    assert "until `holdfast up` adopts these processes" in dead.note


def test_one_that_prepares_is_not_called_silent(tmp_path: Path) -> None:
    """Before it is up it may look at a model for minutes."""
    lock = take_lock(tmp_path)
    assert lock is not None
    sign(lock, Holder(os.getpid()))
    assert supervisor_trouble(tmp_path, time.time() + 600) is None
    os.close(lock)


# -- a deployment


def told(rig: UpRig, name: str, pid: int) -> dict[str, Any]:
    """The one incident of that process, once another is back in its place."""

    def is_written() -> bool:
        written = read_incidents(rig.state_dir)
        return any((i.name, i.pid) == (name, pid) and i.back_after_s is not None for i in written)

    until(is_written, f"the incident of {name}")
    incidents: list[dict[str, Any]] = json.loads(rig.run("incidents", "--json").stdout)
    (one,) = [incident for incident in incidents if (incident["name"], incident["pid"]) == (name, pid)]
    return one


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(300)
def test_whoever_is_unwell_is_told(rig: UpRig) -> None:
    """A keeper and a vault that end alone are incidents; so is an active that died while the supervisor was stopped,
    as the active, at the time it died; until then `ps` says that the supervisor is stopped, and calls no death a
    handover. Where active and standby die together the timeline begins with that, not with the next engine's start.
    Whoever is asked to leave is no incident."""
    assert rig.up().returncode == 0
    rig.until_whole()
    for name in ("vault-1-keeper", "vault-1-server"):
        pid = rig.record(name)["pid"]
        os.kill(pid, signal.SIGKILL)
        assert told(rig, name, pid)["role"] == name.removeprefix("vault-1-")

    supervisor = rig.lock()["pid"]
    freeze(supervisor)
    try:
        unwell = rig.ps()["supervisor"]
        assert (unwell["state"], unwell["pid"]) == ("stopped", supervisor)
        assert f"`kill -CONT {supervisor}`" in unwell["note"]
        active = rig.until_whole()["active"]
        os.kill(active["pid"], signal.SIGKILL)
        died_s = time.time()
        until(lambda: rig.by_state().get("active", active)["pid"] != active["pid"], "the standby to lead")
        assert "handed over" not in rig.run("ps").stdout
        assert "it is stopped" in rig.run("incidents").stdout
        # Longer than any supervisor that runs takes to see an end.
        until(lambda: time.time() > died_s + 6.0, "a while")
    finally:
        os.kill(supervisor, signal.SIGCONT)
    incident = told(rig, active["name"], active["pid"])
    assert (incident["part"], incident["why"]) == ("active", "SIGKILL")
    assert incident["successor"] not in ("", active["name"])
    assert incident["unix_s"] < died_s + 5.0 < incident["unix_s"] + incident["back_after_s"]

    both = rig.until_whole()
    assert "supervisor" not in rig.ps()
    died_s = time.time()
    for state in ("active", "standby"):
        os.kill(both[state]["pid"], signal.SIGKILL)
    told(rig, both["active"]["name"], both["active"]["pid"])
    rig.until_whole()
    incident = told(rig, both["active"]["name"], both["active"]["pid"])
    timed = incident["failover"]
    assert timed["zero"] == "its end, as seen by the supervisor"
    zero_s = timed["unix_s"] - timed["lock_ms"] / 1000
    assert died_s <= zero_s <= incident["unix_s"] + 0.1, "it began with the end"
    assert "eof_ms" not in timed, "nobody was there to see it"

    before = rig.run("incidents", "--json").stdout
    assert rig.run("down").returncode == 0
    assert [i["pid"] for i in json.loads(rig.run("incidents", "--json").stdout)] == [
        i["pid"] for i in json.loads(before)
    ]
