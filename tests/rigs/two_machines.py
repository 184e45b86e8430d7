"""Two machines on this one: network namespaces joined by a cable that can be cut. For root."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ENDLESS = "20000"  # tokens: of such an answer only the beginning is read
ASK = f"""
import http.client, json, sys
host, port, path, *tokens = sys.argv[1:]
connection = http.client.HTTPConnection(host, int(port), timeout=60)
endless = tokens == ["{ENDLESS}"]
if tokens:
    body = {{"model": "holdfast-sim", "prompt": "Once", "max_tokens": int(tokens[0]), "ignore_eos": True, "seed": 7}}
    body["stream"] = endless
    connection.request("POST", path, json.dumps(body), {{"content-type": "application/json"}})
else:
    connection.request("GET", path)
answer = connection.getresponse()
print(answer.status, repr((answer.read(64) if endless else answer.read()).decode()), flush=True)
sys.stdin.read()
"""


class Machines:
    """`near` has the store, and what else a test starts there."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hfns-", dir="/tmp"))
        self.spaces = {name: f"hf{os.getpid()}{name}" for name in ("near", "far")}
        self.hosts = {"near": "10.203.0.1", "far": "10.203.0.2"}
        self.processes: list[subprocess.Popen[str]] = []

    def lay_cable(self) -> None:
        for space in self.spaces.values():
            _ip("netns", "add", space)
        near, far = self.spaces["near"], self.spaces["far"]
        _ip("-n", near, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", far)
        for name, space in self.spaces.items():
            _ip("-n", space, "addr", "add", f"{self.hosts[name]}/24", "dev", "cable")
            for device in ("cable", "lo"):
                _ip("-n", space, "link", "set", device, "up")

    def cut_cable(self) -> None:
        """Let packets vanish without notice, as when a machine loses its power."""
        _ip("-n", self.spaces["far"], "link", "set", "cable", "down")

    def mend_cable(self) -> None:
        _ip("-n", self.spaces["far"], "link", "set", "cable", "up")

    def start(self, machine: str, *words: str, stdin: Any = subprocess.DEVNULL) -> subprocess.Popen[str]:
        state = self.folder / machine
        with open(self.folder / f"{len(self.processes)}.log", "wb") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.spaces[machine], sys.executable, *words],
                env={**os.environ, "HOLDFAST_STATE_DIR": str(state)},
                stdin=stdin,
                stdout=subprocess.PIPE if stdin == subprocess.PIPE else log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def get(self, machine: str, port: int, *rest: str) -> tuple[int, str]:
        words = (sys.executable, "-c", ASK, "127.0.0.1", str(port), *rest)
        done = subprocess.run(
            ["ip", "netns", "exec", self.spaces[machine], *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        status, _, body = done.stdout.partition(" ")
        return (int(status), ast.literal_eval(body.strip())) if status.isdigit() else (0, done.stderr)

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
        for space in self.spaces.values():
            for pid in subprocess.run(["ip", "netns", "pids", space], capture_output=True, check=False).stdout.split():
                with contextlib.suppress(ProcessLookupError):  # what was started there and left its group
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    """Skips where they cannot be had."""
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` (iproute2) for network namespaces")
    machines = Machines()
    try:
        try:
            machines.lay_cable()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs leave to make network namespaces: {error.stderr!r}")
        yield machines
    finally:
        machines.end()
