"""GPUs' faults from NVIDIA's management library, watched in a thread of its own: a call takes as long as the driver
does, and a driver whose GPU fell off its bus may take long, or for ever. Nobody waits for that thread.

Two things are asked. Events tell of an Xid in the moment it happens, and are gone with whoever did not listen. What
recovery the driver asks for stands until it was done, so that it is known to one who starts after the fault, and so is
that it was done.

Always true: what was heard waits for `poll`, the latest `HEARD_MAX` of it; what is asked for of a GPU is told when
it is first known, and when it changes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from ctypes import c_void_p

from holdfast.health.device_faults import RECOVERY_ACTIONS, Fault, fault_named, fault_of
from holdfast.health.nvml import LIBRARY, Gpu, Nvml, NvmlError

log = logging.getLogger("holdfast.devices")

WAIT_MS = 500  # for an event; then somebody may have asked to stop
LOOK_WAITS = 10  # what the driver asks for is looked up every 5 s, and after every event
HEARD_MAX = 1024


class NvmlWatch:
    """`library`: what to load."""

    name = "NVML"

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = library
        self._heard = deque[Fault](maxlen=HEARD_MAX)
        self._stopping = threading.Event()
        self._said: dict[str, str] = {}  # by device, what it was last asked for, or its error
        self.state = "not started"

    def __repr__(self) -> str:
        return f"<NvmlWatch {self._library}: {self.state}>"

    def start(self) -> None:
        self.state = "starting"
        # A daemon: it may hang in the driver, and no process is to stay for that.
        threading.Thread(target=self._run, name="nvml", daemon=True).start()

    def poll(self) -> list[Fault]:
        heard: list[Fault] = []
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
                self._look(nvml, gpu)
            for _ in range(LOOK_WAITS):
                if self._stopping.is_set() or self._listen(nvml, heard, events):
                    break
        nvml.close()

    def _register(self, nvml: Nvml, gpus: list[Gpu], events: c_void_p) -> tuple[dict[int, Gpu], str]:
        """Those whose events will come, by handle, and why others' will not."""
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
        """Wait for an event; True: one came."""
        try:
            event = nvml.wait(events, WAIT_MS) if heard else None
        except NvmlError as error:
            log.debug("%s", error)  # whose it is, each is asked
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

    def _look(self, nvml: Nvml, gpu: Gpu) -> None:
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
