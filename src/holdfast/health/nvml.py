"""NVIDIA's management library as this room calls it: which GPUs there are, their Xid events, and what recovery the
driver asks for. Bound by hand (a dozen functions that have not changed for years), so that nothing has to be installed:
the library comes with the driver, and where there is none that is told.

Always true: every failure is raised with the library's own name for it; a GPU is known by its PCI address.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_longlong, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any

from holdfast.health.device_faults import device_address

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
    """`name`: the library's own."""

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
    """The library, loaded and initialised: NvmlError where it is not there, or has no driver. Calls may take as long as
    the driver does, and let go of the interpreter meanwhile."""

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
        """Those that answer; one that is lost already cannot say its address."""
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
        """What the driver asks for (`device_faults.RECOVERY_ACTIONS`)."""
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
        """The handle and the number of the next Xid; None: none came in that time."""
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
