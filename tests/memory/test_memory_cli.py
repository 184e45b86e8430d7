"""`holdfast memory` with real processes: it serves, heals when both die, is looked at, and ends whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import UserError
from holdfast.memory.client.weights import RO, MemoryClient
from holdfast.memory.devices import device_name, gpu_uuids, open_device
from holdfast.memory.layout import TensorSpec
from holdfast.spec.names import socket_path
from holdfast.testing.processes import kill_together, vault_pair, vault_processes
from holdfast.testing.waiting import wait_until
from tests.rigs.cli.in_process import said_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

WAIT_S = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="hf-gms-") as made:
        yield Path(made)


def holdfast(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "GMS_SOCKET_DIR": str(folder), "HOLDFAST_STATE_DIR": str(folder)}
    command = [sys.executable, "-m", "holdfast", "memory", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def serve(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "holdfast", "memory", "serve", "--socket-dir", str(folder), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def status(folder: Path) -> list[dict[str, Any]]:
    """What the command tells programs, without the start of a Python for every look."""
    env = {"HOME": "/tmp", "GMS_SOCKET_DIR": str(folder), "HOLDFAST_STATE_DIR": str(folder)}
    with ThreadPoolExecutor(1) as apart:  # some who look run in an event loop
        said = apart.submit(said_here, ("memory", "status", "--json"), env).result(WAIT_S)
    found: list[dict[str, Any]] = json.loads(said.stdout)
    return found


def answering(folder: Path, count: int = 1) -> list[dict[str, Any]]:
    """What they say of themselves, once so many answer: a busy one may miss the second that a look waits."""
    found: list[dict[str, Any]] = []

    def met() -> bool:
        found[:] = [facts for facts in status(folder) if "pid" in facts]
        return len(found) == count

    wait_until(met, f"{count} vaults to answer")
    return found


def end(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=WAIT_S)
    return said


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return str(answer.read().decode())


async def _write(path: str) -> MemoryClient:
    client = MemoryClient(path, open_device("host-0"), 0, slab_bytes=2 << 20)
    await client.connect(WAIT_S)
    assert await client.acquire("rw", 60_000) == "rw"
    addresses = await client.allocate([TensorSpec("t", (1000,), (1,), "uint8", 1000)], "weights-1")
    client.device.write(addresses["t"], b"x" * 1000)
    await client.commit()
    return client


async def test_it_serves_shows_and_ends(folder: Path) -> None:
    """One command serves a device; status shows what it keeps, /metrics counts it, Ctrl-C leaves nothing behind."""
    process = serve(folder, "--device", "host-3", "--status-address", "tcp://127.0.0.1:0")
    path = socket_path(folder, "host-3")
    wait_until(lambda: any(facts.get("status_address") for facts in status(folder)), "the vault and its page")
    client = await _write(path)
    (facts,) = answering(folder)
    assert (facts["device"], facts["weights"], facts["identity"]) == ("host-3", "RO", "weights-1")
    assert facts["weights_bytes"] == 2 << 20
    shown = ""

    def is_shown() -> bool:
        nonlocal shown
        shown = holdfast(folder, "status", "--history").stdout
        return "weights-1" in shown

    wait_until(is_shown, "what it keeps to be shown")
    assert "committed generation 1" in shown
    address = facts["status_address"].replace("tcp://", "http://")
    page = fetched(f"{address}/metrics")
    assert 'holdfast_vault_commits_total{device="host-3"} 1.0' in page
    assert 'holdfast_vault_readers{device="host-3"} 1.0' in page
    assert 'holdfast_vault_state{device="host-3",state="RO",tag="weights"} 1.0' in page
    await client.close()
    said = end(process)
    assert process.returncode == 0
    assert "host-3: vault and keeper have ended" in said
    assert "Traceback" not in said
    assert vault_processes(path) == {}
    assert status(folder) == []


async def test_it_moves_weights_and_says_why_not(folder: Path) -> None:
    """A mapped engine is named; once it is gone they go to host memory and come back, and all counts say so."""
    process = serve(folder, "--device", "host-0", "--host-budget-gib", "0.5", "--status-address", "tcp://127.0.0.1:0")
    path = socket_path(folder, "host-0")
    wait_until(lambda: any(facts.get("status_address") for facts in status(folder)), "the vault and its page")
    client = await _write(path)
    refused = holdfast(folder, "demote", "host-0")
    assert refused.returncode != 0
    assert f"engine 0 pid {os.getpid()} connected> (mapped)" in refused.stderr.replace("\n", " ")
    await client.close()
    moved = holdfast(folder, "demote", "host-0")
    assert (moved.returncode, "0.00 GiB moved to host memory in" in moved.stdout) == (0, True), moved
    (facts,) = answering(folder)
    assert (facts["weights"], facts["device_bytes"], facts["host_bytes"]) == ("WARM", 0, 2 << 20)
    page = fetched(facts["status_address"].replace("tcp://", "http://") + "/metrics")
    assert 'holdfast_vault_device_bytes{device="host-0"} 0.0' in page
    assert 'holdfast_vault_host_bytes{device="host-0"} 2.097152e+06' in page
    assert 'holdfast_vault_demotions_total{device="host-0"} 1.0' in page
    assert 'holdfast_vault_state{device="host-0",state="WARM",tag="weights"} 1.0' in page
    assert "already (warm)" in holdfast(folder, "demote", "host-0").stderr.replace("\n", " ")
    back = json.loads(holdfast(folder, "promote", "host-0", "--json").stdout)
    assert (back["device"], back["size_bytes"]) == ("host-0", 2 << 20)
    (facts,) = answering(folder)
    assert (facts["weights"], facts["device_bytes"]) == ("COMMITTED", 2 << 20)
    assert "there is no vault" in holdfast(folder, "demote", "host-7").stderr
    end(process)


async def test_a_killed_pair_is_started_again(folder: Path) -> None:
    """Vault and keeper killed together, twice, come back by themselves, and a mapped engine gives the weights back."""
    process = serve(folder, "--device", "host-0")
    path = socket_path(folder, "host-0")
    answering(folder)
    client = await _write(path)
    for _ in range(2):
        kill_together(vault_pair(path, WAIT_S))
        other = MemoryClient(path, open_device("host-0"), 1)
        await other.connect(WAIT_S)
        assert await other.acquire("ro", 60_000) == RO
        assert other.mapped is not None
        assert other.device.read(other.mapped.addresses()["t"], 1000) == b"x" * 1000
        await other.close()
    await client.close()
    end(process)
    assert vault_processes(path) == {}


def test_ctrl_c_before_a_vault_is_ready_ends_it(folder: Path) -> None:
    """Nobody waits for one that is not wanted any more: its socket is there before its process is."""
    process = serve(folder, "--device", "host-0")
    path = socket_path(folder, "host-0")
    wait_until(Path(path).exists, "the socket")
    said = end(process)
    assert (process.returncode, "Traceback" in said) == (0, False), said
    assert vault_processes(path) == {}


def test_several_devices_at_once(folder: Path) -> None:
    """Each device has a vault of its own; a second server of the same device is refused in one line."""
    process = serve(folder, "--device", "host-0", "--device", "host-1")
    answering(folder, 2)
    refused = holdfast(folder, "serve", "--device", "host-1")
    assert refused.returncode == 1
    assert "already serves host-1" in refused.stderr
    answering(folder, 2)
    end(process)
    assert status(folder) == []


def test_a_silent_vault_delays_nobody(folder: Path) -> None:
    """A socket without a listener is shown as such, within the bound."""
    process = serve(folder, "--device", "host-0")
    path = socket_path(folder, "host-0")
    answering(folder)
    vault = vault_pair(path, WAIT_S)[0]
    for pid in (process.pid, vault):  # who serves too, or it would replace the vault
        os.kill(pid, signal.SIGSTOP)
    try:
        (facts,) = status(folder)
        assert "no answer within 1 s" in facts["error"]
        assert "no answer" in holdfast(folder, "status").stdout
    finally:
        for pid in (vault, process.pid):
            os.kill(pid, signal.SIGCONT)
    end(process)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve",), "use --device host-0"),
        (("serve", "--device", "tpu-1"), "no device is named 'tpu-1'; name it host-0"),
        (("serve", "--device", "cuda-99"), "there is no GPU cuda-99"),
        (("serve", "--device", "host-0", "--status-address", "here"), "must start with tcp://"),
        (("serve", "--device", "host-0", "--device", "host-1", "--status-address", "tcp://127.0.0.1:9"), "use port 0"),
        (("serve", "--device", "host-0", "--socket-dir", "/tmp/" + "x" * 100), "shorter --socket-dir"),
    ],
)
def test_mistakes_of_memory_get_one_line(folder: Path, words: tuple[str, ...], said: str) -> None:
    """A wrong wish is refused in one line with its mend."""
    done = holdfast(folder, *words)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_vault_is_no_error(folder: Path) -> None:
    """Nothing there: a line that says how to start one."""
    done = holdfast(folder, "status")
    assert (done.returncode, done.stderr) == (0, "")
    assert "holdfast run vault --device host-0" in done.stdout
    assert status(folder) == []


def test_gpus_are_named_by_uuid(tmp_path: Path) -> None:
    """`cuda-<n>` counts in PCI order and becomes the UUID; UUIDs and host names stay as they are."""
    for bus, uuid in (("0000:4a:00.0", "GPU-bbbb"), ("0000:1a:00.0", "GPU-aaaa")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t NVIDIA H200\nGPU UUID: \t {uuid}\n")
    assert gpu_uuids(tmp_path) == ["GPU-aaaa", "GPU-bbbb"]
    assert device_name("cuda-1", tmp_path) == "GPU-bbbb"
    assert device_name("host-0", tmp_path) == "host-0"
    assert device_name("MIG-12ab-34", tmp_path) == "MIG-12ab-34"
    with pytest.raises(UserError, match="there are 2"):
        device_name("cuda-2", tmp_path)
