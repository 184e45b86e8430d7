"""What devices report about themselves, and what follows for the workers on them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.control.worker_health import devices_of
from holdfast.health.device_faults import (
    NAMES,
    RECOVERY_ACTIONS,
    RECOVERY_CHANGED,
    SWITCHES,
    XIDS,
    DeviceFault,
    Severity,
    device_address,
    fault_named,
    fault_of,
    parse_line,
)
from holdfast.health.records import DeviceRecord, device_after, device_name

F, R, I = Severity.FATAL, Severity.RESET_NEEDED, Severity.IGNORABLE  # noqa: E741


@pytest.mark.parametrize(
    ("line", "device", "number", "severity", "pid"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "0000:3b:00", 79, F, 0),
        ("Oct 06 17:59:27 host kernel: NVRM: Xid (PCI:0000:01:00): 79, pid=1122, GPU has", "0000:01:00", 79, F, 1122),
        ("[  269.5] NVRM: Xid (0000:01:00): 13, Graphics Exception", "0000:01:00", 13, I, 0),
        ("NVRM: Xid (PCI:0000:00:06): 31, pid=79749, name=exe, Ch 0000000a", "0000:00:06", 31, I, 79749),
        ("NVRM: Xid (PCI:0000:cb:00): 48, pid='<unknown>', name=<unknown>, DBE", "0000:cb:00", 48, F, 0),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: SM (0x1)", "0000:01:00", 94, I, 7194),
        ("NVRM: Xid (PCI:0008:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08", "0008:01:00", 149, R, 0),
        ("NVRM: Xid (PCI:0008:01:00): 145, RLW_REMAP Nonfatal XC1 i0 Link 03", "0008:01:00", 145, I, 0),
        ("NVRM: Xid (PCI:0000:85:00): 74, NVLink: fatal error detected on link 11(0x0,", "0000:85:00", 74, R, 0),
        ("NVRM: Xid (PCI:0000:91:00): 95, pid=7194, Uncontained: LTC TAG (0x2,0x0).", "0000:91:00", 95, F, 7194),
        ("NVRM: Xid (PCI:0000:01:00): 9999, something new", "0000:01:00", 9999, I, 0),
        ("NVRM: Xid (PCI:0000:01:00): 119", "0000:01:00", 119, R, 0),
    ],
)
def test_lines_of_the_kernels_log(line: str, device: str, number: int, severity: Severity, pid: int) -> None:
    """The number is the one after the address, whatever else is in the line, and its row says what follows."""
    fault = parse_line(line)
    assert fault is not None
    assert (fault.device, fault.number, fault.severity, fault.pid) == (device, number, severity, pid)
    assert f"Xid {number}: " in fault.reason


@pytest.mark.parametrize(
    "line",
    [
        "",
        "NVRM: GPU at PCI:0000:01:00: GPU-bc0fa0b9-cac2-f507-b715-9bebdb69c71e",
        "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.",
        "nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Severity 0 Engine instance 44 Sub-engine instance 00",
        "nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 12028, Data {0x000001c0, 0x00bd5c8a, 0x00000500, 0x00000064}",
        "NVRM: Xid (PCI:not an address): 79, GPU has fallen off the bus.",
        "a worker logged: Xid 79",
    ],
)
def test_other_lines_are_nobodys_fault(line: str) -> None:
    """A line that is neither an Xid's nor an SXid's accuses no device, nor do the registers of an SXid."""
    assert parse_line(line) is None


@pytest.mark.parametrize(
    ("line", "severity", "says"),
    [
        ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", R, "Link 30 LTSSM"),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 46 sourcetrack timeout error", R, "Link 46"),
        ("nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Non-fatal, Link 44 Minion Link DLREQ interrupt", I, ""),
        ("nvidia-nvswitch4: SXid (PCI:0000:c6:00.0): 19084, Non-fatal, Link 29 AN1 Heartbeat Timeout Error", I, ""),
        ("nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 12028, Non-fatal, Link 38 egress nonposted PRIV error", R, "stal"),
        ("nvidia-nvswitch2: SXid (PCI:0000:c4:00.0): 22003, Fatal, Minion Halt", F, "fabric"),
        ("nvidia-nvswitch2: SXid (PCI:0000:c4:00.0): 23009, Fatal, Link 3 ingress packet parity error", F, "fabric"),
        ("nvidia-nvswitch2: SXid (PCI:0000:c4:00.0): 99999, Fatal, Link 3 something new", R, "something new"),
    ],
)
def test_lines_of_nvlink_switches(line: str, severity: Severity, says: str) -> None:
    """The line says whether it is fatal, and the number whether the whole fabric is concerned."""
    fault = parse_line(line)
    assert fault is not None
    assert (fault.device, fault.severity) == (SWITCHES, severity)
    assert fault.reason.startswith(f"SXid {fault.number}: ")
    assert says in fault.reason
    assert line.partition(":")[0] in fault.reason


def test_a_switchs_fault_concerns_workers_with_several_gpus() -> None:
    """One that has a single GPU sends nothing over NVLink."""
    assert device_name("boot", SWITCHES) in devices_of("boot", ["0000:3b:00", "0000:5e:00"])
    assert devices_of("boot", ["0000:3b:00"]) == ("boot/0000:3b:00",)


@given(st.text() | st.from_regex(r"(NVRM: Xid|nvidia-nvswitch0: SXid) \(.{0,20}\): [0-9]{1,9}.{0,20}"))
def test_no_text_raises(line: str) -> None:
    """Whatever is in a log, reading it goes on."""
    fault = parse_line(line)
    assert fault is None or fault.severity in Severity


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", R),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", F),
        ("GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", I),
        ("GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", R),
        ("GPU recovery action changed from 0x0 (None) to 0x9 (Something New)", R),
        ("", I),
    ],
)
def test_a_recovery_that_is_asked_for_is_read_from_its_words(text: str, severity: Severity) -> None:
    """The driver says itself what is needed; what it asks for in new words is at least a reset."""
    assert fault_of("0000:01:00", RECOVERY_CHANGED, text).severity is severity


def test_what_one_process_did_is_not_the_devices_fault() -> None:
    """Another process on the device goes on after it (facts 4): its own end is what counts."""
    for number in (13, 31, 43, 45, 94):
        assert XIDS[number][0] is I
    assert fault_named("0000:01:00", "CUDA_ERROR_ILLEGAL_ADDRESS") is None


@pytest.mark.parametrize("name", NAMES)
def test_names_of_errors(name: str) -> None:
    """Each says its severity and carries its name into the reason."""
    fault = fault_named("0000:01:00", name)
    assert fault is not None
    assert fault.reason.startswith(name)
    assert fault.severity is NAMES[name][0]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00"),
        ("0000:3b:00.0", "0000:3b:00"),
        ("0000:3b:00", "0000:3b:00"),
        ("3b:00.0", "0000:3b:00"),
        ("00010000:3B:00.0", "10000:3b:00"),
        ("GPU-bc0fa0b9", None),
        ("", None),
    ],
)
def test_a_device_has_one_address(text: str, address: str | None) -> None:
    """The kernel's log and NVML spell it differently, and mean one device."""
    assert device_address(text) == address


def test_the_page_has_the_table() -> None:
    """docs/health.md lists every number that is grave with what follows and what it says, and those that are not."""
    page = (Path(__file__).parents[2] / "docs" / "health.md").read_text()
    grave = {number: row for number, row in XIDS.items() if row[0] is not I}
    rows = [f"| {number} | {severity.value} | {meaning} |" for number, (severity, meaning) in grave.items()]
    assert [row for row in rows if row not in page] == []
    ignorable = ", ".join(str(number) for number in sorted(XIDS) if number not in grave)
    assert f"Ignorable: {ignorable};" in " ".join(page.split())


def record(number: int, at_s: float = 1.0) -> DeviceRecord:
    made = device_after(None, fault_of("0000:01:00", number), at_s, "control")
    assert made is not None
    return made


def asked(action: int) -> DeviceFault:
    fault = fault_named("0000:01:00", RECOVERY_ACTIONS[action])
    assert fault is not None
    return fault


def test_of_a_device_the_gravest_fault_stands() -> None:
    """The first of those that are equally grave; what is ignorable is written nowhere."""
    sick, lost = record(64), record(79)
    assert device_after(None, fault_of("0000:01:00", 31), 2.0, "") is None
    assert device_after(sick, fault_of("0000:01:00", 62), 2.0, "") is None
    assert device_after(lost, fault_of("0000:01:00", 64), 2.0, "") is None
    graver = device_after(sick, fault_of("0000:01:00", 79), 2.0, "")
    assert graver is not None
    assert (graver.severity, graver.number, graver.at_unix_s) == (F, 79, 2.0)


def test_a_fault_is_over_when_the_driver_asks_for_nothing_any_more() -> None:
    """Only one that it had asked something about; and the next fault is a new one."""
    sick = record(64)
    assert device_after(sick, asked(0), 2.0, "") is None
    wished = device_after(sick, asked(1), 2.0, "")
    assert wished is not None
    assert (wished.recovery, wished.number, wished.at_unix_s) == (True, 64, 1.0)
    mended = device_after(wished, asked(0), 3.0, "")
    assert mended is not None
    assert mended.cleared_unix_s == 3.0
    assert device_after(mended, asked(0), 4.0, "") is None
    again = device_after(mended, fault_of("0000:01:00", 64), 5.0, "")
    assert again is not None
    assert (again.cleared_unix_s, again.recovery, again.at_unix_s) == (0.0, False, 5.0)


def test_the_kernels_log_tells_of_recovery_too() -> None:
    """Xid 154 with its text is what the driver asks for; without it, as NVML tells it, it says nothing."""
    head = "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from"
    wish = parse_line(f"{head} 0x0 (None) to 0x1 (GPU Reset Required)")
    done = parse_line(f"{head} 0x1 (GPU Reset Required) to 0x0 (None)")
    assert wish is not None
    assert done is not None
    assert (wish.severity, wish.recovery, done.severity, done.recovery) == (R, True, I, True)
    bare = fault_of("0000:01:00", RECOVERY_CHANGED)
    assert (bare.severity, bare.recovery) == (I, False)


def test_devices_of_two_machines_and_two_boots_have_names_of_their_own() -> None:
    """However the address is written."""
    assert device_name("b1", "00000000:3B:00.0") == device_name("b1", "0000:3b:00") != device_name("b2", "0000:3b:00")
