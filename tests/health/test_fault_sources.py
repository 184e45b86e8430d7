"""What tells of GPUs' faults: the kernel's log, by a pipe, and NVIDIA's management library, by one of our own that
speaks its C interface. The real ones are tried in `gpu/`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.health.device_faults import DeviceFault, Severity, Source
from holdfast.health.fault_sources import LINE_BYTES_MAX, READ_BYTES, KernelLog, NvmlWatch
from tests.rigs.health.fault_sources import FIRST, SECOND, FakeNvml, LogPipe, fake_nvml

BOUND_S = 60.0


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[LogPipe]:
    made = LogPipe(tmp_path)
    yield made
    made.close()


@pytest.fixture
def log(pipe: LogPipe) -> Iterator[KernelLog]:
    source = KernelLog(str(pipe.path))
    source.start()
    yield source
    source.stop()


nvml = pytest.fixture(fake_nvml)


def heard(source: Source, count: int) -> list[DeviceFault]:
    """So many things, however long they take."""
    found: list[DeviceFault] = []
    until_s = time.monotonic() + BOUND_S
    while len(found) < count:
        assert time.monotonic() < until_s, (source, found)
        found += source.poll()
        time.sleep(0.002)
    return found


def numbers(found: list[DeviceFault]) -> list[int]:
    return [one.number for one in found]


def test_lines_of_the_driver_are_told_and_no_others(pipe: LogPipe, log: KernelLog) -> None:
    """Only a record whose text the driver began is a fault: one that quotes it, by whoever may have the kernel log
    something, is not."""
    assert log.poll() == []
    pipe.write("usb 1-1: new high-speed USB device")
    pipe.write("audit: comm=NVRM: Xid (PCI:0000:3b:00): 79, it is quoted")
    pipe.write("NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=python3, GPU has fallen off the bus.")
    (fault,) = log.poll()
    assert (fault.device, fault.number, fault.severity, fault.pid) == (FIRST, 79, Severity.FATAL, 4242)
    assert log.poll() == []


def test_a_half_line_waits_for_its_end(pipe: LogPipe, log: KernelLog) -> None:
    """A record that is read in two pieces is one fault."""
    pipe.write_raw(b"6,1,1,-;NVRM: Xid (PCI:0000:3b:00): 4")
    assert log.poll() == []
    pipe.write_raw(b"8, DBE\n")
    assert numbers(log.poll()) == [48]


def test_a_line_without_an_end_is_given_up(pipe: LogPipe, log: KernelLog) -> None:
    """Whatever is written there, what is kept of it has a bound, and the next line is read."""
    for _ in range(LINE_BYTES_MAX // READ_BYTES + 2):
        pipe.write_raw(b"x" * READ_BYTES)
        assert log.poll() == []
    pipe.write_raw(b"\n")
    pipe.write("NVRM: Xid (PCI:0000:3b:00): 31, pid=1")
    assert numbers(log.poll()) == [31]


def test_what_was_logged_before_is_not_told(tmp_path: Path) -> None:
    """A fault from before it began may have been mended since: only new lines count."""
    file = tmp_path / "log"
    file.write_text("NVRM: Xid (PCI:0000:3b:00): 79, old\n")
    source = KernelLog(str(file))
    source.start()
    with file.open("a") as more:
        more.write("NVRM: Xid (PCI:0000:3b:00): 48, new\n")
    assert numbers(source.poll()) == [48]
    source.stop()


def test_a_log_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    """It has a reason for people, and is silent otherwise."""
    source = KernelLog(str(tmp_path / "none"))
    source.start()
    assert "cannot read" in source.state
    assert source.poll() == []
    source.stop()


def test_nvml_tells_xids_with_their_device(nvml: FakeNvml) -> None:
    """An event has the PCI address of the GPU that it is of, and its number's meaning."""
    source = NvmlWatch(str(nvml.library))
    source.start()
    nvml.xid(1, 79)
    nvml.xid(0, 31)
    first, second = heard(source, 2)
    source.stop()
    assert source.state == "hears 2 of 2 GPUs"
    assert (first.device, first.severity) == (SECOND, Severity.FATAL)
    assert (second.device, second.severity) == (FIRST, Severity.IGNORABLE)
    assert "fallen off the bus" in first.reason


def test_nvml_tells_what_the_driver_asks_for_and_when_it_was_done(nvml: FakeNvml) -> None:
    """Also to one who starts after the fault; once until it changes."""
    nvml.asks(0, 1)
    nvml.asks(1, 0)
    source = NvmlWatch(str(nvml.library))
    source.start()
    asked, sound = heard(source, 2)
    assert (asked.device, asked.severity, asked.recovery) == (FIRST, Severity.RESET_NEEDED, True)
    assert (sound.device, sound.severity, sound.recovery) == (SECOND, Severity.IGNORABLE, True)
    nvml.asks(0, 0)
    nvml.asks(1, -15)
    nvml.xid(1, 31)  # an event makes it look at once
    by_device = {one.device: one for one in heard(source, 3) if not one.number}
    source.stop()
    assert (by_device[FIRST].severity, by_device[FIRST].recovery) == (Severity.IGNORABLE, True)
    assert (by_device[SECOND].severity, by_device[SECOND].recovery) == (Severity.FATAL, False)


@pytest.mark.parametrize("library", ["libnowhere.so.1", "libc.so.6"])
def test_a_machine_without_nvml_says_so(library: str) -> None:
    """No library, or one that is not it: not available, with the reason, and nothing else happens."""
    source = NvmlWatch(library)
    source.start()
    until_s = time.monotonic() + BOUND_S
    while source.state == "starting":
        assert time.monotonic() < until_s
        time.sleep(0.002)
    assert source.state.startswith("not available: ")
    assert source.poll() == []
