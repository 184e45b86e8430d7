"""What a process says when it cannot go on: the cause, not a guess at it."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from holdfast.cli import child
from holdfast.cli.launch import StoreLaunch, WorkerLaunch
from holdfast.supervise.records import read_record
from holdfast.wire.net import CannotListenError
from small_disks import BALLAST, fill, small_disk


def explained(error: OSError) -> str:
    return child._explain(WorkerLaunch("/tmp/x", "tcp://127.0.0.1:1", "local", address="unix:///tmp/x/w.sock"), error)


def test_only_what_could_not_listen_says_so() -> None:
    """A full disk is called that, with the file; an address in use is called that."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x/run/w.json")
    assert explained(full) == (
        "cannot go on: [Errno 28] No space left on device: '/tmp/x/run/w.json'; make room on that disk"
    )
    assert "listen" not in explained(ConnectionResetError(errno.ECONNRESET, "reset"))
    assert explained(CannotListenError(errno.EADDRINUSE, "x")).startswith("unix:///tmp/x/w.sock is in use")
    assert explained(CannotListenError(errno.EROFS, "read-only")).startswith("cannot listen on unix:///tmp/x/w.sock")


def test_a_process_without_a_record_serves_and_writes_it_once_there_is_room() -> None:
    """A store that is ready on a full disk listens; its record follows when it can."""
    with small_disk(64 * 1024) as disk:
        (disk / "run").mkdir()
        launch = StoreLaunch(str(disk), address=f"unix://{disk}/store.sock", name="store")
        fill(disk)
        command = [sys.executable, "-m", "holdfast.cli.child", "store", msgspec.json.encode(launch).decode()]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            try:
                assert b"cannot write down that it runs" in process.stderr.readline()
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(str(disk / "store.sock"))
                assert read_record(Path(disk), "store") is None
                (disk / BALLAST).unlink()
                while (record := read_record(Path(disk), "store")) is None:
                    assert process.poll() is None, process.stderr.read()
                assert record.pid == process.pid
            finally:
                process.terminate()
            assert process.wait(10) == 0
