"""What a process says when it cannot go on: the cause, not a guess at it."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from holdfast.roles import run as child
from holdfast.spec.launch import StoreLaunch
from holdfast.supervise.records import read_record
from holdfast.wire.net import CannotListenError
from tests.rigs.small_disks import BALLAST, fill, small_disk

WHERE = "unix:///tmp/x/w.sock"


def test_only_what_could_not_listen_says_so() -> None:
    """A full disk is called that, with the file; an address in use is called that."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x/run/w.json")
    assert child._explain(full) == (
        "cannot go on: [Errno 28] No space left on device: '/tmp/x/run/w.json'; make room on that disk"
    )
    assert "listen" not in child._explain(ConnectionResetError(errno.ECONNRESET, "reset"))
    assert child._explain(CannotListenError(errno.EADDRINUSE, "x", WHERE)).startswith(f"{WHERE} is in use")
    assert child._explain(CannotListenError(errno.EROFS, "read-only", WHERE)) == f"cannot listen on {WHERE}: read-only"


def test_a_process_without_a_record_serves_and_writes_it_once_there_is_room() -> None:
    """A store that is ready on a full disk listens; its record follows when it can."""
    with small_disk(64 * 1024) as disk:
        (disk / "run").mkdir()
        launch = StoreLaunch(state_dir=str(disk), address=f"unix://{disk}/store.sock", name="store")
        fill(disk)
        command = [sys.executable, "-m", "holdfast.roles", "store", msgspec.json.encode(launch).decode()]
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
            assert process.wait(60) == 0
