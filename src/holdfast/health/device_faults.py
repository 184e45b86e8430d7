"""Maps fault reports of GPUs and NVLink switches to a severity, by tables of Xid numbers, SXid numbers and error names.
Pure.

Theory. A driver reports a fault as an *Xid*: a number in a line of the kernel's log, or in an event of its management
library (NVML). There are three kinds:
- IGNORABLE: one process did something wrong. It dies, the others on the device continue (facts 4), and its end is
  noticed anyway. This is the most frequent kind.
- RESET_NEEDED: the device must be reset before its memory or its engines can be trusted. Its workers are drained.
- FATAL: the device is gone, or its memory holds wrong bytes. Streams move at once.
The rows follow NVIDIA's catalogue of Xids for data-centre GPUs since Ampere: "restart the application" and "ignore" are
IGNORABLE, "reset the GPU" is RESET_NEEDED, "restart the machine" is FATAL, and so is a memory error that was not
corrected and not contained.

A number without a row is IGNORABLE, and is reported as unknown. Drivers add numbers, most of them for people to read,
and a worker on a failing device is found by its own failures (facts 24).

An NVLink switch reports its faults as *SXids*, in lines that say whether the fault is fatal. A switch belongs to no
worker: its fault counts against every worker on that machine that has several GPUs (`SWITCHES`). A fatal SXid stops one
port, and switches and GPUs are reset together: RESET_NEEDED. A few numbers stop the whole fabric: FATAL.

Always true: a line that reports no Xid and no SXid gives None; no text makes a function here raise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from holdfast.core.enums import OpenStrEnum


class Severity(OpenStrEnum):
    """What a fault means for the workers on the device."""

    FATAL = "fatal"  # the device is gone, or its memory holds wrong bytes: streams move now
    RESET_NEEDED = "reset needed"  # the device computes, but must be reset to be trusted: workers are drained
    IGNORABLE = "ignorable"  # the fault concerns one process, or is for people to read


F, R, I = Severity.FATAL, Severity.RESET_NEEDED, Severity.IGNORABLE  # noqa: E741

# number: (severity, meaning). "One process" is the one that the line names.
XIDS: dict[int, tuple[Severity, str]] = {
    **dict.fromkeys((11, 25), (I, "one process sent an invalid stream of commands")),
    **dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77), (I, "one process's copy failed")),
    **dict.fromkeys((66, 67), (I, "illegal access by the driver")),
    **dict.fromkeys((106, 107), (I, "test message")),
    8: (I, "one process's channel stopped"),
    13: (I, "one process's kernel failed"),
    31: (I, "one process touched memory that is not mapped"),
    32: (I, "one process sent a corrupted stream of commands"),
    37: (I, "firmware: method not known"),
    38: (I, "firmware: watchdog"),
    43: (I, "one process was stopped for a fault of its own"),
    44: (I, "fault while switching contexts"),
    45: (I, "one process's work was removed: it died, or another fault came before"),
    46: (R, "the GPU stopped processing"),
    48: (F, "memory error of two bits, not corrected"),
    54: (R, "auxiliary power is not connected"),
    62: (R, "its power controller halted"),
    63: (I, "a row of memory was marked for remapping"),
    64: (R, "a row of memory could not be remapped"),
    68: (I, "the video decoder failed"),
    69: (I, "one process used a class wrongly"),
    74: (R, "an NVLink connection failed"),
    79: (F, "the GPU has fallen off the bus"),
    80: (I, "one process's commands arrived corrupted"),
    92: (I, "many memory errors of one bit, corrected"),
    93: (I, "its information memory may not be written any more"),
    94: (I, "memory error, contained to one process"),
    95: (F, "memory error, not contained"),
    109: (R, "switching contexts timed out"),
    110: (R, "security fault"),
    119: (R, "its system processor does not answer"),
    120: (R, "its system processor failed"),
    121: (I, "corrected errors on the link to the CPU"),
    136: (R, "link training failed"),
    137: (I, "one process touched a peer's memory that is not mapped"),
    140: (R, "memory errors that could not be repaired"),
    141: (I, "one process's fast path failed"),
    143: (R, "the GPU could not be initialised"),
    151: (F, "key rotation failed: its virtual machine must be restarted"),
    155: (R, "an NVLink connection was taken down"),
    156: (R, "a part of the GPU was retired, from its next reset on"),
    157: (I, "a part of the GPU could not be retired"),
    158: (R, "the GPU timed out for good"),
    160: (I, "a memory channel was retired"),
    161: (I, "a memory channel could not be retired"),
    167: (F, "the PCIe connection timed out for good"),
    169: (R, "its security processor halted"),
    171: (F, "device memory error, not corrected"),
    172: (F, "on-chip memory error, not corrected"),
}
# SXids for which "Fatal" or "Non-fatal" in the line is not enough; from NVIDIA's Fabric Manager guide.
_FABRIC = (F, "the NVLink fabric of this machine stopped")
SXIDS: dict[int, tuple[Severity, str]] = {
    **dict.fromkeys((10003, 12020, 22003, 22011, *range(23001, 23018)), _FABRIC),
    **dict.fromkeys((11004, 12028), (R, "NVLink traffic of a GPU stalls")),  # their lines say non-fatal
}
SWITCHES = "nvswitch"  # all NVLink switches of a machine, as one device
# Errors of newer NVLink connections: the line says whether this one is fatal to the connection. Most are not.
LINKS = range(144, 151)
_FATAL_LINK = re.compile(r"(?<!non)(?<!non-)\bfatal\b", re.IGNORECASE)
# The line that names a changed recovery action: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset
# Required)".
RECOVERY_CHANGED = 154
_RECOVERY: dict[str, Severity] = {
    "none": I,
    "drain p2p": R,
    "drain and reset": R,
    "gpu reset required": R,
    "node reboot required": F,
}

# Recovery actions that the driver requests until they are done, by NVML's number.
RECOVERY_ACTIONS = (
    "NVML_GPU_RECOVERY_ACTION_NONE",
    "NVML_GPU_RECOVERY_ACTION_GPU_RESET",
    "NVML_GPU_RECOVERY_ACTION_NODE_REBOOT",
    "NVML_GPU_RECOVERY_ACTION_DRAIN_P2P",
    "NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET",
    "NVML_GPU_RECOVERY_ACTION_GPU_RESET_BUS",
)

# NVML's errors and recovery actions by name. Errors that only concern a call or a process are left out.
NAMES: dict[str, tuple[Severity, str]] = {
    "NVML_ERROR_GPU_IS_LOST": (F, "the GPU has fallen off the bus"),
    "NVML_ERROR_GPU_NOT_FOUND": (F, "there is no such GPU any more"),
    "NVML_ERROR_RESET_REQUIRED": (R, "the GPU must be reset"),
    "NVML_ERROR_IRQ_ISSUE": (R, "the GPU's interrupts do not arrive"),
    "NVML_GPU_RECOVERY_ACTION_NONE": (I, "no recovery is needed"),
    "NVML_GPU_RECOVERY_ACTION_GPU_RESET": (R, "the GPU must be reset"),
    "NVML_GPU_RECOVERY_ACTION_DRAIN_P2P": (R, "its peers' work must leave"),
    "NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET": (R, "its work must leave, and the GPU be reset"),
    "NVML_GPU_RECOVERY_ACTION_NODE_REBOOT": (F, "the machine must be restarted"),
    "NVML_GPU_RECOVERY_ACTION_GPU_RESET_BUS": (R, "the GPU's bus must be reset"),
}

# "NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=python3, GPU has fallen off the bus." Older drivers leave "PCI:" out;
# a part of a divided GPU adds "GPU-I:05" to the address.
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)[^)]*\): (?P<number>\d{1,6})\b,?(?P<text>.*)")
# "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up". Lines of the same report that begin
# with "Data" or "Severity" after the number have its registers, and are left out.
_SWITCH_LINE = re.compile(
    r"(?P<name>nvidia-nvswitch\d{1,4}): SXid \((?:PCI:)?(?P<address>[0-9a-fA-F:.]+)\): (?P<number>\d{1,6}), "
    r"(?P<fatal>Fatal|Non-?fatal)\b,?(?P<text>.*)",
    re.IGNORECASE,
)
_PID = re.compile(r"\bpid='?(?P<pid>\d+)")
_CHANGED = re.compile(r"\bto 0x[0-9a-fA-F]+ \((?P<action>[^)]*)\)")
_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.[0-7])?")
TEXT_CHARS_MAX = 200  # a reason is read by people, in one line


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """A fault that a device reported. `number` is 0 if the fault has only a name, and an SXid if `device` is
    `SWITCHES`; `pid` is the process that the driver blames, or 0. `recovery`: the report is the driver's current
    recovery action; if it is IGNORABLE, the driver requires none, or none any more."""

    device: str
    severity: Severity
    reason: str
    number: int = 0
    pid: int = 0
    recovery: bool = False


class Source(Protocol):
    """A source of device faults. Implemented by `fault_sources.KernelLog` and `fault_sources.NvmlWatch`."""

    name: str

    @property
    def state(self) -> str:
        """Return what the source reads, or why it cannot; for people."""

    def start(self) -> None: ...

    def poll(self) -> list[DeviceFault]:
        """Return the faults since the last call, in order, without waiting."""

    def stop(self) -> None:
        """Stop reading, without waiting."""


def device_address(text: str) -> str | None:
    """Return a PCI address in one spelling (`0000:3b:00`); None if the text is no address. NVML writes addresses
    differently (`00000000:3B:00.0`) than the kernel's log."""
    found = _ADDRESS.fullmatch(text.strip())
    if found is None:
        return None
    domain, bus, device = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def parse_line(line: str) -> DeviceFault | None:
    """Return the fault that a line of the kernel's log reports; None: it reports none."""
    if (switch := _SWITCH_LINE.search(line)) is not None:
        return _switch_fault(switch)
    found = _LINE.search(line)
    device = device_address(found["device"]) if found else None
    if found is None or device is None:
        return None
    pid = _PID.search(found["text"])
    return fault_of(device, int(found["number"]), found["text"], pid=int(pid["pid"]) if pid else 0)


def _switch_fault(found: re.Match[str]) -> DeviceFault:
    number, fatal = int(found["number"]), found["fatal"].lower() == "fatal"
    by_word = (R, "an NVLink port failed") if fatal else (I, "an NVLink error")
    severity, meaning = SXIDS.get(number, by_word)
    if severity is F and not fatal:  # the driver's line decides: its version knows better
        severity, meaning = by_word
    said = f"{found['name']} {found['address']}: {found['text'].strip(' ,')[:TEXT_CHARS_MAX]}"
    return DeviceFault(SWITCHES, severity, f"SXid {number}: {meaning} ({said})", number)


def fault_of(device: str, number: int, text: str = "", *, pid: int = 0) -> DeviceFault:
    """Return the fault of an Xid number, from the log or from an NVML event; `text`: the driver's own words."""
    if number == RECOVERY_CHANGED:
        changed = _CHANGED.search(text)  # NVML's events have no text; its recovery action is read instead
        action = changed["action"] if changed else "not told"
        severity = _RECOVERY.get(action.lower(), R) if changed else I
        return DeviceFault(device, severity, f"Xid {number}: recovery asked for: {action}", number, pid, bool(changed))
    if number in LINKS:
        severity, meaning = (R, "an NVLink connection failed") if _FATAL_LINK.search(text) else (I, "an NVLink error")
    else:
        severity, meaning = XIDS.get(number, (I, "a number that is not known here"))
    said = f" ({text.strip(' ,')[:TEXT_CHARS_MAX]})" if text.strip(" ,") else ""
    return DeviceFault(device, severity, f"Xid {number}: {meaning}{said}", number, pid)


def fault_named(device: str, name: str) -> DeviceFault | None:
    """Return the fault that an error's name stands for; None if it is no device fault."""
    row = NAMES.get(name)
    if row is None:
        return None
    return DeviceFault(device, row[0], f"{name}: {row[1]}", recovery=name in RECOVERY_ACTIONS)
