"""A terminal for tests: a program runs on a pseudo-terminal of its own; what it wrote is read as a person sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Self

WAIT_S = 60.0  # a loaded machine; nothing is expected to take a tenth of it
COLUMNS = 100

_PIECE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|(\r)|(\n)|(\x07)|([^\x1b\r\n\x07])", re.DOTALL)


def screen_of(output: str) -> list[str]:
    """The lines on an endless screen after these bytes; what it does not know is an error, so nothing slips through."""
    lines, row, column, place = [""], 0, 0, 0
    while place < len(output):
        found = _PIECE.match(output, place)
        assert found is not None, f"an unknown sequence: {output[place : place + 20]!r}"
        place = found.end()
        values, command, back, down, bell, letter = found.groups()
        if command:
            many = int(values) if values.isdigit() else 1
            column += {"C": many, "D": -many}.get(command, 0)
            row -= many if command == "A" else 0
            if command == "K":
                lines[row] = lines[row][:column]
            assert command in "ACDKmhl", f"an unknown command {command!r}"
            assert row >= 0
            assert column >= 0
        elif back:
            column = 0
        elif down:
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif not bell:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + letter + line[column + 1 :]
            column += 1
    return lines


class OnTerminal:
    """Runs a program with a keyboard and a screen."""

    def __init__(self, state_dir: Path, *words: str, columns: int = COLUMNS) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "PYTHONPATH")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", *words],
            env={**kept, "TERM": "xterm-256color", "HOLDFAST_STATE_DIR": str(state_dir)},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )
        os.close(slave)
        self._bytes = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)
        os.close(self.master)

    @property
    def output(self) -> str:
        return self._bytes.decode(errors="replace").replace("\r\n", "\n")

    def screen(self) -> list[str]:
        return [line.rstrip() for line in screen_of(self.output)]

    def _more(self, within_s: float) -> bool:
        """Take what comes; False at the program's end."""
        if not select.select([self.master], [], [], within_s)[0]:
            return True
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            data = os.read(self.master, 65_536)
            self._bytes += data
            return bool(data)
        return False

    def until(self, text: str, times: int = 1) -> None:
        """Until the screen has it as often as that."""
        until_s = time.monotonic() + WAIT_S
        while "\n".join(self.screen()).count(text) < times:
            assert time.monotonic() < until_s, f"no {text!r} on:\n{self.output}"
            assert self._more(0.1) or text in "\n".join(self.screen()), f"it ended without {text!r}:\n{self.output}"

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self) -> int:
        """Its exit status, once it has ended."""
        until_s = time.monotonic() + WAIT_S
        while self._more(0.1):
            assert time.monotonic() < until_s, f"it does not end:\n{self.output}"
        return self.process.wait(WAIT_S)
