"""A vault's processes under `holdfast up`: shown, looked after, and gone after `down`, whatever was done to them."""

from __future__ import annotations

import json
import os
import signal

import pytest
from up_rig import Place, until

pytestmark = [pytest.mark.alone, pytest.mark.processes]

ENGINES = ("worker-1a", "worker-1b")
PARTS = ("vault-1-server", "vault-1-keeper")
SHAPE = ("--engine", "sim", "--vault-gib", "0.0625")


def is_whole(place: Place) -> bool:
    """An active and a standby, neither in doubt about its memory."""
    found = place.ps()
    return {found[name]["state"] for name in ENGINES} == {"active", "standby"} and not any(
        found[name]["note"] for name in ENGINES
    )


def has_all_back(place: Place) -> bool:
    """By the vault's own word: engines may vouch for their memory for a moment after the last vault's end."""
    done = place.run("memory", "status", "--json", "--socket-dir", str(place.state_dir / "gms"))
    (vault,) = json.loads(done.stdout) or [{}]
    return vault.get("weights") == "RO" and str(vault.get("pool")).startswith("OWNED")


@pytest.mark.long
def test_stopped_parts_of_a_vault_are_replaced_and_down_leaves_none(place: Place) -> None:
    """The keeper, the vault and their launcher, one after the other; engines go on, and vouch for their memory again.
    Then `down` with a stopped keeper leaves no process behind."""
    assert place.up().returncode == 0
    until(lambda: is_whole(place), "an active and a standby")
    shown = place.ps()
    assert [shown[part]["role"] for part in PARTS] == ["server", "keeper"]
    epoch = max(shown[name]["epoch"] or 0 for name in ENGINES)
    for name in (*reversed(PARTS), "vault-1"):
        pid = place.record(name)["pid"]
        os.kill(pid, signal.SIGSTOP)
        until(lambda name=name, pid=pid: place.back(name, pid), f"{name} to be replaced")  # type: ignore[misc]
        until(lambda: is_whole(place), f"an active and a standby after {name}")
        assert place.chat().wrong == ""
    assert max(place.ps()[name]["epoch"] or 0 for name in ENGINES) == epoch, "no engine had to be replaced"
    os.kill(place.record("vault-1-keeper")["pid"], signal.SIGSTOP)
    assert place.run("down").returncode == 0
    until(lambda: not place.pids(), "every process to be gone", 5.0)


@pytest.mark.long
def test_killed_launcher_costs_nothing_but_a_new_one(place: Place) -> None:
    """Engines give weights and pool back to the next vault: none is replaced, and the next takeover adopts the pool."""
    assert place.up().returncode == 0
    until(lambda: is_whole(place), "an active and a standby")
    before = {name: place.record(name)["pid"] for name in ENGINES}
    launcher = place.record("vault-1")["pid"]
    os.kill(launcher, signal.SIGKILL)
    until(lambda: place.back("vault-1", launcher), "another launcher")
    until(lambda: has_all_back(place), "weights and pool in the new vault")
    until(lambda: is_whole(place), "an active and a standby that vouch for their memory")
    assert {name: place.record(name)["pid"] for name in ENGINES} == before
    active = next(name for name in ENGINES if place.ps()[name]["state"] == "active")
    os.kill(before[active], signal.SIGKILL)
    until(lambda: place.back(active, before[active]), "another engine")
    until(lambda: is_whole(place), "an active and a standby again")
    logs = "".join((place.state_dir / "logs" / f"{name}.log").read_text() for name in ENGINES)
    assert "whole blocks of KV" in logs
    assert (place.state_dir / "logs" / "vault-1.log").read_text().count("writes generation") == 1
    assert place.run("down").returncode == 0


@pytest.mark.long
def test_down_ends_a_stopped_keeper_whose_launcher_and_supervisor_were_killed(place: Place) -> None:
    """Nobody is left to look after it; its record tells who it is."""
    assert place.up().returncode == 0
    keeper = place.record("vault-1-keeper")["pid"]
    os.kill(keeper, signal.SIGSTOP)
    os.kill(place.lock()["pid"], signal.SIGKILL)
    os.kill(place.record("vault-1")["pid"], signal.SIGKILL)
    assert place.run("down").returncode == 0
    until(lambda: not place.pids(), "every process to be gone", 5.0)
