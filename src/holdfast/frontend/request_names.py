"""What a request is called: in its answer's `x-request-id`, and in the log where it failed.

Always true: a name is short and of harmless characters, whoever chose it, so it can neither forge a log line nor a
header; a client that sent none, or one that will not do, gets one of ours.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping

from holdfast.frontend.api.errors import ApiError

log = logging.getLogger("holdfast.frontend")

HEADER = b"x-request-id"
# Room for two UUIDs or a W3C trace parent; a longer one is somebody's mistake.
_NAME = re.compile(rb"[A-Za-z0-9._:/+=@,~-]{1,128}")


class RequestNames:
    """Names requests."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def of(self, headers: Mapping[bytes, bytes]) -> str:
        """The client's own name for it, or a new one."""
        given = headers.get(HEADER)
        if given is not None and _NAME.fullmatch(given):
            return given.decode()
        return f"req-{self._rng.getrandbits(96):024x}"


def log_failure(name: str, error: ApiError) -> None:
    """Our own failures are the operator's to see; what a client did wrong is between it and its answer."""
    level = logging.WARNING if error.status >= 500 else logging.DEBUG
    log.log(level, "request %s failed: %d %s: %s", name, error.status, error.code or error.type, error.message)
