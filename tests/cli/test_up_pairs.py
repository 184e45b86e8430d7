"""A pair of sim engines: a vault, an active engine, its standby. Real processes, real kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from up_rig import Place, until

from holdfast.testing.place import fetch

pytestmark = [pytest.mark.alone, pytest.mark.processes]

ENGINES = ("worker-1a", "worker-1b")
VAULT = ("vault-1", "vault-1-keeper", "vault-1-server")
SMALL = ("--vault-gib", "0.0625")
TOKEN = "open-sesame-7"
SHAPE = ("--engine", "sim", *SMALL)


@pytest.fixture(scope="module")
def pair() -> Iterator[Place]:
    """One deployment for the tests that leave a pair; `down` leaves nothing of it."""
    made = Place("--engine", "sim", *SMALL)
    made.env["HOLDFAST_ENGINE_TOKEN"] = TOKEN
    try:
        done = made.up()
        assert done.returncode == 0, done.stderr
        made.first_screen = done.stdout  # type: ignore[attr-defined]
        yield made
        assert made.run("down").returncode == 0
        until(lambda: not made.pids(), "every process to be gone", 5.0)
    finally:
        made.close()


def by_state(place: Place) -> dict[str, dict[str, Any]]:
    """The two engines by what they are now."""
    return {process["state"]: process for name, process in place.ps().items() if name in ENGINES}


def pulled_with(token: str, page: str) -> str:
    """What is said to whoever has only that token."""
    status, said = fetch(page, "/engine/sleep", "POST", authorization=f"Bearer {token}")
    assert status == 403
    return said.decode()


def is_whole(place: Place) -> bool:
    return set(by_state(place)) == {"active", "standby"}


def test_the_default_is_a_pair(pair: Place) -> None:
    """Store, vault, two engines of which one is active, frontend; the screen says whom to kill."""
    place, screen = pair, pair.first_screen  # type: ignore[attr-defined]
    processes = place.ps()
    assert list(processes) == ["store", *VAULT, "worker-1a", "worker-1b", "frontend"]
    assert processes["vault-1"]["state"] == "ready"
    until(lambda: is_whole(place), "an active and a standby")
    engines = by_state(place)
    active = engines["active"]
    assert f"kill -9 {active['pid']}\n" in screen
    assert "Kill the active engine while it answers; its standby goes on" in screen
    assert active["epoch"] > 0
    assert {engine["group"] for engine in engines.values()} == {"worker-1"}
    assert sorted(engine["engine_id"] for engine in engines.values()) == [0, 1]
    shown = place.run("ps").stdout
    assert f"worker-1: {active['name']} is active (epoch {active['epoch']}); " in shown
    assert f"{engines['standby']['name']} stands by" in shown
    assert "last failover" not in shown
    assert place.chat().wrong == ""


def test_an_operators_token_is_the_engines_and_shown_to_nobody(pair: Place) -> None:
    """The active asks for it; neither a command line nor a log has it."""
    until(lambda: is_whole(pair), "an active and a standby")
    said = pulled_with("a guess", pair.record(by_state(pair)["active"]["name"])["status"])
    assert "send `Authorization: Bearer` with its HOLDFAST_ENGINE_TOKEN" in said
    for path in [*pair.state_dir.glob("logs/*"), *(Path(f"/proc/{pid}/cmdline") for pid in pair.pids())]:
        assert TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_standby_goes_on_and_a_new_one_stands_by(pair: Place, number: signal.Signals) -> None:
    """The active dies, or is stopped and killed for it: the answer is finished by the other, nobody helps, and `ps`
    shows the failover with its timeline up to the new standby."""
    place = pair
    until(lambda: is_whole(place), "an active and a standby")
    before = by_state(place)
    answer = place.answering(200)
    os.kill(before["active"]["pid"], number)
    until(
        lambda: is_whole(place) and by_state(place)["active"]["name"] == before["standby"]["name"],
        "the roles to have changed",
    )
    assert answer.answer().wrong == ""
    after = by_state(place)
    assert after["active"]["epoch"] > before["active"]["epoch"]
    assert after["standby"]["pid"] != before["active"]["pid"]
    failover = after["active"]["failover"]
    assert {"died_ms", "lock_ms", "fence_ms", "adopted_ms", "announced_ms", "new_standby_ms"} <= set(failover)
    shown = place.run("ps").stdout
    why = "SIGKILL" if number is signal.SIGKILL else "killed: it is stopped"
    assert f"{before['active']['name']} (active) died: {why}" in shown
    assert f"{after['active']['name']} took over; 1 stream went on, worst gap " in shown
    assert "new standby " in shown


def test_a_foreground_pair_stops_in_order(place: Place) -> None:
    """Ctrl-C: frontend, engines, vault, store, and nothing is left."""
    up = place.up_here()
    up.send_signal(signal.SIGINT)
    assert up.wait(15) == 0
    out = place.screen()
    order = [out.index(f"{name} stopped") for name in ("frontend", "worker-1a", "vault-1", "store")]
    assert order == sorted(order)
    until(lambda: not place.pids(), "every process to be gone", 5.0)


def test_nothing_of_a_pair_outlives_a_killed_up(place: Place) -> None:
    """SIGKILL of a foreground `up`: engines, vault and keeper are gone too."""
    up = place.up_here()
    up.kill()
    up.wait(5)
    until(lambda: not place.pids(), "every process to be gone", 5.0)
