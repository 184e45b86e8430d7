"""A pair of sim engines: a vault, an active engine, its standby. Real processes, real kills."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.testing.rig import fetch
from tests.rigs.cli.up_rig import PAIR, UpRig, until

pytestmark = [pytest.mark.alone, pytest.mark.processes]

ENGINES = ("worker-1a", "worker-1b")
PARTS = ("vault-1-keeper", "vault-1-server")
TOKEN = "open-sesame-7"
SHAPE = PAIR


@pytest.fixture(scope="module")
def pair() -> Iterator[UpRig]:
    """One deployment for the tests that leave a pair; `down` leaves nothing of it."""
    made = UpRig(*PAIR)
    made.env["HOLDFAST_ENGINE_TOKEN"] = TOKEN
    try:
        done = made.up()
        assert done.returncode == 0, done.stderr
        made.first_screen = done.stdout  # type: ignore[attr-defined]
        yield made
        assert made.run("down").returncode == 0
        made.must_be_gone()
    finally:
        made.close()


def pulled_with(token: str, page: str) -> str:
    """What is said to whoever has only that token."""
    status, said = fetch(page, "/engine/sleep", "POST", authorization=f"Bearer {token}")
    assert status == 403
    return said.decode()


def until_shown(rig: UpRig, *words: str) -> str:
    """What `ps` shows once it has these words: a process on a busy machine may miss the second that a look waits."""
    shown = ""

    def has_all() -> bool:
        nonlocal shown
        shown = rig.run("ps").stdout
        return all(word in shown for word in words)

    until(has_all, f"{words} in `ps`")
    return shown


def test_the_default_is_a_pair(pair: UpRig) -> None:
    """Store, vault, two engines of which one is active, frontend; the screen says whom to kill."""
    rig, screen = pair, pair.first_screen  # type: ignore[attr-defined]
    expected = ["store", "vault-1", *PARTS, *ENGINES, "frontend", "control"]
    until(lambda: list(rig.ps()) == expected, f"{expected}: `up` does not wait for control")
    until(lambda: rig.ps()["vault-1"]["state"] == "ready", "the vault's word")
    engines = rig.until_whole()
    active = engines["active"]
    assert f"kill -9 {active['pid']}\n" in screen
    assert "Kill the active engine while it answers; its standby goes on" in screen
    assert active["epoch"] > 0
    assert {engine["group"] for engine in engines.values()} == {"worker-1"}
    assert sorted(engine["engine_id"] for engine in engines.values()) == [0, 1]
    stands_by = f"{engines['standby']['name']} stands by"
    shown = until_shown(rig, f"worker-1: {active['name']} is active (epoch {active['epoch']}); ", stands_by)
    assert "last failover" not in shown
    assert rig.chat().wrong == ""


def test_an_operators_token_is_the_engines_and_shown_to_nobody(pair: UpRig) -> None:
    """The active asks for it; neither a command line nor a log has it."""
    said = pulled_with("a guess", pair.record(pair.until_whole()["active"]["name"])["status"])
    assert "send `Authorization: Bearer` with its HOLDFAST_ENGINE_TOKEN" in said
    for path in [*pair.state_dir.glob("logs/*"), *(Path(f"/proc/{pid}/cmdline") for pid in pair.pids())]:
        assert TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_standby_goes_on_and_a_new_one_stands_by(pair: UpRig, number: signal.Signals) -> None:
    """The active dies, or is stopped and killed for it: the answer is finished by the other, nobody helps, and `ps`
    shows the failover with its timeline up to the new standby."""
    rig = pair
    before = rig.until_whole()
    answer = rig.answering(600)  # three seconds and more: it runs still when the signal comes
    os.kill(before["active"]["pid"], number)
    after = rig.until_whole(before["standby"]["name"])
    assert answer.answer().wrong == ""
    assert after["active"]["epoch"] > before["active"]["epoch"]
    assert after["standby"]["pid"] != before["active"]["pid"]
    failover = after["active"]["failover"]
    assert {"died_ms", "lock_ms", "fence_ms", "adopted_ms", "announced_ms", "new_standby_ms"} <= set(failover)
    leader = after["active"]["name"]
    shown = until_shown(rig, f"{leader} took over; 1 stream went on at {leader}, worst gap ", "new standby ")
    why = "SIGKILL" if number is signal.SIGKILL else "killed: it is stopped"
    # On a busy machine control may take its traffic before the supervisor kills it: one incident, both told.
    name = re.escape(before["active"]["name"])
    assert re.search(rf": {name} (\(active\)|lost its traffic: [^\n]*;) died: {why}", shown), shown


# -- a vault's processes: shown, looked after, and gone after `down`, whatever was done to them


def has_all_back(rig: UpRig) -> bool:
    """By the vault's own word: engines may vouch for their memory for a moment after the last vault's end."""
    done = rig.run("memory", "status", "--json", "--socket-dir", str(rig.state_dir / "gms"))
    (vault,) = json.loads(done.stdout) or [{}]
    return vault.get("weights") == "RO" and str(vault.get("pool")).startswith("OWNED")


@pytest.mark.long
def test_stopped_parts_of_a_vault_are_replaced_and_down_leaves_none(rig: UpRig) -> None:
    """The keeper, the vault and their launcher, one after the other; engines go on, and vouch for their memory again.
    Then `down` with a stopped keeper leaves no process behind."""
    assert rig.up().returncode == 0
    rig.until_whole()
    shown = rig.ps()
    assert [shown[part]["role"] for part in PARTS] == ["keeper", "server"]
    epoch = max(shown[name]["epoch"] or 0 for name in ENGINES)
    for name in (*PARTS, "vault-1"):
        pid = rig.record(name)["pid"]
        os.kill(pid, signal.SIGSTOP)
        until(lambda name=name, pid=pid: rig.back(name, pid), f"{name} to be replaced")  # type: ignore[misc]
        # One that is still ending would let the next that is stopped run on: they are of one process group.
        until(lambda pid=pid: pid not in rig.pids(), f"{name} to have ended")  # type: ignore[misc]
        rig.until_whole()
        assert rig.chat().wrong == ""
    assert max(rig.ps()[name]["epoch"] or 0 for name in ENGINES) == epoch, "no engine had to be replaced"
    os.kill(rig.record("vault-1-keeper")["pid"], signal.SIGSTOP)
    assert rig.run("down").returncode == 0
    rig.must_be_gone()


@pytest.mark.long
def test_killed_launcher_costs_nothing_but_a_new_one(rig: UpRig) -> None:
    """Engines give weights and pool back to the next vault: none is replaced, and the next takeover adopts the pool."""
    assert rig.up().returncode == 0
    rig.until_whole()
    before = rig.pids_of(*ENGINES)
    launcher = rig.record("vault-1")["pid"]
    os.kill(launcher, signal.SIGKILL)
    until(lambda: rig.back("vault-1", launcher), "another launcher")
    until(lambda: has_all_back(rig), "weights and pool in the new vault")
    rig.until_whole()
    assert rig.pids_of(*ENGINES) == before
    active = next(name for name in ENGINES if rig.ps()[name]["state"] == "active")
    os.kill(before[active], signal.SIGKILL)
    until(lambda: rig.back(active, before[active]), "another engine")
    rig.until_whole()
    logs = "".join((rig.state_dir / "logs" / f"{name}.log").read_text() for name in ENGINES)
    assert "whole blocks of KV" in logs
    assert (rig.state_dir / "logs" / "vault-1.log").read_text().count("writes generation") == 1
    assert rig.run("down").returncode == 0


@pytest.mark.long
def test_down_ends_a_stopped_keeper_whose_launcher_and_supervisor_were_killed(rig: UpRig) -> None:
    """Nobody is left to look after it; its record tells who it is."""
    assert rig.up().returncode == 0
    keeper = rig.record("vault-1-keeper")["pid"]
    os.kill(keeper, signal.SIGSTOP)
    os.kill(rig.lock()["pid"], signal.SIGKILL)
    os.kill(rig.record("vault-1")["pid"], signal.SIGKILL)
    assert rig.run("down").returncode == 0
    rig.must_be_gone()
