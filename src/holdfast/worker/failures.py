"""What a load, a wake or a planned handover may end with, in words; and the end of a process that cannot go on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from holdfast.memory.devices import DeviceError
from holdfast.memory.errors import StaleMemoryLayoutError, VaultRefused

log = logging.getLogger("holdfast.worker")

# Anything else is our own bug.
FAILURES = (TimeoutError, OSError, DeviceError, VaultRefused, StaleMemoryLayoutError)


def in_words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def exit_now(why: str, say_last: Callable[[str], None]) -> None:
    """A sticky device error, or a lost rank: nothing here can be trusted to end in order, and a fence waits for us. Who
    watches is told why; nobody is waited for."""
    log.critical("%s: exiting at once", why)
    try:
        say_last(why)
    finally:
        os._exit(1)
