"""Sources of device faults: the kernel's log (`KernelLog`: GPUs and NVLink switches) and NVIDIA's management library,
NVML (`NvmlWatch`: GPUs).

`KernelLog` reads new lines only, and only those of the drivers. Always true: reading never waits, and one poll reads a
bounded number of lines; lines that the kernel dropped unread (EPIPE) are skipped; an incomplete line is kept until the
rest of it is read.

`NvmlWatch` calls NVML in a separate thread, for which no other thread waits: a call may never return after a GPU fell
off its bus. It reads two things:
- Events: they report an Xid when it happens, and are lost if no process listens.
- The recovery action that the driver requests: it stays until it was done, so a process that starts after the fault
  sees it too.
NVML is bound with ctypes (a dozen functions that have not changed for years), so that no package must be installed: the
library comes with the driver. If it is missing, `state` says so.

Always true: the latest `HEARD_MAX` faults wait for `poll`; a GPU's recovery action is reported when it is first known
and when it changes; every failure is raised with NVML's name for it; a GPU is identified by its PCI address.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections import deque
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_longlong, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any

from holdfast.health.device_faults import (
    RECOVERY_ACTIONS,
    DeviceFault,
    device_address,
    fault_named,
    fault_of,
    parse_line,
)

log = logging.getLogger("holdfast.devices")

PATH = "/dev/kmsg"
# One read of the kernel's log is one record, which has at most 8 KiB.
READ_BYTES = 8192
# Reads per poll. With ten polls a second this is more lines than the kernel's rate limits let drivers write.
READS_MAX = 256
# A line is at most one record; a longer one is not the driver's.
LINE_BYTES_MAX = 2 * READ_BYTES
DRIVERS = ("NVRM: Xid", "nvidia-nvswitch")  # a GPU's, and an NVLink switch's


class KernelLog:
    """A reader of faults from the kernel's log at `path`, which may also be a pipe."""

    name = "kernel log"

    def __init__(self, path: str = PATH) -> None:
        self._path = path
        self._fd = -1
        self._half = b""
        self.state = "not started"

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

    def poll(self) -> list[DeviceFault]:
        heard: list[DeviceFault] = []
        for _ in range(READS_MAX if self._fd >= 0 else 0):
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # the kernel dropped unread lines; the next read continues after them
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


def _fault(line: bytes) -> DeviceFault | None:
    """Return the fault in a record (`priority,number,time,flags;text`), or None. Lines that only quote the driver begin
    differently and are ignored."""
    text = line.decode(errors="replace")
    head, found, rest = text.partition(";")
    said = rest if found and head[:1].isdigit() else text
    return parse_line(said) if said.startswith(DRIVERS) else None


LIBRARY = "libnvidia-ml.so.1"
XID_EVENT = 0x8  # nvmlEventTypeXidCriticalError
RECOVERY_ACTION_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, since driver 570
UUID_BYTES = 96
ERRORS = {
    1: "NVML_ERROR_UNINITIALIZED",
    2: "NVML_ERROR_INVALID_ARGUMENT",
    3: "NVML_ERROR_NOT_SUPPORTED",
    4: "NVML_ERROR_NO_PERMISSION",
    6: "NVML_ERROR_NOT_FOUND",
    9: "NVML_ERROR_DRIVER_NOT_LOADED",
    10: "NVML_ERROR_TIMEOUT",
    11: "NVML_ERROR_IRQ_ISSUE",
    12: "NVML_ERROR_LIBRARY_NOT_FOUND",
    13: "NVML_ERROR_FUNCTION_NOT_FOUND",
    15: "NVML_ERROR_GPU_IS_LOST",
    16: "NVML_ERROR_RESET_REQUIRED",
    17: "NVML_ERROR_OPERATING_SYSTEM",
    18: "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
    28: "NVML_ERROR_GPU_NOT_FOUND",
    999: "NVML_ERROR_UNKNOWN",
}
TIMEOUT = ERRORS[10]


class NvmlError(Exception):
    """A call has failed; `name` is NVML's name of the error."""

    def __init__(self, function: str, name: str) -> None:
        super().__init__(f"{function}: {name}")
        self.name = name


@dataclass(frozen=True, slots=True)
class Gpu:
    pci: str  # `device_faults.device_address`
    uuid: str
    handle: int


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("pci_device_id", c_uint),
        ("pci_subsystem_id", c_uint),
        ("bus_id", c_char * 32),
    )


class _EventData(ctypes.Structure):
    _fields_ = (
        ("device", c_void_p),
        ("event_type", c_ulonglong),
        ("event_data", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


class _FieldValue(ctypes.Structure):
    _fields_ = (
        ("field", c_uint),
        ("scope", c_uint),
        ("timestamp", c_longlong),
        ("latency_us", c_longlong),
        ("value_type", c_uint),
        ("result", c_uint),
        ("value", c_ulonglong),  # a union; of an unsigned int the low half
    )


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "nvmlInit_v2": (),
    "nvmlShutdown": (),
    "nvmlDeviceGetCount_v2": (POINTER(c_uint),),
    "nvmlDeviceGetHandleByIndex_v2": (c_uint, POINTER(c_void_p)),
    "nvmlDeviceGetPciInfo_v3": (c_void_p, POINTER(_PciInfo)),
    "nvmlDeviceGetUUID": (c_void_p, c_char_p, c_uint),
    "nvmlDeviceGetFieldValues": (c_void_p, c_int, POINTER(_FieldValue)),
    "nvmlEventSetCreate": (POINTER(c_void_p),),
    "nvmlDeviceRegisterEvents": (c_void_p, c_ulonglong, c_void_p),
    "nvmlEventSetWait_v2": (c_void_p, POINTER(_EventData), c_uint),
    "nvmlEventSetFree": (c_void_p,),
}


class Nvml:
    """The loaded and initialised library. Raises NvmlError if the library or the driver is missing. Calls may block in
    the driver, and release the interpreter lock meanwhile."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(library, f"not found ({error})") from error
        self("nvmlInit_v2")

    def __call__(self, function: str, *arguments: object) -> None:
        try:
            call = getattr(self._library, function)
        except AttributeError:
            raise NvmlError(function, "NVML_ERROR_FUNCTION_NOT_FOUND") from None
        call.argtypes, call.restype = SIGNATURES[function], c_uint
        if result := call(*arguments):
            raise NvmlError(function, ERRORS.get(result, f"error {result}"))

    def gpus(self) -> list[Gpu]:
        """Return the GPUs that answer; a lost one cannot report its address."""
        count = c_uint()
        self("nvmlDeviceGetCount_v2", byref(count))
        found: list[Gpu] = []
        for index in range(count.value):
            handle, pci, uuid = c_void_p(), _PciInfo(), ctypes.create_string_buffer(UUID_BYTES)
            try:
                self("nvmlDeviceGetHandleByIndex_v2", index, byref(handle))
                self("nvmlDeviceGetPciInfo_v3", handle, byref(pci))
                self("nvmlDeviceGetUUID", handle, uuid, UUID_BYTES)
            except NvmlError:
                continue
            address = device_address(pci.bus_id.decode())
            if address is not None and handle.value is not None:
                found.append(Gpu(address, uuid.value.decode(), handle.value))
        return found

    def recovery_action(self, gpu: Gpu) -> int:
        """Return the recovery action that the driver requests (an index of `device_faults.RECOVERY_ACTIONS`)."""
        value = _FieldValue(field=RECOVERY_ACTION_FIELD)
        self("nvmlDeviceGetFieldValues", gpu.handle, 1, byref(value))
        if value.result:
            raise NvmlError("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", ERRORS.get(value.result, f"error {value.result}"))
        return int(value.value) & 0xFFFFFFFF

    def open_events(self) -> c_void_p:
        events = c_void_p()
        self("nvmlEventSetCreate", byref(events))
        return events

    def register(self, gpu: Gpu, events: c_void_p) -> None:
        self("nvmlDeviceRegisterEvents", gpu.handle, XID_EVENT, events)

    def wait(self, events: c_void_p, timeout_ms: int) -> tuple[int, int] | None:
        """Return the handle and the number of the next Xid; None: none came in time."""
        data = _EventData()
        try:
            self("nvmlEventSetWait_v2", events, byref(data), timeout_ms)
        except NvmlError as error:
            if error.name == TIMEOUT:
                return None
            raise
        return (data.device or 0, data.event_data) if data.event_type & XID_EVENT else None

    def close(self) -> None:
        self("nvmlShutdown")


WAIT_MS = 500  # timeout of waiting for an event, after which `stop` is noticed
LOOK_WAITS = 10  # recovery actions are read every 5 s, and after every event
HEARD_MAX = 1024


class NvmlWatch:
    """A watcher of this machine's GPUs through NVML; `library` is the file to load."""

    name = "NVML"

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = library
        self._heard = deque[DeviceFault](maxlen=HEARD_MAX)
        self._stopping = threading.Event()
        self._said: dict[str, str] = {}  # by device: the last recovery action or error
        self.state = "not started"

    def start(self) -> None:
        self.state = "starting"
        # A daemon: it may hang in the driver, and must not keep the process from exiting.
        threading.Thread(target=self._run, name="nvml", daemon=True).start()

    def poll(self) -> list[DeviceFault]:
        heard: list[DeviceFault] = []
        while self._heard:
            heard.append(self._heard.popleft())
        return heard

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        try:
            nvml = Nvml(self._library)
            gpus = nvml.gpus()
            events = nvml.open_events()
        except NvmlError as error:
            self.state = f"not available: {error}"
            return
        heard, why = self._register(nvml, gpus, events)
        self.state = f"hears {len(heard)} of {len(gpus)} GPUs{f' ({why})' if why else ''}"
        while not self._stopping.is_set() and gpus:
            for gpu in gpus:
                self._read_recovery_action(nvml, gpu)
            for _ in range(LOOK_WAITS):
                if self._stopping.is_set() or self._listen(nvml, heard, events):
                    break
        nvml.close()

    def _register(self, nvml: Nvml, gpus: list[Gpu], events: c_void_p) -> tuple[dict[int, Gpu], str]:
        """Register for events; return the registered GPUs by handle, and why others could not be."""
        heard, why = {}, ""
        for gpu in gpus:
            try:
                nvml.register(gpu, events)
            except NvmlError as error:
                why = str(error)
            else:
                heard[gpu.handle] = gpu
        return heard, why

    def _listen(self, nvml: Nvml, heard: dict[int, Gpu], events: c_void_p) -> bool:
        """Wait for an event; return True if one came or waiting failed."""
        try:
            event = nvml.wait(events, WAIT_MS) if heard else None
        except NvmlError as error:
            log.debug("%s", error)  # the caller reads each GPU's state next
            self._stopping.wait(WAIT_MS / 1000)
            return True
        if event is None:
            if not heard:
                self._stopping.wait(WAIT_MS / 1000)
            return False
        handle, number = event
        if handle in heard:
            self._heard.append(fault_of(heard[handle].pci, number))
        return True

    def _read_recovery_action(self, nvml: Nvml, gpu: Gpu) -> None:
        try:
            action = nvml.recovery_action(gpu)
            said = RECOVERY_ACTIONS[action] if action < len(RECOVERY_ACTIONS) else f"recovery action {action}"
        except NvmlError as error:
            said = error.name
        if self._said.get(gpu.pci) == said:
            return
        self._said[gpu.pci] = said
        if (fault := fault_named(gpu.pci, said)) is not None:
            self._heard.append(fault)
        else:
            log.info("%s (%s): %s", gpu.pci, gpu.uuid, said)
