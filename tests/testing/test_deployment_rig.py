"""The engines that a deployment under test lists: only those that run."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.testing.rig import DeploymentRig


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"state": "active"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("reaped", [True, False])
def test_an_engine_that_has_ended_is_not_listed_even_if_its_port_answers(tmp_path: Path, *, reaped: bool) -> None:
    """A record outlives its process, and another process may have its port by then."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    if reaped:
        ended.wait()
    (tmp_path / "run").mkdir()
    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, pid in (("worker-1a", ended.pid), ("worker-1b", os.getpid())):
            record = {"role": "worker", "pid": pid, "status": f"127.0.0.1:{server.server_port}"}
            (tmp_path / "run" / f"{name}.json").write_text(json.dumps(record))
        assert [engine.name for engine in DeploymentRig(tmp_path).engines()] == ["worker-1b"]
        server.shutdown()
    ended.wait()
