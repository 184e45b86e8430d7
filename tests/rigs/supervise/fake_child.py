"""A supervised process whose health is written in its settings: `python fake_child.py SETTINGS STATE_DIR NAME`.

Its beats come from the real beat thread and its record is a real one. In its first life it is as sick as its settings
say; in every later life it is well, so that a test sees it come back.
"""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from holdfast.core.address import UnixAddress
from holdfast.engines.contract import Progress
from holdfast.supervise.records import Record, write_record
from holdfast.wire.messages import VERSION, Welcome
from holdfast.worker.beat import BeatThread


def main(settings_path: str, state_dir: str, name: str) -> None:
    settings: dict[str, Any] = json.loads(Path(settings_path).read_bytes())
    lives = Path(state_dir) / f"{name}.lives"
    lives.touch()
    sick = lives.stat().st_size == 0
    with lives.open("ab") as file:
        file.write(b"x")
    facts = {"live": 200, "health": 200, "running": 0, "http": "answer", "rank": "", "ready": True}
    facts |= settings if sick else {}
    if facts["rank"]:
        _start_rank(facts["rank"], Path(state_dir) / f"{name}.rank")
    status = _serve(facts)
    if settings.get("beat"):
        _beat(settings["beat"], int(facts["running"]))
    if facts["ready"]:
        write_record(Path(state_dir), Record.of_process(os.getpid(), name, "worker", status=status))
    threading.Event().wait()


def _start_rank(where: str, told: Path) -> None:
    rank = subprocess.Popen(["sleep", "1000"], process_group=0 if where == "session" else None)
    told.write_text(str(rank.pid))


def _serve(facts: dict[str, Any]) -> str:
    if facts["http"] == "silent":
        deaf = socket.create_server(("127.0.0.1", 0))
        threading.excepthook = lambda _: None
        globals()["kept"] = deaf  # the kernel accepts for it; none answers
        return f"tcp://127.0.0.1:{deaf.getsockname()[1]}"

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"status":"ready"}'
            self.send_response(facts["live"] if self.path == "/live" else facts["health"])
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing: the log is for last words."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"tcp://127.0.0.1:{server.server_address[1]}"


def _beat(path: str, running: int) -> None:
    """With work and no steps it is wedged: the thread that should make steps only sleeps."""
    if os.path.exists(path):
        os.unlink(path)
    began_s = time.monotonic()

    def progress() -> Progress:
        # Steps go on for a moment, as they do before an engine wedges.
        steps = int((min(time.monotonic() - began_s, 0.5)) * 100)
        return Progress(steps, running, 0, 10.0, 0.0, (os.getpid(), threading.main_thread().native_id or 0))

    thread = BeatThread(UnixAddress(path), progress)
    thread.start()
    thread.set_welcome(Welcome(VERSION, 1, "n", "c", 8, 8, True, thread.identity))


if __name__ == "__main__":
    main(*sys.argv[1:])
