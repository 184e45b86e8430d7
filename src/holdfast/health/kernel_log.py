"""Faults of GPUs and NVLink switches from the kernel's log: only what is logged from now on, and only what the drivers
themselves say.

Always true: reading never waits, and a flood of lines costs one poll a bounded number of them; what the kernel has
dropped before it was read (EPIPE) is passed over, and what is half written waits for its end.
"""

from __future__ import annotations

import contextlib
import os

from holdfast.health.device_faults import Fault, parse_line

PATH = "/dev/kmsg"
# One read of the kernel's log is one record, which has at most 8 KiB.
READ_BYTES = 8192
# For one poll: a few thousand lines a second at ten polls, more than the kernel's own limits on drivers let through.
READS_MAX = 256
# A line is at most one record; what is longer is no line of the driver's.
LINE_BYTES_MAX = 2 * READ_BYTES
DRIVERS = ("NVRM: Xid", "nvidia-nvswitch")  # a GPU's, and an NVLink switch's


class KernelLog:
    """`path`: the kernel's log, or a pipe that stands in for it."""

    name = "kernel log"

    def __init__(self, path: str = PATH) -> None:
        self._path = path
        self._fd = -1
        self._half = b""
        self.state = "not started"

    def __repr__(self) -> str:
        return f"<KernelLog {self._path}: {self.state}>"

    def start(self) -> None:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a pipe has no end to go to, and nothing old in it
                os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as error:
            self.state = f"cannot read {self._path}: {error.strerror}"
        else:
            self.state = f"reads {self._path}"

    def stop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def poll(self) -> list[Fault]:
        heard: list[Fault] = []
        for _ in range(READS_MAX if self._fd >= 0 else 0):
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # the kernel dropped lines that nobody had read; the next read goes on behind them
            except OSError as error:
                self.state = f"cannot read {self._path} any more: {error.strerror}"
                self.stop()
                break
            if not data:
                break  # a pipe without a writer
            *lines, self._half = (self._half + data).split(b"\n")
            if len(self._half) > LINE_BYTES_MAX:
                self._half = b""
            heard += [fault for line in lines if (fault := _fault(line)) is not None]
        return heard


def _fault(line: bytes) -> Fault | None:
    """A record is `priority,number,time,flags;text`. A text that only quotes the driver begins otherwise."""
    text = line.decode(errors="replace")
    head, found, rest = text.partition(";")
    said = rest if found and head[:1].isdigit() else text
    return parse_line(said) if said.startswith(DRIVERS) else None
