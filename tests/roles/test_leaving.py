"""How a process of a deployment ends."""

from __future__ import annotations

import subprocess
import sys


def test_nothing_is_taken_apart_at_the_end() -> None:
    """What was written is out, the status is told, and Python's farewell, seconds with large libraries, is left out."""
    said = "import atexit; from holdfast.roles.__main__ import leave; atexit.register(print, 'farewell'); "
    ended = subprocess.run(
        [sys.executable, "-c", said + "print('written', end=''); leave(3)"], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (3, "written")
