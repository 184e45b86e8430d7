"""The built wheel, in an empty venv, does what the README says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from holdfast.testing.rig import free_port

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(300)]


def _run(*command: str | Path, **more: str) -> str:
    environment = {**os.environ, **more}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd="/")
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def test_wheel_serves_from_an_empty_venv(tmp_path: Path) -> None:
    """`pip install` of the wheel alone serves a chat with the simulator; for the default it says what is lacking."""
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("holdfast_llm-*.whl")
    _run(sys.executable, "-m", "venv", tmp_path / "venv")
    bin_dir = tmp_path / "venv" / "bin"
    _run(bin_dir / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    state = {"HOLDFAST_STATE_DIR": str(tmp_path / "s")}
    port = free_port()
    environment = {**os.environ, **state}
    refused = subprocess.run([bin_dir / "holdfast", "up"], capture_output=True, text=True, timeout=60, env=environment)
    assert (refused.returncode, refused.stderr.count("\n")) == (78, 1)
    assert "needs the package torch" in refused.stderr
    assert "pip install 'holdfast-llm[torch]'" in refused.stderr
    assert "holdfast up --engine sim" in refused.stderr
    try:
        _run(bin_dir / "holdfast", "up", "--engine", "sim", "--detach", "--port", str(port), **state)
        running = json.loads(_run(bin_dir / "holdfast", "ps", "--json", **state))
        assert {process["role"] for process in running} >= {"store", "worker", "frontend"}
        body = {"model": "holdfast-sim", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        assert answer["usage"]["completion_tokens"] <= 5
    finally:
        _run(bin_dir / "holdfast", "down", **state)
