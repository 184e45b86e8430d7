"""A standby that can never start, or never stays, against a real `holdfast up`: seen, bounded, and over by itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from holdfast.failover.journal import two_leaders
from holdfast.supervise.machine import CRASH_LOOP_FAILURES, PAUSE_S_MAX
from holdfast.testing.answers import Answer
from holdfast.testing.clients import ask, chat_body, read_answer
from holdfast.testing.processes import kill_group
from holdfast.testing.rig import EngineSeen
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread

pytestmark = [pytest.mark.long, pytest.mark.processes]

# Pauses of 0.1 s to 0.8 s and five starts of half a second; a shared machine may take many times that.
LOOP_S = 60.0


@pytest.fixture(scope="module")
def up() -> Iterator[Supervised]:
    with Supervised("--vault-gib", "0.1", "--sim-tpot-ms", "10") as started:
        yield started


def holdfast(up: Supervised, *words: str) -> str:
    command = [sys.executable, "-m", "holdfast", *words]
    env = os.environ | {"HOLDFAST_STATE_DIR": str(up.folder)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


def shown(up: Supervised, name: str) -> dict[str, Any]:
    """The engine's line of `holdfast status --json`."""
    return next(process for process in json.loads(holdfast(up, "ps", "--json")) if process["name"] == name)


def standby(up: Supervised) -> EngineSeen:
    found = up.engine("standby")
    assert found is not None
    return found


def seen_in_a_loop(up: Supervised, name: str) -> dict[str, Any]:
    """Between two tries: now and then it starts, and fails again."""
    seen: list[dict[str, Any]] = []

    def looked() -> bool:
        seen.append(shown(up, name))
        return bool(seen[-1]["state"] == "crash loop")

    up.wait_until(looked, "a crash loop in `ps --json`", LOOP_S)
    return seen[-1]


def in_a_loop(up: Supervised, name: str, note: str = "") -> bool:
    """As `ps` reads it, but quicker."""
    record = up.records().get(name, {})
    return record.get("state") == "crash loop" and note in record["note"]


async def ask_it(up: Supervised) -> Answer:
    return read_answer(await ask(up.port, "/v1/chat/completions", chat_body("Tell me of the sea.", 100, seed=1)))


@pytest.mark.timeout(300)
def test_a_standby_that_cannot_start(up: Supervised) -> None:
    """Its address is taken by something else: `ps` says crash loop, how often, its last words and when the next try is;
    the active serves on meanwhile; and once the cause is gone it stands by again within the longest pause."""
    unbroken = uvloop.run(ask_it(up))
    leader, broken = up.active(), standby(up)
    socket = up.folder / "run" / f"{broken.name}.sock"
    socket.unlink()
    socket.mkdir()
    kill_group(broken.pid)
    up.wait_until(lambda: in_a_loop(up, broken.name), "a crash loop", LOOP_S)
    seen = seen_in_a_loop(up, broken.name)
    assert seen["group"] == "worker-1"
    assert seen["failures"] >= CRASH_LOOP_FAILURES
    assert f"failed {seen['failures']} times in a row" in seen["note"]
    assert f"cannot listen on unix://{socket}" in seen["note"]
    assert 0 <= seen["retry_in_s"] <= PAUSE_S_MAX
    words = rf"{broken.name}: .*failed [0-9]+ times in a row.*; next try in [0-9.]+ s"
    up.wait_until(lambda: bool(re.search(words, holdfast(up, "ps"))), "that in `ps`", LOOP_S)
    assert uvloop.run(ask_it(up)).text == unbroken.text
    assert up.active().pid == leader.pid

    socket.rmdir()
    healed_s = up.wait_until(up.restored, "a standby", PAUSE_S_MAX + LOOP_S)
    print(f"healed {healed_s:.1f} s after the cause was gone")
    assert shown(up, broken.name)["state"] == "standby"
    assert two_leaders(up.terms()) == []
    assert len(up.terms()) == 1


@pytest.mark.timeout(300)
def test_a_standby_that_never_stays(up: Supervised) -> None:
    """Killed as soon as it is ready, again and again: a crash loop all the same, however well it starts; left alone it
    stands by again, and takes over when it must."""
    broken = standby(up).name
    over = threading.Event()

    def kill_on_sight() -> None:
        while not over.is_set():
            found = up.engine("standby")
            if found is not None and found.name == broken:
                kill_group(found.pid)
            over.wait(0.02)

    killing = threading.Thread(target=kill_on_sight)
    killing.start()
    try:
        up.wait_until(lambda: in_a_loop(up, broken, "SIGKILL"), "a crash loop", LOOP_S)
    finally:
        over.set()
        killing.join()
    up.wait_until(up.restored, "a standby", PAUSE_S_MAX + LOOP_S)
    leader = up.active()

    async def broken_answer() -> Answer:
        asking = asyncio.ensure_future(ask_it(up))
        await in_thread(up.wait_until, lambda: up.active().facts["running"] > 0, "a stream")
        kill_group(leader.pid)
        return await asking

    unbroken = uvloop.run(ask_it(up))
    answer = uvloop.run(broken_answer())
    assert (answer.done, answer.text, answer.resumed) == (True, unbroken.text, 1)
    assert up.active().name == broken
    assert two_leaders(up.terms()) == []
