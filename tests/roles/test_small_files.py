"""Files named on the command line are read whole, pipes too, within bounds of time and size."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast.roles import small_files
from holdfast.roles.small_files import BYTES_MAX, read_small


def test_a_shells_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """Also one whose writer is slower than its reader, and one whose writer has left already."""
    (tmp_path / "f").write_bytes(b"x = 1\n")
    assert read_small(tmp_path / "f") == b"x = 1\n"
    reading, writing = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(writing, b"x" * 200_000), os.close(writing)))
    writer.start()
    assert read_small(Path(f"/proc/self/fd/{reading}")) == b"x" * 200_000
    writer.join()
    os.close(reading)
    reading, writing = os.pipe()
    os.write(writing, b"y = 2\n")
    os.close(writing)
    assert read_small(Path(f"/proc/self/fd/{reading}")) == b"y = 2\n"
    os.close(reading)


def test_what_has_no_end_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe without a writer, one whose writer stays, a device, a directory, too large a file: each has its reason."""
    monkeypatch.setattr(small_files, "READ_S", 0.2)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(BYTES_MAX + 1))
    reading, writing = os.pipe()
    os.write(writing, b"x")
    late = "nobody has written it to its end within 0.2 s"
    for path, why in (
        (tmp_path / "pipe", late),
        (Path(f"/proc/self/fd/{reading}"), late),
        (Path("/dev/zero"), "it is larger than 1024 KiB"),
        (tmp_path / "large", "it is larger than 1024 KiB"),
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file or directory"),
    ):
        with pytest.raises(OSError) as caught:
            read_small(path)
        assert caught.value.strerror == why
    os.close(reading)
    os.close(writing)
