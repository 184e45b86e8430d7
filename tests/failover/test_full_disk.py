"""A state directory without a byte left, under a real deployment: a small tmpfs, filled while streams run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from holdfast.failover.journal import two_leaders
from holdfast.testing.processes import kill_group
from holdfast.testing.rig import fetch
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread
from tests.rigs.failover.known_answers import answer_to, are_unbroken, streams
from tests.rigs.small_disks import BALLAST, fill, small_disk

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(300)]

BYTES = 8 * 1024 * 1024
STREAMS = range(6)
TOKENS = 750  # six seconds and more: enough for a kill in the middle of them
EXPECTED = {number: answer_to(number, TOKENS) for number in STREAMS}


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk(BYTES) as folder:
        yield folder


@contextlib.contextmanager
def kept_full(folder: Path) -> Iterator[None]:
    """Whatever anybody frees is taken at once."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(0.002):
            fill(folder)

    fill(folder)
    filler = threading.Thread(target=keep)
    filler.start()
    try:
        yield
    finally:
        over.set()
        filler.join()


def killed_under_load(up: Supervised, *, vault: bool = False) -> None:
    """The active engine, and before it the vault if so wished; every stream goes on, and a pair is left."""
    before = up.active().pid

    async def run() -> None:
        running = await streams(up, STREAMS, TOKENS)
        if vault:
            await in_thread(os.kill, up.vault_pids()[0], signal.SIGKILL)
        await in_thread(kill_group, before)
        await are_unbroken(running, EXPECTED)

    uvloop.run(run())
    up.wait_restored(before)


def shown(up: Supervised) -> str:
    command = [sys.executable, "-m", "holdfast", "ps"]
    environ = os.environ | {"HOLDFAST_STATE_DIR": str(up.folder)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_full_disk_costs_no_stream_and_no_process(disk: Path) -> None:
    """With not a byte left the winner of an election leads, streams go on exactly, engines and vault are replaced and
    ready, and nothing else ends; `ps` and metrics say what cannot be written. With room again all is as before."""
    with Supervised("--vault-gib", "0.1", "--sim-tpot-ms", "8", folder=disk) as up:
        others = up.lasting()
        killed_under_load(up)  # whoever leads next has never led before
        with kept_full(disk):
            killed_under_load(up)
            killed_under_load(up, vault=True)
            assert "is full" in shown(up)
            assert 'holdfast_unwritten_total{what="log"}' in metrics(up)
        (disk / BALLAST).unlink()
        up.wait_until(lambda: "is full" not in shown(up), "the warning to go away")
        killed_under_load(up)
        now = up.lasting()
        assert {name for name in others if now[name] != others[name]} == {"vault-process", "vault-1-server"}
        assert two_leaders(up.terms()) == []
        assert len(up.terms()) >= 5  # a busy machine may lose others
        for record in up.records().values():
            assert record["state"] == "ready", json.dumps(record)


def metrics(up: Supervised) -> str:
    return fetch(up.record(up.active().name)["status"], "/metrics")[1].decode()
